"""Bundles as ONNX test data: ``model.onnx`` and directories ``test_data_set_0``, ``test_data_set_1``, ...

The directories contain ``input_0.pb``, ..., ``output_0.pb``, ...: TensorProto files. Tensors with names from the model
are matched by name. Tensors with other names are matched by position. The format lacks tolerances and case names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.bundles import Bundle, MethodTestCase, MethodTestSuite, Signature
from hil.bundles.checks import check_cases
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.case_files import read_case
from hil.controller.workloads.bundles.methods import (
    LEFT_OUT,
    import_methods,
    make_program,
    make_random_record,
    read_signatures,
    refuse_without_board,
)
from hil.core import own_version
from hil.core.files import resolve_within
from hil.errors import UsageError

_MODEL = "model.onnx"
_SET = re.compile(r"test_data_set_(\d+)")


def find_model(folder: Path) -> Path | None:
    """Return the model for a directory's test data: the only model, or ``model.onnx`` among multiple, or None."""
    models = sorted(folder.glob("*.onnx"))
    return models[0] if len(models) == 1 else next((model for model in models if model.name == _MODEL), None)


def list_data_sets(folder: Path) -> list[Path]:
    """Return the test data directories in a directory, by number."""
    found = ((match, one) for one in folder.iterdir() if one.is_dir() and (match := _SET.fullmatch(one.name)))
    return [resolve_within(folder, one) for _, one in sorted((int(match[1]), one) for match, one in found)]


def list_omitted_data_sets(folder: Path) -> list[str]:
    """Return a line per group of test data that cannot be used: without a number, or without a unique model."""
    mine = list_data_sets(folder)
    odd = [one.name for one in sorted(folder.glob("test_data_set*")) if one.is_dir() and one not in mine]
    left_out = [f"{folder}: {', '.join(odd)}: expected directories named test_data_set_N"] if odd else []
    if mine and find_model(folder) is None:
        left_out.append(f"{folder}: {len(mine)} test_data_set_N without a unique model: rename the model to {_MODEL}")
    return left_out


def read_onnx(path: Path, *, context: RunContext) -> Bundle:
    """Read a bundle for ONNX Runtime from a directory with a model and test data."""
    chosen = find_model(path)
    if chosen is None:
        raise UsageError(f"{path} is not a directory with one ONNX model", hint=f"rename the model to {_MODEL}")
    resolve_within(path, chosen)
    found = list_data_sets(path)
    if not found:
        raise UsageError(
            f"no test data found in {path}", hint="add directories named test_data_set_N next to the model"
        )
    (model,), _ = import_methods(chosen, (), context)
    main = next(name for name, file in model.files.items() if file == model.path)
    known = {"inputs": model.inputs, "outputs": model.outputs}
    artifact = make_program("onnxruntime", model.files, main, function=model.function, compiler="none", **known)
    ((name, signature),) = read_signatures(artifact, [model], context, ask=refuse_without_board).items()
    cases, invalid = _read_valid_cases(found, name, signature)
    made: dict[str, Any] = {
        "model": {"name": model.path.name, "format": "onnx", "digest": model.digest},
        "producer": dict(model.producer),
        "tools": {"hil": own_version()},
        **make_random_record({name: model}),
    }
    others = [one.name for one in sorted(path.glob("*.onnx")) if one != chosen]
    left_out = [f"{path}: {', '.join(others)}: the cases belong to {_MODEL}"] if others else []
    if left_out := [*left_out, *invalid, *list_omitted_data_sets(path)]:
        made[LEFT_OUT] = left_out
    return Bundle.create(artifact, [MethodTestSuite(name, cases)], signatures={name: signature}, made=made)


def _read_valid_cases(
    folders: Sequence[Path], method: str, signature: Signature
) -> tuple[list[MethodTestCase], list[str]]:
    """Return the valid cases, and a line per invalid directory. Raises UsageError if no case is valid."""
    cases: list[MethodTestCase] = []
    invalid: list[str] = []
    for folder in folders:
        try:
            case = replace(read_case(folder, signature), source="ONNX test data")
            check_cases(method, signature, [case])
        except UsageError as error:
            if folder == folders[-1] and not cases:
                raise
            invalid.append(f"{folder}: {error.message}")
        else:
            cases.append(case)
    return cases, invalid


def write_onnx(bundle: Bundle, path: Path, *, context: RunContext) -> None:
    """Write the model and the test data. Raises UsageError if the program is not an ONNX model."""
    program = bundle.program
    if program.runtime != "onnxruntime" or not program.main.endswith(".onnx"):
        raise UsageError(
            f"the bundle contains {program.main} for {program.runtime}, expected an ONNX model for onnxruntime",
            hint="create a bundle for onnxruntime: hil bundle create MODEL.onnx --runtime onnxruntime",
        )
    if len(bundle.methods) != 1:
        raise UsageError(f"the bundle has {len(bundle.methods)} methods, but an ONNX model has only one")
    from onnx import numpy_helper

    (method,) = bundle.methods
    path.mkdir(exist_ok=True)
    bundle.extract(path)
    (path / program.main).rename(path / _MODEL)
    for number, case in enumerate(method.cases):
        folder = path / f"test_data_set_{number}"
        folder.mkdir()
        for kind, tensors in (("input", case.inputs), ("output", case.expected_outputs)):
            for place, (name, array) in enumerate(tensors.items()):
                try:
                    tensor = numpy_helper.from_array(array, name)
                except Exception as error:  # a dtype that ONNX lacks
                    raise UsageError(f"ONNX does not support {kind} {name!r}: {error}") from error
                (folder / f"{kind}_{place}.pb").write_bytes(tensor.SerializeToString())
