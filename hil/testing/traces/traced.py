"""Record the calls of a module, and generate random inputs that are equal in all traces."""

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
from hil.testing.traces.runners import BackendRunner, ProgramResult

TraceFunction = Callable[["TracedModule"], Any]


class TracedModule:
    """Module for a trace function. Calls of its methods are recorded in the trace.

    ``module.predict(x, rtol=1e-3)`` calls ``predict`` with x and records the call and the outputs, with this tolerance
    for the comparison. ``rtol`` and ``atol`` are not passed to the method. Outputs are NumPy arrays in the method's
    nesting.
    """

    def __init__(self, runner: BackendRunner, methods: tuple[str, ...], traced: TraceResult) -> None:
        self._runner = runner
        self._methods = methods
        self._traced = traced

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return partial(self._record_call, name)
        raise AttributeError(
            f"method {name!r} not found in {self._traced.trace.module_name}: {did_you_mean(name, self._methods)}"
            f"exported methods: {', '.join(self._methods)}"
        )

    def _record_call(
        self, method: str, /, *args: Any, rtol: float | None = None, atol: float | None = None, **named: Any
    ) -> Any:
        if named:
            raise UsageError(
                f"unsupported keyword argument of {method}: {', '.join(named)}",
                hint="use positional arguments; only rtol and atol are keywords",
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
            # Earlier calls take precedence: for each variable, keep the value from before its first call.
            trace.initial = {**called.answer.captured, **trace.initial}
        self._traced.answers.append(called.answer)
        return called.outputs


@dataclass
class TraceResult:
    """Result of a trace function on one backend."""

    trace: Trace
    answers: list[ProgramResult | None] = field(
        default_factory=list
    )  # results of the calls' programs; None for a call without a program
    error: HilError | None = None  # the error that ended the trace early, or None
    raised: Exception | None = None  # the original exception, if the trace function raised it
    seconds: float = 0.0  # duration on the host


def run_trace(
    function: TraceFunction,
    runner: BackendRunner,
    module_name: str,
    methods: Callable[[], tuple[str, ...]],
    backend: str,
    seed: int = 0,
) -> TraceResult:
    """Call a trace function with a new module.

    Random numbers are seeded before the module is created and before the call. If a stage fails or the function raises
    an exception, the result contains the trace so far.

    Args:
        methods: Returns the method names. The function is called after the module was created.
    """
    traced = TraceResult(Trace(module_name, backend, trace_name(function), _get_source(function)))
    try:
        set_random_seed(seed)
        runner.begin()
        set_random_seed(seed)
        function(TracedModule(runner, methods(), traced))
    except UsageError:
        raise
    except HilError as error:
        traced.error = error
    except Exception as error:  # the user's function may check results and raise any exception
        traced.raised = error
        traced.error = RunFailed(
            f"{traced.trace.name} raised {type(error).__name__}{_locate_error(function, error)}: {error}",
            stage=Stage.RUN.value,
            detail=traceback.format_exc(),
        )
    if traced.error is not None:
        traced.trace.error = str(traced.error)
    return traced


def trace_name(function: TraceFunction) -> str:
    """Return a trace's name: the name of its function. Raises UsageError if the function has no name."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise UsageError(f"trace function {function!r} requires a name", hint="define the function with def")
    return str(name)


def _locate_error(function: TraceFunction, error: Exception) -> str:
    """Return the line of the trace function where an error occurred, as text; "" if unknown."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _get_source(function: TraceFunction) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


def set_random_seed(seed: int = 0) -> None:
    """Seed the random numbers of Python, NumPy and, if loaded, TensorFlow. Called before each module and trace."""
    random.seed(seed)
    np.random.seed(seed)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)


def uniform(shape: Sequence[int] = (), dtype: Any = np.float32, low: float = -1.0, high: float = 1.0) -> Array:
    """Return uniform random values from NumPy's seeded generator. Values for integers and bools are truncated."""
    return np.random.uniform(low, high, tuple(shape)).astype(dtype)


def ndarange(shape: Sequence[int], dtype: Any = np.float32) -> Array:
    """Return 0, 1, 2, ... in a shape."""
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
