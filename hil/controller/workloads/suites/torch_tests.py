"""The tests of ExecuTorch's backend tester as models: found by running them with a runner of ours, then exported.

Each test builds a module and its inputs and hands them to a runner; ours keeps them. All of this happens in a process
of its own: it imports torch and executorch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import itertools
import pkgutil
import random
import re
import unittest
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hil.controller.storage.error_text import first_line, import_hint
from hil.controller.storage.tensor_folder import save_tensors
from hil.errors import ImportFailed, UsageError
from hil.formats.torch_values import from_torch

MODEL = "model.pt2"
INPUTS = "inputs"
EXPECTED = "expected"
_TEST = "test_"
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._+-]")


@dataclass(frozen=True)
class _Lowering:
    """What a test asked to have lowered and run."""

    model: Any
    inputs: tuple[Any, ...]
    random_inputs: bool
    dynamic_shapes: Any


@dataclass(frozen=True)
class _Variant:
    """A test function with one choice of what it is parametrised by, and pytest's words for that."""

    function: str
    choice: int
    params: Mapping[str, Any]
    words: tuple[str, ...]


class _Enough(Exception):
    """What was looked for is there."""


class _Runner:
    """Stands where the tester's own runner stands: it keeps what it is to lower, and does nothing with it.

    Args:
        quantize: whether the flow quantises; some tests build another model then.
        wanted: how many calls to keep count of before the test is left; None lets it come to its end.
    """

    def __init__(self, quantize: bool, wanted: int | None = None) -> None:
        self._quantize = quantize
        self._wanted = wanted
        self.asked = False
        self.calls = 0
        self.last: _Lowering | None = None

    @property
    def _flow(self) -> _Runner:
        return self

    @property
    def quantize(self) -> bool:
        """Whether the flow quantises, as the tester's flows say it; ``asked`` says that a test looked."""
        self.asked = True
        return self._quantize

    def lower_and_run_model(
        self, model: Any, inputs: Any, generate_random_test_inputs: bool = True, dynamic_shapes: Any = None
    ) -> None:
        """What the tester's tests call."""
        self.last = _Lowering(model, tuple(inputs), generate_random_test_inputs, dynamic_shapes)
        self.calls += 1
        if self._wanted is not None and self.calls > self._wanted:
            raise _Enough


def find_tests(package: str, quantize: bool) -> list[dict[str, Any]]:
    """The tests of a package of the tester, in order of their names; called in the isolated process.

    Args:
        package: ``executorch.backends.test.suite.operators`` or ``...models``.
        quantize: whether they are for a flow that quantises.

    Returns:
        For each model that a test has lowered: ``id``, ``op`` (its file's name), ``module``, ``function``, ``params``
        (name -> text), ``choice`` (which values those are), ``number`` (of the model in its test), ``depends``
        (whether it is another model for a flow that quantises). One that lowers none has ``skipped``, the tester's own
        reason, or ``problem``, what went wrong.

    Raises:
        UsageError: the package cannot be imported.
    """
    try:
        root = importlib.import_module(package)
    except ImportError as error:
        raise UsageError(f"{package} cannot be imported: {error}", hint=import_hint(error)) from error
    found: list[dict[str, Any]] = []
    for name in sorted(one.name for one in pkgutil.iter_modules(root.__path__) if one.name.startswith(_TEST)):
        found += _tests_of(f"{package}.{name}", quantize)
    return found


def _tests_of(module: str, quantize: bool) -> Iterator[dict[str, Any]]:
    op = module.rpartition(".")[2].removeprefix(_TEST)
    about: dict[str, Any] = {"op": op, "module": module, "function": "", "params": {}, "choice": 0, "number": 0}
    about |= {"depends": False, "skipped": "", "problem": ""}
    try:
        found = importlib.import_module(module)
    except Exception as error:  # torchvision beside a torch that it was not built for raises a RuntimeError
        told = f"{module} cannot be imported: {error}"
        yield {**about, "id": op, "problem": "; ".join(filter(None, (told, import_hint(error))))}
        return
    for variant in _variants(found):
        about |= {"function": variant.function, "choice": variant.choice}
        about["params"] = {name: str(value).removeprefix("torch.") for name, value in variant.params.items()}
        name = _NOT_IN_IDS.sub("_", "-".join([variant.function.removeprefix(_TEST), *variant.words]))
        runner, ends = _Runner(quantize), {}
        try:
            _run(found, variant, runner)
        except unittest.SkipTest as skip:
            ends = {"skipped": str(skip)}
        except Exception as error:
            ends = {"problem": f"the test {variant.function} raises {type(error).__name__}: {error}"}
        about["depends"] = runner.asked
        several = runner.calls + len(ends) > 1
        for number in range(runner.calls):
            yield {**about, "id": f"{name}.{number}" if several else name, "number": number}
        if ends:
            yield {**about, **ends, "id": f"{name}.{runner.calls}" if several else name}


def _variants(module: ModuleType) -> Iterator[_Variant]:
    """A module's test functions with every choice of what they are parametrised by; pytest's own marks say it."""
    for name, function in sorted(vars(module).items()):
        if not name.startswith(_TEST) or not inspect.isfunction(function):
            continue
        marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
        for choice, picked in enumerate(itertools.product(*map(_values, marks))):
            params = {mark.args[0]: value for mark, (value, _) in zip(marks, picked, strict=True)}
            yield _Variant(name, choice, params, tuple(word for _, word in picked))


def _values(mark: Any) -> list[tuple[Any, str]]:
    """What a mark parametrises by, and how pytest calls each."""
    names, values = mark.kwargs.get("ids"), mark.args[1]
    if names is None:
        return [(value, str(value)) for value in values]
    return [(value, str(names(value) if callable(names) else names[place])) for place, value in enumerate(values)]


def _run(module: ModuleType, variant: _Variant, runner: _Runner) -> None:
    """Run a test; each draws the same weights and inputs every time."""
    import torch

    seed = int.from_bytes(hashlib.sha256(f"{module.__name__}.{variant.function}".encode()).digest()[:4], "little")
    random.seed(seed)
    torch.manual_seed(seed)
    getattr(module, variant.function)(runner, **variant.params)


def export_test(module: str, function: str, choice: int, number: int, quantize: bool, folder: str) -> None:
    """Export a model that a test has lowered; called in the isolated process.

    Args:
        module, function, choice, number: as :func:`find_tests` says.
        quantize: whether it is for a flow that quantises.
        folder: takes ``model.pt2``, the ``inputs`` and what the module itself makes of them, ``expected``.

    Raises:
        ImportFailed: the module does not run, or torch.export refuses it; the message is torch's own.
    """
    import torch

    lowering = lowering_of(module, function, choice, number, quantize)
    model = lowering.model.eval()
    inputs = _random_like(lowering.inputs) if lowering.random_inputs else lowering.inputs
    with torch.no_grad():
        try:
            expected = model(*copy.deepcopy(inputs))
        except Exception as error:
            raise ImportFailed(f"the module does not run: {first_line(error)}", detail=str(error)) from error
        try:
            # Strictly, as the tester does it.
            program = torch.export.export(
                model, copy.deepcopy(lowering.inputs), dynamic_shapes=lowering.dynamic_shapes, strict=True
            )
        except Exception as error:
            raise ImportFailed(f"torch.export refuses it: {first_line(error)}", detail=str(error)) from error
    try:
        torch.export.save(program, Path(folder) / MODEL)
    except Exception as error:
        raise ImportFailed(f"torch.export.save refuses it: {first_line(error)}", detail=str(error)) from error
    for name, values in ((INPUTS, inputs), (EXPECTED, expected)):
        leaves = torch.utils._pytree.tree_leaves(values)
        tensors = [from_torch(one) for one in leaves if isinstance(one, torch.Tensor)]
        save_tensors(Path(folder) / name, {str(position): array for position, array in enumerate(tensors)})


def lowering_of(module: str, function: str, choice: int, number: int, quantize: bool) -> _Lowering:
    """The module and inputs of a test, made anew: with the same weights and values each time."""
    found = importlib.import_module(module)
    runner = _Runner(quantize, wanted=number)
    variant = next(one for one in _variants(found) if (one.function, one.choice) == (function, choice))
    with contextlib.suppress(_Enough):
        _run(found, variant, runner)
    if runner.last is None:
        raise ImportFailed(f"the test {function} lowers no model")
    return runner.last


def _random_like(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Normal values of the inputs' shapes and dtypes, as the tester draws them."""
    import torch

    return tuple(torch.randn(one.shape).to(one.dtype) for one in inputs)
