"""One output beside its reference: what a comparison found, for verdicts, records and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hil.compare.stats import STATISTICS, Statistics
from hil.core.results import Tolerance

_PLACES = ("first_index", "first_values", "worst_index", "worst_values")


@dataclass(frozen=True)
class CriterionResult:
    """One criterion of an output, judged."""

    criterion: str  # as it was given: ``top1>=0.99``
    value: float | None  # None where it has none: a function that only says yes or no, or nothing to measure
    bound: float | None
    passed: bool
    reason: str = ""  # what a function says


@dataclass(frozen=True)
class OutputComparison(Statistics):
    """One output beside its reference."""

    name: str
    passed: bool  # whether it agrees, and wrong answers would not
    reason: str  # why not, in a line; "" where it passed
    dtype: str
    shape: tuple[int, ...]
    reference_dtype: str
    reference_shape: tuple[int, ...]
    tolerance: Tolerance | None = None  # within which the values agree; None is exact
    blind: bool = False  # whether it agrees, but wrong answers would agree as well
    # the largest difference that the reference's own noise explains, where it was measured.
    noise: float | None = None
    unsteady: int | None = None  # how many elements rounding makes jump, where the noise was measured
    flushed: int | None = None  # how many values are 0 where the reference's are subnormal, where that was looked at
    notes: tuple[str, ...] = ()  # what limits a pass
    # the bound that a declared arithmetic set: see :attr:`hil.compare.control.Bound.record`.
    control: Mapping[str, Any] | None = None
    criteria: tuple[CriterionResult, ...] = ()  # what judges the output instead of the tolerance
    # elements, mismatches, nonfinite, masked: counts, as in :class:`hil.compare.stats.Stats`; None, as all statistics,
    # where the shapes differ or no dtype holds the values of both.
    elements: int | None = None
    mismatches: int | None = None
    nonfinite: int | None = None
    masked: int | None = None
    # first_index, first_values: of the first element out of tolerance, and both values there.
    first_index: tuple[int, ...] | None = None
    first_values: tuple[Any, Any] | None = None
    # worst_index, worst_values: the same of the one that is furthest out of tolerance.
    worst_index: tuple[int, ...] | None = None
    worst_values: tuple[Any, Any] | None = None

    @property
    def mismatch_share(self) -> float | None:
        """The share of elements that are out of tolerance, 0 to 1."""
        if self.mismatches is None or self.elements is None:
            return None
        return self.mismatches / self.elements if self.elements else 0.0

    def record(self) -> dict[str, Any]:
        """Return the fields as records have them: the statistics after the counts, then the places."""
        found = dict(vars(self))
        if self.tolerance is not None:
            found["tolerance"] = dict(vars(self.tolerance))
        found["criteria"] = [dict(vars(criterion)) for criterion in self.criteria]
        places = {name: found.pop(name) for name in _PLACES}
        return found | {one.key: found.pop(one.key) for one in STATISTICS} | places
