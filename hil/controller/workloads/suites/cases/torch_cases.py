"""Suites ``operators`` and ``models`` for flows that start from PyTorch: the tests of ExecuTorch's backend tester.

The tests are part of the installed ``executorch``. A test builds a module and inputs, and passes both to a runner. hil
replaces the runner by one that records the module and inputs. torch exports a model when the case is created. The cache
stores the program, the inputs and the module's outputs. Code that imports torch and executorch runs in a separate
process, because the import takes seconds.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import inspect
import itertools
import json
import pkgutil
import random
import unittest
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.screen.texts import get_first_line, import_hint
from hil.controller.storage.sources.packages import require_version
from hil.controller.storage.tensor_files import load_tensors, save_tensors
from hil.controller.workloads.suites.cases.spec import CaseData, CaseSpec, replace_forbidden
from hil.controller.workloads.suites.store import list_installed
from hil.core.digest import digest_of
from hil.core.files import read_file
from hil.core.scratch import make_temporary_folder
from hil.core.tensors import Array, TensorSpec
from hil.errors import ImportFailed, UsageError
from hil.formats.torch_values import convert_from_torch

MAKE_TIMEOUT_SECONDS = 900.0
# Tolerance that allows a hundred layers' rounding errors (SQNR at least 115 dB with XNNPACK). atol is relative to the
# largest output.
_MODEL_RTOL, _MODEL_ATOL = 1e-4, 1e-5
# Increase this when the cached test data changes.
_VERSION = 1
_TESTER = "executorch.backends.test.suite"
_INDEX = "index.json"
# Suite -> packages that the models need in addition to torch and executorch.
_PACKAGES: Mapping[str, tuple[str, ...]] = {"operators": (), "models": ("torchvision", "torchaudio")}

MODEL = "model.pt2"
INPUTS = "inputs"
EXPECTED = "expected"
_TEST = "test_"


class LeftOut(ImportFailed):
    """ExecuTorch's tester skips this test."""

    outcome = "SKIP"


@dataclass(frozen=True)
class TorchTest:
    """A model that a test of the tester lowers."""

    # pytest's test name without ``test_`` and the flow: ``add_dtype-float32``. It ends in ``.0``, ``.1`` if the
    # test lowers multiple models.
    id: str
    op: str  # the file's name without ``test_``
    # module, function, choice, number: for the model; see :func:`find_tests`.
    module: str
    function: str = ""
    choice: int = 0
    number: int = 0
    params: Mapping[str, str] = field(default_factory=dict)
    depends: bool = False  # whether the model is different for flows that quantize
    skipped: str = ""  # why the tester skips it
    problem: str = ""  # why the model is missing


def starts_from_torch(flow: Flow) -> bool:
    """Return whether a flow's programs are made from PyTorch models."""
    return flow.runtime == "executorch"


def make_torch_cases(suite: str, flow: Flow, context: RunContext) -> tuple[CaseSpec, ...]:
    """Return a case per model that the tests lower, by file and name. Nothing is exported yet.

    Raises:
        UsageError: torch or executorch is not installed.
    """
    versions, whole = _read_versions(suite), suite == "models"
    specs = []
    for test in list_torch_tests(suite, flow, context):
        made_by = {"versions": versions, "version": _VERSION, "quantize": bool(flow.recipe) and test.depends}
        made_by["test"] = [test.module, test.function, test.choice, test.number]
        content = digest_of(repr((made_by, flow)).encode())
        make = functools.partial(_make_case_data, test, made_by, flow, whole, context)
        op = "" if whole else test.op
        specs.append(CaseSpec(test.id, test.id, make, op=op, params=test.params, content=content))
    return tuple(specs)


def list_torch_tests(suite: str, flow: Flow, context: RunContext) -> list[TorchTest]:
    """Return the models that the tests lower. Arguments and errors as for :func:`make_torch_cases`."""
    quantize, versions = bool(flow.recipe), _read_versions(suite)

    def make(folder: Path) -> None:
        with make_temporary_folder("hil-torch-tests-") as scratch:
            arguments = {"package": f"{_TESTER}.{suite}", "quantize": quantize}
            found = context.isolated.call(
                find_tests, arguments, timeout=MAKE_TIMEOUT_SECONDS, log=Path(scratch) / "find.log"
            )
        (folder / _INDEX).write_text(json.dumps(found))

    key = Cache.key("torch-tests", suite=suite, quantize=quantize, versions=versions, version=_VERSION)
    entry, _ = context.cache.get_or_make(key, {"model": f"{suite} of executorch {versions['executorch']}"}, make)
    return [TorchTest(**item) for item in json.loads(read_file(entry / _INDEX))]


def _read_versions(suite: str) -> dict[str, str]:
    needed = {package: require_version(package, "executorch") for package in ("executorch", "torch")}
    return {**needed, **list_installed(_PACKAGES[suite])}


def _make_case_data(
    test: TorchTest, made_by: Mapping[str, Any], flow: Flow, whole: bool, context: RunContext, folder: Path
) -> CaseData:
    if test.skipped:
        raise LeftOut(f"skipped by ExecuTorch's tester: {test.skipped}")
    if test.problem:
        raise ImportFailed(test.problem)

    def make(entry: Path) -> None:
        where = {name: getattr(test, name) for name in ("module", "function", "choice", "number")}
        arguments = {**where, "quantize": made_by["quantize"], "folder": str(entry)}
        with convert_errors("import", f"exporting {test.id}", ImportFailed, f"cannot export {test.id}"):
            context.isolated.call(
                export_test, arguments, timeout=MAKE_TIMEOUT_SECONDS, log=folder / "logs" / "export.log"
            )

    entry, _ = context.cache.get_or_make(Cache.key("torch-test", **made_by), {"model": test.id}, make)
    path = entry / MODEL
    model = import_model(path, isolated=context.isolated, cache=context.cache)
    inputs, expected = (
        _name_tensors(specs, load_tensors(entry / kind), kind)
        for specs, kind in ((model.inputs or (), INPUTS), (model.outputs or (), EXPECTED))
    )
    if not flow.recipe:
        rtol, atol = _scale_tolerance(expected) if whole else (None, None)
        return CaseData(path, inputs, expected, rtol=rtol, atol=atol)
    made = apply_recipe(flow, path, [inputs], context, folder / "logs" / "recipe.log")
    return CaseData(made, inputs, plain_path=path, plain_expected=expected)


def _scale_tolerance(expected: Mapping[str, Array]) -> tuple[float | None, float | None]:
    """Return rtol and atol of a whole model, scaled by the largest output.

    A scale is necessary, because random weights give outputs of 1e-14 to 1e11.
    """
    sizes = [
        np.abs(array[np.isfinite(array)]).max(initial=0.0) for array in expected.values() if array.dtype.kind == "f"
    ]
    largest = float(max(sizes, default=0.0))
    return (_MODEL_RTOL, _MODEL_ATOL * largest) if largest else (None, None)


def _name_tensors(specs: tuple[TensorSpec, ...], tensors: Mapping[str, Array], kind: str) -> dict[str, Array]:
    """Map the exported program's names to tensors. Both are in call order."""
    if len(specs) != len(tensors):
        raise ImportFailed(f"the exported program has {len(specs)} {kind}, but the module has {len(tensors)}")
    return {spec.name: array for spec, array in zip(specs, tensors.values(), strict=True)}


@dataclass(frozen=True)
class _Lowering:
    """Arguments that a test passes to the runner."""

    model: Any
    inputs: tuple[Any, ...]
    random_inputs: bool
    dynamic_shapes: Any


class _Enough(Exception):
    """Ends a test after the requested model was recorded."""


class _Runner:
    """Replacement of the tester's runner. It records models and does not lower them.

    Args:
        quantize: whether the flow quantizes; some tests then build a different model.
        wanted: index of the call at which to stop the test, from 0. None runs the whole test.
    """

    def __init__(self, quantize: bool, wanted: int | None = None) -> None:
        self._quantize = quantize
        self._wanted = wanted
        self.was_read = False  # whether the test read :attr:`quantize`
        self.calls = 0  # models so far
        self.last: _Lowering | None = None

    @property
    def _flow(self) -> _Runner:
        return self

    @property
    def quantize(self) -> bool:
        """Whether the flow quantizes. The tester's flows have this attribute."""
        self.was_read = True
        return self._quantize

    def lower_and_run_model(
        self, model: Any, inputs: Any, generate_random_test_inputs: bool = True, dynamic_shapes: Any = None
    ) -> None:
        """Record a model. The tests call this method."""
        self.last = _Lowering(model, tuple(inputs), generate_random_test_inputs, dynamic_shapes)
        self.calls += 1
        if self._wanted is not None and self.calls > self._wanted:
            raise _Enough


def find_tests(package: str, quantize: bool) -> list[dict[str, Any]]:
    """Return the fields of a :class:`TorchTest` for all models in a package's tests. Called in the isolated process.

    ``choice`` is the index into a test's parameters; ``number`` is the model's index in the test. A test without a
    model has ``skipped`` or ``problem``.
    """
    try:
        root = importlib.import_module(package)
    except ImportError as error:
        raise UsageError(f"cannot import {package}: {error}", hint=import_hint(error)) from error
    names = sorted(one.name for one in pkgutil.iter_modules(root.__path__) if one.name.startswith(_TEST))
    return [asdict(test) for name in names for test in _find_module_tests(f"{package}.{name}", quantize)]


def _find_module_tests(module: str, quantize: bool) -> Iterator[TorchTest]:
    op = module.rpartition(".")[2].removeprefix(_TEST)
    try:
        found = importlib.import_module(module)
    except Exception as error:  # torchvision raises RuntimeError with a mismatched torch
        problem = f"cannot import {module}: {error}"
        yield TorchTest(op, op, module, problem="; ".join(filter(None, (problem, import_hint(error)))))
        return
    for function, choice, values, ids in _list_variants(found):
        params = {name: str(value).removeprefix("torch.") for name, value in values.items()}
        name = replace_forbidden("-".join([function.removeprefix(_TEST), *ids]))
        runner, skipped, problem = _Runner(quantize), "", ""
        try:
            _run_test(found, function, values, runner)
        except unittest.SkipTest as skip:
            skipped = str(skip) or "no reason given"
        except Exception as error:
            problem = f"the test {function} raised {type(error).__name__}: {error}"
        several = runner.calls + bool(skipped or problem) > 1
        test = TorchTest(name, op, module, function, choice, params=params, depends=runner.was_read)
        for number in range(runner.calls):
            yield replace(test, id=f"{name}.{number}" if several else name, number=number)
        if skipped or problem:
            last = f"{name}.{runner.calls}" if several else name
            yield replace(test, id=last, skipped=skipped, problem=problem)


def _list_variants(module: ModuleType) -> Iterator[tuple[str, int, dict[str, Any], list[str]]]:
    """Yield a module's test functions with all combinations of parameters: name, number, values, pytest's IDs."""
    for name, function in sorted(vars(module).items()):
        if not name.startswith(_TEST) or not inspect.isfunction(function):
            continue
        marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
        for choice, picked in enumerate(itertools.product(*map(_read_mark_values, marks))):
            values = {mark.args[0]: value for mark, (value, _) in zip(marks, picked, strict=True)}
            yield name, choice, values, [one for _, one in picked]


def _read_mark_values(mark: Any) -> list[tuple[Any, str]]:
    """Return a mark's values with pytest's IDs."""
    names, values = mark.kwargs.get("ids"), mark.args[1]
    if names is None:
        return [(value, str(value)) for value in values]
    return [(value, str(names(value) if callable(names) else names[index])) for index, value in enumerate(values)]


def _run_test(module: ModuleType, function: str, values: Mapping[str, Any], runner: _Runner) -> None:
    """Run a test with seeds derived from the test's name."""
    import torch

    seed = int.from_bytes(hashlib.sha256(f"{module.__name__}.{function}".encode()).digest()[:4], "little")
    random.seed(seed)
    torch.manual_seed(seed)
    getattr(module, function)(runner, **values)


def export_test(module: str, function: str, choice: int, number: int, quantize: bool, folder: str) -> None:
    """Export a model that a test lowers. Called in the isolated process.

    Args:
        module, function, choice, number: fields of :class:`TorchTest`.
        folder: directory for ``model.pt2``, the inputs (``inputs``) and the module's outputs (``expected``).
    """
    import torch

    lowering = make_lowering(module, function, choice, number, quantize)
    model = lowering.model.eval()
    inputs = _draw_random_like(lowering.inputs) if lowering.random_inputs else lowering.inputs
    with torch.no_grad():
        with _convert_errors("cannot run the module"):
            expected = model(*copy.deepcopy(inputs))
        with _convert_errors("torch.export failed"):
            # Use strict mode, as the tester does.
            program = torch.export.export(
                model, copy.deepcopy(lowering.inputs), dynamic_shapes=lowering.dynamic_shapes, strict=True
            )
    with _convert_errors("torch.export.save failed"):
        torch.export.save(program, Path(folder) / MODEL)
    for name, values in ((INPUTS, inputs), (EXPECTED, expected)):
        leaves = torch.utils._pytree.tree_leaves(values)
        tensors = [convert_from_torch(one) for one in leaves if isinstance(one, torch.Tensor)]
        save_tensors(Path(folder) / name, {str(position): array for position, array in enumerate(tensors)})


@contextlib.contextmanager
def _convert_errors(what: str) -> Iterator[None]:
    """Convert any exception of torch to ImportFailed, with torch's message."""
    try:
        yield
    except Exception as error:
        raise ImportFailed(f"{what}: {get_first_line(error)}", detail=str(error)) from error


def make_lowering(module: str, function: str, choice: int, number: int, quantize: bool) -> _Lowering:
    """Return a test's module and inputs. Weights and values are reproducible."""
    found = importlib.import_module(module)
    runner = _Runner(quantize, wanted=number)
    values = next(values for name, number, values, _ in _list_variants(found) if (name, number) == (function, choice))
    with contextlib.suppress(_Enough):
        _run_test(found, function, values, runner)
    if runner.last is None:
        raise ImportFailed(f"the test {function} does not lower a model")
    return runner.last


def _draw_random_like(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return normally distributed values with the inputs' shapes and dtypes, drawn as in the tester."""
    import torch

    return tuple(torch.randn(one.shape).to(one.dtype) for one in inputs)
