"""Words for results: stages and outcomes, and what a run gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hil import errors
from hil.core.tensors import Array


class Stage(str, Enum):
    """A stage of the pipeline, in order."""

    IMPORT = "import"
    COMPILE = "compile"
    PUSH = "push"
    LOAD = "load"
    RUN = "run"
    REFER = "refer"
    COMPARE = "compare"
    REPORT = "report"


class Outcome(str, Enum):
    """What one test case ended in."""

    PASS = "PASS"
    FAIL = "FAIL"
    BLIND = "BLIND"
    IMPORT_ERROR = "IMPORT_ERROR"
    COMPILE_ERROR = "COMPILE_ERROR"
    COMPILE_CRASH = "COMPILE_CRASH"
    LOAD_ERROR = "LOAD_ERROR"
    RUN_ERROR = "RUN_ERROR"
    RUN_CRASH = "RUN_CRASH"
    TIMEOUT = "TIMEOUT"
    FALLBACK = "FALLBACK"
    REFERENCE_ERROR = "REFERENCE_ERROR"
    BOARD_LOST = "BOARD_LOST"
    BLOB_DAMAGED = "BLOB_DAMAGED"
    BOARD_REFUSED = "BOARD_REFUSED"
    BOARD_UNREACHABLE = "BOARD_UNREACHABLE"
    SKIP = "SKIP"
    XFAIL = "XFAIL"
    XPASS = "XPASS"

    @property
    def exit_code(self) -> int:
        """The exit code that a command ends with when this is its gravest outcome."""
        if self in (Outcome.PASS, Outcome.SKIP, Outcome.XFAIL):
            return errors.EXIT_OK
        if self in (Outcome.FAIL, Outcome.BLIND, Outcome.XPASS):
            return errors.EXIT_FAIL
        return errors.EXIT_BOARD if self in BOARD_OUTCOMES else errors.EXIT_STAGE


BOARD_OUTCOMES = frozenset({Outcome.BOARD_LOST, Outcome.BLOB_DAMAGED, Outcome.BOARD_REFUSED, Outcome.BOARD_UNREACHABLE})
"""The outcomes that blame the board, or the way to it, and not the model."""


NEVER_IN = frozenset({Outcome.BOARD_REFUSED, Outcome.BOARD_UNREACHABLE})
"""The outcomes of an attempt that never came to the board: nothing was lost, and nothing is kept of it."""


def exit_code_of(outcomes: Iterable[Outcome]) -> int:
    """One exit code for many outcomes: 4, 3, 1 in that order of gravity, else 0; 5 where nothing ran at all."""
    ran = [outcome for outcome in outcomes if outcome is not Outcome.SKIP]
    return max((outcome.exit_code for outcome in ran), default=errors.EXIT_NOTHING_RAN)


@dataclass(frozen=True)
class Timings:
    """Wall seconds of each stage on the host, told apart; None where a stage did not take place.

    Time on the device itself is in :class:`RunResult`, measured by the board's own clock.
    """

    import_s: float | None = None
    compile_s: float | None = None
    push_s: float | None = None
    load_s: float | None = None
    warmup_s: float | None = None
    run_s: float | None = None
    fetch_s: float | None = None
    refer_s: float | None = None
    compare_s: float | None = None


@dataclass(frozen=True)
class Noise:
    """How far rounding alone moves an output of a reference.

    It is the largest difference that appears when every float input is moved by one unit of its dtype's eps, in any of
    a few runs.

    Attributes:
        absolute: the largest ``|a-b|``.
        beyond_rtol: the largest ``|a-b| - rtol*|b|``, with the dtype's default rtol; 0 where rtol allows for all.
        rms: the root mean square of ``|a-b|``, of the run in which it is largest.
    """

    absolute: float
    beyond_rtol: float
    rms: float


@dataclass(frozen=True)
class RunResult:
    """What running a program gave, on a board or through a reference.

    Attributes:
        source: who computed it, with version: ``sim: iree 3.13.0 local-task`` or ``onnxruntime 1.31.1``.
        outputs: output name -> tensor, in the program's order.
        iterations_ns: (start, end) of every timed iteration on the device's own monotonic clock; one after the other
            from 0 where it is known how long each took, but not when.
        peak_memory_bytes: the worker's peak resident memory, or None where it was not measured.
        cold: whether the first of the iterations was the program's first run since it was loaded.
        provenance: board, runtime, agent, clocks, temperatures: whatever is needed to know what was measured.
        noise: output name -> a reference's own noise, for those where it was measured.
    """

    source: str
    outputs: Mapping[str, Array]
    iterations_ns: tuple[tuple[int, int], ...] = ()
    peak_memory_bytes: int | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    cold: bool = False
    noise: Mapping[str, Noise] = field(default_factory=dict)

    @property
    def device_ns(self) -> list[int]:
        """How long each timed iteration took, in nanoseconds of the device's clock."""
        return [end - start for start, end in self.iterations_ns]


@dataclass(frozen=True)
class Tolerance:
    """``|a-b| <= atol + rtol*|b|``, where b is the reference."""

    rtol: float
    atol: float
