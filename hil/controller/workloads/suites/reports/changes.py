"""What counts as a difference of two results of one case: the rules of `hil suite diff`, one case at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hil.compare.stats import worst_of
from hil.controller.workloads.suites.reports.results import is_failing, number
from hil.controller.workloads.suites.store import CaseRecord

# Smaller differences are noise. Device times must also exceed the variation within a run: of 314 cases with 20
# iterations each, run twice on a busy machine, 41 medians differed by more than the ratio, and 3 of them by more than
# that.
ITERATIONS = 5
_DEVICE_NS = 50_000.0
_DEVICE_RATIO = 1.2
_SQNR_DB = 1.0
_MAX_ABS_RATIO = 2.0
_BYTES_RATIO = 1.02


@dataclass(frozen=True)
class Numbers:
    """The numbers of a case that are compared; None where there is none."""

    device_p50_ns: float | None = None
    device_p90_ns: float | None = None
    iterations: int = 0
    artifact_bytes: float | None = None
    # max_abs, sqnr_db: of all outputs the worst of each.
    max_abs: float | None = None
    sqnr_db: float | None = None
    outputs: Mapping[str, Numbers] = field(default_factory=dict)  # name -> its max_abs and sqnr_db

    @classmethod
    def of(cls, record: CaseRecord) -> Numbers:
        """The numbers of a suite's case."""
        worst = worst_of({key: number(one.get(key)) for key in ("max_abs", "sqnr_db")} for one in record.outputs)
        return cls(
            record.device_p50_ns,
            record.device_p90_ns,
            record.iterations,
            record.artifact_bytes,
            worst["max_abs"],
            worst["sqnr_db"],
            {
                str(one.get("name")): cls(max_abs=number(one.get("max_abs")), sqnr_db=number(one.get("sqnr_db")))
                for one in record.outputs
            },
        )


@dataclass(frozen=True)
class Change:
    """A number that changed beyond noise."""

    what: str  # the field of :class:`Numbers`
    before: float
    after: float
    ratio: float | None  # after/before; None for SQNR, a logarithm, and for a division by zero
    worse: bool  # whether it is slower, larger, or further from the reference
    output: str = ""  # of a case with several outputs the one that changed the most, for the worse if any did


def move_of(before: str, after: str) -> str:
    """``broke``, ``mended`` or ``still_failing``: what became of an outcome; "" for none of these."""
    failed, fails = is_failing(before), is_failing(after)
    if fails:
        return "still_failing" if failed else "broke"
    return "mended" if failed and after != "SKIP" else ""


def is_measured(was: Numbers, now: Numbers) -> bool:
    """Whether both device times are of enough iterations to be compared."""
    return min(was.iterations, now.iterations) >= ITERATIONS


def changes(was: Numbers, now: Numbers, *, size_counts: bool = True) -> Iterable[Change]:
    """Yield what changed; a program's size only where it counts (other cases in a program change its size)."""
    a, b = was.device_p50_ns, now.device_p50_ns
    if a and b and is_measured(was, now):
        faster = was if a < b else now
        if time_changed(a, b, faster.device_p90_ns or 0.0):
            yield Change("device_p50_ns", a, b, b / a, b > a)
    a, b = was.artifact_bytes, now.artifact_bytes
    if size_counts and a and b and size_changed(a, b):
        yield Change("artifact_bytes", a, b, b / a, b > a)
    for what in ("max_abs", "sqnr_db"):
        found = [change for name, a, b in _outputs(was, now) if (change := _error(what, name, a, b))]
        if found:
            yield max(found, key=lambda one: (one.worse, size_of(one.ratio, one.before, one.after)))


def _outputs(was: Numbers, now: Numbers) -> Iterable[tuple[str, Numbers, Numbers]]:
    """Yield what errors are compared of: the outputs that both have; the only ones of each whatever their names."""
    if max(len(was.outputs), len(now.outputs)) < 2:
        yield "", was, now
        return
    for name, before in was.outputs.items():
        if name in now.outputs:
            yield name, before, now.outputs[name]


def _error(what: str, output: str, was: Numbers, now: Numbers) -> Change | None:
    a, b = getattr(was, what), getattr(now, what)
    if a is None or b is None:
        return None
    if what == "sqnr_db":
        return Change(what, a, b, None, b < a, output) if sqnr_changed(a, b) else None
    return Change(what, a, b, b / a if a else None, b > a, output) if error_changed(a, b) else None


# The rules, of two numbers or of arrays of them: hence the operators.


def time_changed(a: Any, b: Any, faster_p90_ns: Any) -> Any:
    """Whether a device time changed; both are of enough iterations."""
    enough = (a >= _DEVICE_NS) & (b >= _DEVICE_NS)
    return enough & _beyond(a, b, _DEVICE_RATIO) & ((a > faster_p90_ns) | (b > faster_p90_ns))


def size_changed(a: Any, b: Any) -> Any:
    """Whether the size of a program changed; neither is 0."""
    return _beyond(a, b, _BYTES_RATIO)


def error_changed(a: Any, b: Any) -> Any:
    """Whether a largest error changed."""
    return (a != b) & ((a == 0) | (b == 0) | _beyond(a, b, _MAX_ABS_RATIO))


def sqnr_changed(a: Any, b: Any) -> Any:
    """Whether a signal-to-noise ratio changed; what is no number has."""
    return (a != b) & ((abs(a - b) < _SQNR_DB) ^ True)


def size_of(ratio: float | None, before: float, after: float) -> float:
    """How large a change is, to sort those of one number."""
    if ratio:
        return abs(math.log(ratio)) if math.isfinite(ratio) and ratio > 0 else math.inf
    difference = abs(after - before)
    return math.inf if math.isnan(difference) else difference


def _beyond(a: Any, b: Any, ratio: float) -> Any:
    """Whether the larger one is more than so many times the smaller one."""
    return (a > ratio * b) | (b > ratio * a)
