"""Rules of `hil suite diff` for differences between two results of a case."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hil.compare.stats import find_worst
from hil.controller.records.base import parse_number
from hil.controller.records.measurements.conditions import is_comparable
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.outcomes import is_failing

# Limits for differences; smaller differences are noise. A difference between device times must also exceed the
# variation within a run. In a test with 314 cases and 20 iterations, which ran twice on a busy machine, 41 medians
# differed by more than the ratio. Only 3 of them also exceeded the variation.
ITERATIONS = 5
_DEVICE_NS = 50_000.0
_DEVICE_RATIO = 1.2
_SQNR_DB = 1.0
_MAX_ABS_RATIO = 2.0
_BYTES_RATIO = 1.02
_ENERGY_RATIO = 1.2


@dataclass(frozen=True)
class Numbers:
    """Numbers of a case that are compared; None if missing."""

    device_p50_ns: float | None = None
    device_p90_ns: float | None = None
    iterations: int = 0
    is_comparable: bool = True  # False for times with grade F
    artifact_bytes: float | None = None
    # max_abs, sqnr_db: the worst value over all outputs.
    max_abs: float | None = None
    sqnr_db: float | None = None
    joules: float | None = None  # energy of an inference
    outputs: Mapping[str, Numbers] = field(default_factory=dict)  # output name -> max_abs and sqnr_db

    @classmethod
    def of(cls, record: CaseRecord) -> Numbers:
        """Return the numbers of a suite's case."""
        worst = find_worst(
            {key: parse_number(getattr(one, key)) for key in ("max_abs", "sqnr_db")} for one in record.outputs
        )
        return cls(
            record.device_p50_ns,
            record.device_p90_ns,
            record.iterations,
            is_comparable(record.grade),
            record.artifact_bytes,
            worst["max_abs"],
            worst["sqnr_db"],
            unit.joules if (unit := record.energy and record.energy.per_inference) else None,
            {
                one.name: cls(max_abs=parse_number(one.max_abs), sqnr_db=parse_number(one.sqnr_db))
                for one in record.outputs
            },
        )


@dataclass(frozen=True)
class NumberChange:
    """A number that changed by more than noise."""

    what: str  # a field in :class:`Numbers`
    before: float
    after: float
    ratio: float | None  # after/before; None for SQNR (a logarithm) and for a division by zero
    worse: bool  # slower, larger, or further from the reference
    output: str = ""  # output with the largest change; regressions have priority


def move_of(before: str, after: str) -> str:
    """Return ``broke``, ``fixed`` or ``still_failing`` for a change of outcome, or ""."""
    failed, fails = is_failing(before), is_failing(after)
    if fails:
        return "still_failing" if failed else "broke"
    return "fixed" if failed and after != "SKIP" else ""


def is_measured(was: Numbers, now: Numbers) -> bool:
    """Return whether both device times can be compared: enough iterations, and no grade F."""
    return min(was.iterations, now.iterations) >= ITERATIONS and was.is_comparable and now.is_comparable


def iter_changes(was: Numbers, now: Numbers, *, size_counts: bool = True) -> Iterable[NumberChange]:
    """Yield the changed numbers.

    Ignore program sizes if ``size_counts`` is false, because other cases affect the program size.
    """
    a, b = was.device_p50_ns, now.device_p50_ns
    if a and b and is_measured(was, now):
        faster = was if a < b else now
        if time_changed(a, b, faster.device_p90_ns or 0.0):
            yield NumberChange("device_p50_ns", a, b, b / a, b > a)
    a, b = was.artifact_bytes, now.artifact_bytes
    if size_counts and a and b and has_size_changed(a, b):
        yield NumberChange("artifact_bytes", a, b, b / a, b > a)
    a, b = was.joules, now.joules
    # An energy of 0 or less is an error of the idle power.
    if a and b and min(a, b) > 0 and has_energy_changed(a, b):
        yield NumberChange("joules", a, b, b / a, b > a)
    for what in ("max_abs", "sqnr_db"):
        found = [change for name, a, b in _pair_outputs(was, now) if (change := _find_error_change(what, name, a, b))]
        if found:
            yield max(found, key=lambda one: (one.worse, measure_change(one.ratio, one.before, one.after)))


def _pair_outputs(was: Numbers, now: Numbers) -> Iterable[tuple[str, Numbers, Numbers]]:
    """Yield pairs of outputs with the same name. If both cases have a single output, ignore the name."""
    if max(len(was.outputs), len(now.outputs)) < 2:
        yield "", was, now
        return
    for name, before in was.outputs.items():
        if name in now.outputs:
            yield name, before, now.outputs[name]


def _find_error_change(what: str, output: str, was: Numbers, now: Numbers) -> NumberChange | None:
    a, b = getattr(was, what), getattr(now, what)
    if a is None or b is None:
        return None
    if what == "sqnr_db":
        return NumberChange(what, a, b, None, b < a, output) if has_sqnr_changed(a, b) else None
    return NumberChange(what, a, b, b / a if a else None, b > a, output) if has_error_changed(a, b) else None


# These rules use bitwise operators, because they accept numbers or arrays.


def time_changed(a: Any, b: Any, faster_p90_ns: Any) -> Any:
    """Return whether a device time changed. Both must have enough iterations."""
    enough = (a >= _DEVICE_NS) & (b >= _DEVICE_NS)
    return enough & _exceeds_ratio(a, b, _DEVICE_RATIO) & ((a > faster_p90_ns) | (b > faster_p90_ns))


def has_size_changed(a: Any, b: Any) -> Any:
    """Return whether a program's size changed. Both must be nonzero."""
    return _exceeds_ratio(a, b, _BYTES_RATIO)


def has_energy_changed(a: Any, b: Any) -> Any:
    """Return whether an energy changed. Both must be positive."""
    return _exceeds_ratio(a, b, _ENERGY_RATIO)


def has_error_changed(a: Any, b: Any) -> Any:
    """Return whether a maximum error changed."""
    return (a != b) & ((a == 0) | (b == 0) | _exceeds_ratio(a, b, _MAX_ABS_RATIO))


def has_sqnr_changed(a: Any, b: Any) -> Any:
    """Return whether a signal-to-noise ratio changed. NaN counts as changed."""
    return (a != b) & ((abs(a - b) < _SQNR_DB) ^ True)


def measure_change(ratio: float | None, before: float, after: float) -> float:
    """Return a change's size, for sorting changes within a kind."""
    if ratio:
        return abs(math.log(ratio)) if math.isfinite(ratio) and ratio > 0 else math.inf
    difference = abs(after - before)
    return math.inf if math.isnan(difference) else difference


def _exceeds_ratio(a: Any, b: Any, ratio: float) -> Any:
    """Return whether the larger value exceeds ``ratio`` times the smaller one."""
    return (a > ratio * b) | (b > ratio * a)
