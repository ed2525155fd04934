"""A module whose calls are recorded, and random inputs that are the same in every trace."""

from __future__ import annotations

import inspect
import random
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hil.compare.tolerance import check_tolerance
from hil.controller.workloads.traces.trace import ModuleCall, Trace
from hil.core.results import Stage
from hil.core.tensors import Array
from hil.errors import HilError, RunFailed, UsageError, did_you_mean
from hil.testing.traces.runners import Answer, Runner

TraceFunction = Callable[["TracedModule"], Any]


class TracedModule:
    """A module as a trace function sees it: its methods are called, and each call goes into the trace.

    ``module.predict(x, rtol=1e-3)`` calls ``predict`` with x and records both that and what it returned, to be compared
    within this tolerance; ``rtol`` and ``atol`` are never given to the method. Outputs are numpy arrays, nested as the
    method nests them.
    """

    def __init__(self, runner: Runner, methods: tuple[str, ...], traced: Traced) -> None:
        self._runner = runner
        self._methods = methods
        self._traced = traced

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return partial(self._call, name)
        raise AttributeError(
            f"{self._traced.trace.module_name} exports no {name!r}: {did_you_mean(name, self._methods)}it exports "
            f"{', '.join(self._methods)}"
        )

    def _call(
        self, method: str, /, *args: Any, rtol: float | None = None, atol: float | None = None, **named: Any
    ) -> Any:
        if named:
            raise UsageError(
                f"{method} is given {', '.join(named)} by name, and a trace records arguments by their position",
                hint="give it without the name; only rtol and atol have one",
            )
        check_tolerance(rtol, atol)
        inputs = self._runner.inputs(method, args)
        called = self._runner.call(method, inputs)
        outputs = called.outputs if isinstance(called.outputs, tuple) else (called.outputs,)
        trace = self._traced.trace
        program = called.answer.program if called.answer is not None else None
        trace.calls.append(ModuleCall(method, inputs, outputs, rtol, atol, called.state, called.assigned, program))
        trace.ran_by = trace.ran_by or called.source
        if called.answer is not None:
            # What a variable held before a later call, an earlier one says.
            trace.initial = {**called.answer.captured, **trace.initial}
        self._traced.answers.append(called.answer)
        return called.outputs


@dataclass
class Traced:
    """What a trace function came to on one backend."""

    trace: Trace
    answers: list[Answer | None] = field(default_factory=list)  # of each call its program's, None if it had none
    error: HilError | None = None  # what ended it early, or None
    raised: Exception | None = None  # that, where it was the trace function's own
    seconds: float = 0.0  # how long it took on the host


def run_trace(
    function: TraceFunction,
    runner: Runner,
    module_name: str,
    methods: Callable[[], tuple[str, ...]],
    backend: str,
    seed: int = 0,
) -> Traced:
    """Call a trace function with a newly made module, random numbers seeded before either; return what there is of the
    trace where a stage failed, or the function itself raised something.

    ``methods`` is asked once the module was made.
    """
    traced = Traced(Trace(module_name, backend, trace_name(function), _source(function)))
    try:
        set_random_seed(seed)
        runner.begin()
        set_random_seed(seed)
        function(TracedModule(runner, methods(), traced))
    except UsageError:
        raise
    except HilError as error:
        traced.error = error
    except Exception as error:  # the user's own function, which may check what it gets back
        traced.raised = error
        traced.error = RunFailed(
            f"{traced.trace.name} raised {type(error).__name__}{_place(function, error)}: {error}",
            stage=Stage.RUN.value,
            detail=traceback.format_exc(),
        )
    if traced.error is not None:
        traced.trace.error = str(traced.error)
    return traced


def trace_name(function: TraceFunction) -> str:
    """Return what a trace is called: its function's name. Raises UsageError: it has none."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise UsageError(f"a trace is named after its function, and {function!r} has no name", hint="write it with def")
    return str(name)


def _place(function: TraceFunction, error: Exception) -> str:
    """Where in the trace function an error was raised, or in what that called."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _source(function: TraceFunction) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


def set_random_seed(seed: int = 0) -> None:
    """Seed Python's random numbers, numpy's and, where it is loaded, TensorFlow's: before each module and trace."""
    random.seed(seed)
    np.random.seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)


def uniform(shape: Sequence[int] = (), dtype: Any = np.float32, low: float = -1.0, high: float = 1.0) -> Array:
    """Uniform random values of a shape, from numpy's seeded generator; integers and bools are truncated ones."""
    return np.random.uniform(low, high, tuple(shape)).astype(dtype)


def ndarange(shape: Sequence[int], dtype: Any = np.float32) -> Array:
    """0, 1, 2, ... in a shape."""
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
