"""Result for an output compared with its reference, for verdicts, records and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hil.compare.stats import STATISTICS, Statistics
from hil.core.results import Tolerance

_PLACES = ("first_index", "first_values", "worst_index", "worst_values")


@dataclass(frozen=True)
class CriterionResult:
    """Result for a single criterion."""

    criterion: str  # the criterion's text: ``top1>=0.99``
    value: float | None  # None if a function returned only a bool, or the output has no measurable value
    bound: float | None
    passed: bool
    reason: str = ""  # reason that a user's function returned


@dataclass(frozen=True)
class OutputComparison(Statistics):
    """Comparison between an output and the reference."""

    name: str
    passed: bool  # True if the output agrees, and is not blind or may be blind
    reason: str  # failure in one line; "" if the output passed
    dtype: str
    shape: tuple[int, ...]
    reference_dtype: str
    reference_shape: tuple[int, ...]
    tolerance: Tolerance | None = None  # tolerance used; None requires exact equality
    blind: bool = False  # True if the output agrees, but wrong outputs would also agree
    # largest difference that the reference's noise explains; None if noise was not measured
    noise: float | None = None
    unsteady: int | None = None  # number of elements that jump through rounding; None if noise was not measured
    flushed: int | None = None  # number of zeros at subnormal reference values; None if not checked
    notes: tuple[str, ...] = ()  # limits of a passing comparison
    # bound set by a declared arithmetic: see :attr:`hil.compare.control.Bound.record`.
    control: Mapping[str, Any] | None = None
    criteria: tuple[CriterionResult, ...] = ()  # results of the criteria that replace the tolerance
    # elements, mismatches, nonfinite, masked: counts as in :class:`hil.compare.stats.Stats`. Counts and statistics are
    # None if the shapes differ or no dtype can represent the values of both tensors.
    elements: int | None = None
    mismatches: int | None = None
    nonfinite: int | None = None
    masked: int | None = None
    # first_index, first_values: index of the first element out of tolerance, and both values.
    first_index: tuple[int, ...] | None = None
    first_values: tuple[Any, Any] | None = None
    # worst_index, worst_values: index of the element furthest out of tolerance, and both values.
    worst_index: tuple[int, ...] | None = None
    worst_values: tuple[Any, Any] | None = None

    @property
    def mismatch_share(self) -> float | None:
        """Fraction of elements out of tolerance, 0 to 1; None if the values were not compared."""
        if self.mismatches is None or self.elements is None:
            return None
        return self.mismatches / self.elements if self.elements else 0.0

    def record(self) -> dict[str, Any]:
        """Return the fields in record order: counts, statistics, then indices and values."""
        found = dict(vars(self))
        if self.tolerance is not None:
            found["tolerance"] = dict(vars(self.tolerance))
        found["criteria"] = [dict(vars(criterion)) for criterion in self.criteria]
        places = {name: found.pop(name) for name in _PLACES}
        return found | {one.key: found.pop(one.key) for one in STATISTICS} | places
