"""ONNX backend node tests of the installed ``onnx`` package, with inputs, expected outputs and tolerances.

The package computes the tests in five seconds, once per version, in a separate process. The cache stores the tests in a
single archive as NumPy arrays, so that later runs do not need ``onnx``.
"""

from __future__ import annotations

import functools
import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.storage.cache import Cache
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.tensor_files import parse_pb
from hil.controller.workloads.suites.cases.spec import CaseData, CaseSpec
from hil.core.digest import digest_of
from hil.core.installed import get_version
from hil.core.npy import parse_npy, restore_dtype, save_npy
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, get_dtype_name

MAKE_TIMEOUT_SECONDS = 600.0
# Increase this when the archive's content changes.
_VERSION = 1
_ARCHIVE = "tests.zip"
_INDEX = "index.json"


def make_operator_cases(flow: Flow, context: RunContext) -> tuple[CaseSpec, ...]:
    """Return a case for every data set of the node tests, by name.

    Args:
        flow: the recipe is applied to the models. The expected outputs are the outputs of the plain model.
    """
    installed = get_version("onnx")
    key = Cache.key("node-tests", onnx=installed, numpy=np.__version__, version=_VERSION)

    def make(folder: Path) -> None:
        with make_temporary_folder("hil-node-tests-") as scratch:
            arguments = {"out": str(folder / _ARCHIVE)}
            context.isolated.call(
                write_archive, arguments, timeout=MAKE_TIMEOUT_SECONDS, log=Path(scratch) / "make.log"
            )

    entry, _ = context.cache.get_or_make(key, {"model": f"node tests of onnx {installed}"}, make)
    archive = zipfile.ZipFile(entry / _ARCHIVE)
    content = digest_of(repr((key, flow)).encode())
    specs = []
    for test in json.loads(archive.read(_INDEX)):
        make_case = functools.partial(_make_case_data, archive, test, flow, context)
        specs.append(CaseSpec(test["id"], test["id"], make_case, op=test["op"], content=content))
    return tuple(specs)


def _make_case_data(
    archive: zipfile.ZipFile, test: Mapping[str, Any], flow: Flow, context: RunContext, folder: Path
) -> CaseData:
    path = folder / "model.onnx"
    path.write_bytes(archive.read(test["model"]))
    inputs, expected = (
        {name: restore_dtype(parse_npy(archive.read(member)), dtype) for name, dtype, member in test[kind]}
        for kind in ("inputs", "outputs")
    )
    if not flow.recipe:
        return CaseData(path, inputs, expected, rtol=test["rtol"], atol=test["atol"])
    made = apply_recipe(flow, path, [inputs], context, folder / "prepare.log")
    return CaseData(made, inputs, plain_path=path, plain_expected=expected)


def write_archive(out: str) -> None:
    """Generate the tests and write them to an archive. Runs in a separate process."""
    with (
        make_temporary_folder("hil-node-tests-") as scratch,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        index = list(_write_tests(archive, Path(scratch)))
        archive.writestr(_INDEX, json.dumps(index))


def _write_tests(archive: zipfile.ZipFile, scratch: Path) -> Iterator[dict[str, Any]]:
    """Write the tests. Yield the index entry of the data sets, ordered by test name."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        # onnx divides by zero on purpose.
        warnings.simplefilter("ignore", RuntimeWarning)
        found: list[Any] = sorted(load_model_tests(kind="node"), key=lambda test: test.name)
    tests = {test.name.removeprefix("test_"): test for test in found if test.model is not None and test.data_sets}
    ops = {name: _join_op_types(test.model) for name, test in tests.items()}
    for name, test in tests.items():
        model = f"{name}/model.onnx"
        archive.writestr(model, test.model.SerializeToString())
        base = name.partition("_expanded")[0]
        several = len(test.data_sets) > 1
        for number, (inputs, outputs) in enumerate(test.data_sets):
            place = f"{name}/{number}"
            # Inputs and outputs are (name, dtype, name in the archive). Values that are not tensors are skipped:
            # sequences, absent optionals.
            yield {
                "id": f"{name}.{number}" if several else name,
                "op": ops[name] if base == name else f"{ops.get(base, '')} (expanded)".strip(),
                "model": model,
                "inputs": list(_write_tensors(archive, scratch, f"{place}/input", test.model.graph.input, inputs)),
                "outputs": list(_write_tensors(archive, scratch, f"{place}/output", test.model.graph.output, outputs)),
                "rtol": test.rtol,
                "atol": test.atol,
            }


def _join_op_types(model: Any) -> str:
    return "+".join(dict.fromkeys(node.op_type for node in model.graph.node))


def _write_tensors(
    archive: zipfile.ZipFile, scratch: Path, place: str, declared: Sequence[Any], values: Sequence[Any]
) -> Iterator[tuple[str, str, str]]:
    for number, (value_info, value) in enumerate(zip(declared, values, strict=False)):
        array = _as_array(value)
        if array is not None:
            member = f"{place}_{number}.npy"
            file = scratch / "tensor.npy"
            save_npy(file, array)
            archive.write(file, member)
            yield value_info.name, get_dtype_name(array.dtype), member


def _as_array(value: Any) -> Array | None:
    """Convert a value of a test to an array. Return None if the value is not a tensor."""
    from onnx import TensorProto, numpy_helper

    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        value = numpy_helper.from_array(np.char.decode(array) if array.dtype.kind == "S" else array)
    return parse_pb(value.SerializeToString()) if isinstance(value, TensorProto) else None
