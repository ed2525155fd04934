"""The suites ``operators`` and ``models`` for flows that start from PyTorch: the tests of ExecuTorch's backend tester.

The installed ``executorch`` carries them. Each is exported by torch when its case is made, in a process of its own, and
kept in the cache with its inputs and what the module itself makes of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.models.flows import Flow, apply_recipe
from hil.controller.models.importers import import_model
from hil.controller.pipeline.case import Workshop
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import IsolatedCrash, IsolatedFailure, IsolatedTimeout
from hil.controller.storage.tensor_folder import load_tensors
from hil.controller.storage.versions import needed_version
from hil.controller.workloads.suites.spec import CaseData, CaseSpec
from hil.controller.workloads.suites.store import installed
from hil.controller.workloads.suites.torch_tests import EXPECTED, INPUTS, MODEL, export_test, find_tests
from hil.core.digest import digest_of
from hil.core.scratch import temporary_folder
from hil.core.tensors import Array, TensorSpec
from hil.errors import ImportFailed, StageTimeout

TORCH_RUNTIMES = ("executorch",)
MAKE_TIMEOUT_S = 900.0
# Rounding on the way through a hundred layers, of which XNNPACK gives 115 dB at least; atol is a share of the largest.
_MODEL_RTOL, _MODEL_ATOL = 1e-4, 1e-5
# Raise this when what is kept of the tests changes.
_VERSION = 1
_TESTER = "executorch.backends.test.suite"
_INDEX = "index.json"
# Suite -> packages besides torch and executorch that its models are made by. The tests that lack theirs say so.
_PACKAGES: Mapping[str, tuple[str, ...]] = {"operators": (), "models": ("torchvision", "torchaudio")}


class LeftOut(ImportFailed):
    """The tester itself skips this test."""

    outcome = "SKIP"


@dataclass(frozen=True)
class TorchTest:
    """One model that a test of the tester lowers.

    Attributes:
        id: the test's name as pytest has it, without ``test_`` and the flow: ``add_dtype-float32``; with ``.0``, ``.1``
            where the test lowers several models.
        op: its file's name without ``test_``.
        module, function, choice, number: where it is: see
            :func:`hil.controller.workloads.suites.torch_tests.find_tests`.
        params: what the test is parametrised by.
        depends: whether it is another model for a flow that quantises.
        skipped: why the tester itself skips it, or "".
        problem: why there is no model, or "".
    """

    id: str
    op: str
    module: str
    function: str
    choice: int
    number: int
    params: Mapping[str, str]
    depends: bool
    skipped: str
    problem: str


def starts_from_torch(flow: Flow) -> bool:
    """Whether a flow's programs are made from PyTorch's models."""
    return flow.runtime in TORCH_RUNTIMES


def quantises(flow: Flow) -> bool:
    """Whether a flow makes a quantised program of a model."""
    return bool(flow.recipe)


def torch_cases(suite: str, flow: Flow, shop: Workshop) -> tuple[CaseSpec, ...]:
    """A case for each model that the tester's tests lower, by file and name. Nothing is exported yet.

    Args:
        suite: ``operators`` or ``models``.
        flow: what they are for.
        shop: the cache, and a process to find the tests in.

    Raises:
        UsageError: torch or executorch is not installed.
        StorageError: the cache cannot be written.
    """
    quantize, versions = quantises(flow), _versions(suite)
    specs = []
    for test in torch_tests(suite, flow, shop):
        made_by = {"versions": versions, "version": _VERSION, "quantize": quantize and test.depends}
        made_by["test"] = [test.module, test.function, test.choice, test.number]
        content = digest_of(repr((made_by, flow)).encode())
        whole = suite == "models"
        specs.append(
            CaseSpec(
                test.id,
                test.id,
                functools.partial(_make, test, made_by, flow, whole),
                op="" if whole else test.op,
                params=test.params,
                content=content,
            )
        )
    return tuple(specs)


def torch_tests(suite: str, flow: Flow, shop: Workshop) -> list[TorchTest]:
    """The models that the tester's tests lower; arguments and errors as for :func:`torch_cases`."""
    quantize, versions = quantises(flow), _versions(suite)

    def make(folder: Path) -> None:
        with temporary_folder("hil-torch-tests-") as scratch:
            arguments = {"package": f"{_TESTER}.{suite}", "quantize": quantize}
            found = shop.isolated.call(find_tests, arguments, timeout=MAKE_TIMEOUT_S, log=Path(scratch) / "find.log")
        (folder / _INDEX).write_text(json.dumps(found))

    key = Cache.key("torch-tests", suite=suite, quantize=quantize, versions=versions, version=_VERSION)
    entry, _ = shop.cache.get_or_make(key, {"model": f"{suite} of executorch {versions['executorch']}"}, make)
    return [TorchTest(**item) for item in json.loads((entry / _INDEX).read_text())]


def _versions(suite: str) -> dict[str, str]:
    needed = {package: needed_version(package, "executorch") for package in ("executorch", "torch")}
    return {**needed, **installed(_PACKAGES[suite])}


def _make(
    test: TorchTest, made_by: Mapping[str, Any], flow: Flow, whole: bool, shop: Workshop, folder: Path
) -> CaseData:
    if test.skipped:
        raise LeftOut(f"ExecuTorch's own tester skips it: {test.skipped}")
    if test.problem:
        raise ImportFailed(test.problem)

    def make(entry: Path) -> None:
        where = {name: getattr(test, name) for name in ("module", "function", "choice", "number")}
        arguments = {**where, "quantize": made_by["quantize"], "folder": str(entry)}
        try:
            shop.isolated.call(export_test, arguments, timeout=MAKE_TIMEOUT_S, log=folder / "logs" / "export.log")
        except IsolatedTimeout as error:
            raise StageTimeout(f"exporting {test.id} {error.message}", stage="import", detail=error.detail) from error
        except (IsolatedCrash, IsolatedFailure) as error:
            raise ImportFailed(f"{test.id} cannot be exported: {error.message}", detail=error.detail) from error

    entry, _ = shop.cache.get_or_make(Cache.key("torch-test", **made_by), {"model": test.id}, make)
    path = entry / MODEL
    model = import_model(path, isolated=shop.isolated, cache=shop.cache)
    inputs, expected = (
        _named(specs, load_tensors(entry / kind), kind)
        for specs, kind in ((model.inputs or (), INPUTS), (model.outputs or (), EXPECTED))
    )
    if not flow.recipe:
        rtol, atol = _model_tolerance(expected) if whole else (None, None)
        return CaseData(path, inputs, expected, rtol=rtol, atol=atol)
    made = apply_recipe(flow, path, [inputs], shop, folder / "logs" / "recipe.log")
    return CaseData(made, inputs, plain_path=path, plain_expected=expected)


def _model_tolerance(expected: Mapping[str, Array]) -> tuple[float | None, float | None]:
    """What a whole model may be off, measured by its largest output: those of random weights are 1e-14, or 1e11."""
    sizes = [
        np.abs(array[np.isfinite(array)]).max(initial=0.0) for array in expected.values() if array.dtype.kind == "f"
    ]
    largest = float(max(sizes, default=0.0))
    return (_MODEL_RTOL, _MODEL_ATOL * largest) if largest else (None, None)


def _named(specs: tuple[TensorSpec, ...], tensors: Mapping[str, Array], kind: str) -> dict[str, Array]:
    """Tensors under the names that the exported program has for them; both are in the order of the call."""
    if len(specs) != len(tensors):
        raise ImportFailed(f"the exported program has {len(specs)} {kind}, the module {len(tensors)}")
    return {spec.name: array for spec, array in zip(specs, tensors.values(), strict=True)}
