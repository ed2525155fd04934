"""Words for results: stages, outcomes, and what a run, a comparison and a case end in."""

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


@dataclass(frozen=True)
class OutputComparison:
    """One output beside its reference. The statistics are None where the shapes differ or no dtype holds both values.

    They are over the elements that are finite in both; ``mismatches`` also counts a NaN or infinity that the other
    lacks, ``nonfinite`` only those. ``max_rel`` is over elements whose reference is not 0; ``max_ulp`` counts
    representable values between the two (None for integers, and where the dtypes differ); ``sqnr_db`` is
    10*log10(sum(b^2)/sum((a-b)^2)), inf when equal; ``rmse``, ``cosine`` and ``sqnr_db`` leave out ``masked`` elements,
    which are at least half of their dtype's largest value in both; ``first_index`` and ``worst_index`` are of elements
    out of tolerance, with both values. ``blind``: it agrees, but wrong answers would agree as well. ``noise`` is the
    reference's own, where it was measured.
    """

    name: str
    passed: bool
    reason: str
    dtype: str
    shape: tuple[int, ...]
    reference_dtype: str
    reference_shape: tuple[int, ...]
    tolerance: Tolerance | None = None
    blind: bool = False
    noise: float | None = None
    elements: int | None = None
    mismatches: int | None = None
    nonfinite: int | None = None
    masked: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    mean_abs: float | None = None
    rmse: float | None = None
    cosine: float | None = None
    sqnr_db: float | None = None
    first_index: tuple[int, ...] | None = None
    first_values: tuple[Any, Any] | None = None
    worst_index: tuple[int, ...] | None = None
    worst_values: tuple[Any, Any] | None = None

    @property
    def mismatch_share(self) -> float | None:
        """The share of elements that are out of tolerance, 0 to 1."""
        if self.mismatches is None or self.elements is None:
            return None
        return self.mismatches / self.elements if self.elements else 0.0


@dataclass(frozen=True)
class Verdict:
    """A result beside one reference. True when every output agrees, and wrong ones would not.

    Attributes:
        outcome: PASS, FAIL, or BLIND where an output agrees that cannot be judged and none differs.
        against: the reference's ``source``.
        outputs: one comparison an output, in order.
        reason: why it failed, in a line; when it passed "", or that there was nothing to compare, or what was not
            judged because the user allowed it.
    """

    outcome: Outcome
    against: str
    outputs: tuple[OutputComparison, ...]
    reason: str = ""

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS
