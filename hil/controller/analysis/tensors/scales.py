"""Colour scales of maps: from numbers to palette indices. The limits are chosen from the numbers of the cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.analysis.tensors.elements import SAME, Codes, Floats
from hil.controller.analysis.tensors.maps import Map
from hil.core.results import Tolerance

# The first STEPS palette indices are the scale. The following indices mark cells without a number.
STEPS = 240
EQUAL = STEPS
# Scales that a user can select. Maps of values use only the first four.
SCALES: Mapping[str, str] = MappingProxyType(
    {
        "automatic": "automatic",
        "linear": "linear",
        "robust": "robust: without outliers",
        "symlog": "symlog: logarithmic on both sides of 0",
        "log": "logarithmic (differences)",
        "tolerance": "error ÷ tolerance (differences)",
    }
)
# Percentiles of the cells that a robust scale covers.
LOW_PERCENT, HIGH_PERCENT = 2, 98
# A scale is robust by default if all cells but the outliers would use less than this share of the colours.
_BLANK_SHARE = 0.1
_MAX_DECADES = 8.0
# The linear part of a symlog scale ends at this percentile of the magnitudes, at most this many decades below the
# largest magnitude, rounded down to a power of ten.
_LINEAR_PERCENT, _SYMLOG_DECADES = 5, 6.0
# Decades on each side of the limit, in a scale of errors divided by the tolerance.
_LIMIT_DECADES = 4


@dataclass(frozen=True)
class PaletteScale:
    """Mapping from numbers to colours, from ``low`` to ``high``. Numbers beyond the ends have the colour of the end.

    Attributes:
        kind: ``linear``, ``log``, ``symlog``, or ``limit`` (logarithmic, with different colours on both sides of 1).
        threshold: end of the linear part of a symlog scale.
        marks_zero: True for differences: 0 has the colour of equal elements.
        text: description of the scale for the legend.
        below, above: numbers of cells beyond the ends.
    """

    low: float
    high: float
    kind: str = "linear"
    threshold: float = 0.0
    marks_zero: bool = False
    text: str = "linear"
    below: int = 0
    above: int = 0

    def compute_shares(self, numbers: npt.NDArray[Any]) -> Floats:
        """Return the position of every number on the scale: 0 at ``low``, 1 at ``high``. Not clipped."""
        with np.errstate(all="ignore"):
            values = np.asarray(numbers, np.float64)
            if self.kind == "linear":
                # Halves, because the span of two finite numbers may overflow.
                span = self.high * 0.5 - self.low * 0.5
                return np.asarray((values * 0.5 - self.low * 0.5) / span if span else np.full(values.shape, 0.5))
            low, high = self._transform(np.array([self.low, self.high]))
            return np.asarray((self._transform(values) - low) / ((high - low) or 1.0))

    def quantize(self, numbers: npt.NDArray[Any]) -> Codes:
        """Return every number's palette index; EQUAL for 0 if the scale marks zeros."""
        with np.errstate(all="ignore"):
            shares = self.compute_shares(numbers)
            found: Codes = np.clip(np.nan_to_num(shares * (STEPS - 1)), 0, STEPS - 1).astype(np.uint8)
        if self.kind == "limit":
            # The limit itself is within tolerance.
            found = np.where(numbers > 1, np.maximum(found, STEPS // 2), np.minimum(found, STEPS // 2 - 1))
            found = found.astype(np.uint8)
        if self.marks_zero:
            found[numbers == 0] = EQUAL
        return found

    def list_ticks(self) -> list[tuple[float, float]]:
        """Return positions on the scale, 0 to 1, with their numbers: both ends, and marks between the ends."""
        if self.low == self.high:
            return [(0.5, self.low)]
        between = {"limit": [1.0], "symlog": [-self.threshold, 0.0, self.threshold]}.get(self.kind)
        if between is None:
            between = [math.sqrt(self.low) * math.sqrt(self.high)] if self.kind == "log" else []
            between = between or [self.low * 0.5 + self.high * 0.5]
        places = [self.low, *(one for one in between if self.low < one < self.high), self.high]
        return list(zip(self.compute_shares(np.array(places)).tolist(), places, strict=True))

    def _transform(self, values: Floats) -> Floats:
        if self.kind == "symlog":
            return np.asarray(np.sign(values) * np.log1p(np.abs(values) / self.threshold))
        return np.asarray(np.log10(values))


def choose_value_scale(maps: Sequence[Map], kind: str = "automatic") -> PaletteScale | None:
    """Return a common scale for multiple value maps, so that equal colours mean equal values.

    Args:
        kind: from :data:`SCALES`. ``automatic``, and scales for differences, select a linear scale, or a robust scale
            if outliers would blank the map.

    Returns:
        The scale, or None if the maps contain no number.
    """
    numbers = _list_finite(maps)
    if not numbers.size:
        return None
    low, high = float(numbers.min()), float(numbers.max())
    if kind == "symlog" and (threshold := _choose_threshold(numbers)):
        text = f"symlog: linear from {-threshold:g} to {threshold:g}, logarithmic beyond"
        return PaletteScale(low, high, "symlog", threshold, text=text)
    plain = PaletteScale(low, high)
    return _choose_between(plain, _make_robust(plain, numbers), numbers, kind)


def choose_error_scale(maps: Map | Sequence[Map], kind: str = "automatic") -> PaletteScale | None:
    """Return a scale for differences; None if no element differs.

    Args:
        kind: from :data:`SCALES`. ``automatic`` selects a logarithmic scale of one to eight decades up to the largest
            error, or a robust scale if outliers would blank the map.
    """
    numbers = _list_finite([maps] if isinstance(maps, Map) else maps)
    errors = numbers[numbers > 0]
    if not errors.size:
        return None
    high = float(errors.max())
    if kind == "linear":
        return PaletteScale(0.0, high, marks_zero=True)
    if kind == "symlog" and (threshold := _choose_threshold(errors)):
        text = f"symlog: linear up to {threshold:g}, logarithmic beyond"
        return PaletteScale(0.0, high, "symlog", threshold, marks_zero=True, text=text)
    low = min(max(float(errors.min()), high * 10**-_MAX_DECADES), high / 10)
    if low <= 0:  # the smallest error is subnormal
        return PaletteScale(0.0, high, marks_zero=True)
    plain = _count_beyond(PaletteScale(low, high, "log", marks_zero=True, text="logarithmic"), errors)
    if kind == "log":
        return plain
    return _choose_between(plain, _make_robust(plain, errors), errors, kind)


def choose_limit_scale(maps: Map | Sequence[Map], tolerance: Tolerance | None) -> PaletteScale | None:
    """Return a scale for errors divided by the tolerance, symmetric around 1; None if no element differs.

    Args:
        tolerance: the tolerance of the maps, for the legend. None requires exact equality.
    """
    maps = [maps] if isinstance(maps, Map) else maps
    numbers = _list_finite(maps)
    ratios = numbers[numbers > 0]
    if not ratios.size:
        return None
    decades = min(max(2, math.ceil(math.log10(float(ratios.max())))), _LIMIT_DECADES)
    # Elements that are NaN or infinite on one side only have no ratio, and are out of tolerance.
    out = sum(int(np.count_nonzero((one.numbers > 1) | (one.codes > SAME))) for one in maps)
    cells = sum(int(np.count_nonzero(one.filled)) for one in maps)
    text = f"error ÷ tolerance, logarithmic: 1 is the limit; {out} of {cells} cells out of tolerance"
    text += " (exact)" if tolerance is None else f" (rtol {tolerance.rtol:.3g}, atol {tolerance.atol:.3g})"
    scale = PaletteScale(10.0**-decades, 10.0**decades, "limit", marks_zero=True, text=text)
    return replace(scale, above=int(np.count_nonzero(ratios > scale.high)))


def _list_finite(maps: Sequence[Map]) -> Floats:
    found = [one.numbers[np.isfinite(one.numbers)] for one in maps]
    return np.concatenate(found) if found else np.empty(0)


def _choose_threshold(numbers: Floats) -> float:
    """Return the end of a symlog scale's linear part; 0 if all numbers are 0 or too small."""
    sizes = np.abs(numbers[numbers != 0])
    if not sizes.size:
        return 0.0
    least = max(float(np.percentile(sizes, _LINEAR_PERCENT)), float(sizes.max()) * 10**-_SYMLOG_DECADES)
    return float(10.0 ** math.floor(math.log10(least))) if least > 1e-300 else 0.0


def _make_robust(plain: PaletteScale, numbers: Floats) -> PaletteScale | None:
    """Return a scale from the lower to the upper percentile; None if these are equal, or all cells are covered.

    With these methods, the percentiles of up to 50 numbers exclude the smallest and the largest number.
    """
    low = float(np.percentile(numbers, LOW_PERCENT, method="higher"))
    high = float(np.percentile(numbers, HIGH_PERCENT, method="lower"))
    if plain.kind == "log":
        low = max(low, high * 10**-_MAX_DECADES)
    if not low < high:
        return None
    kind = "logarithmic, " if plain.kind == "log" else ""
    text = f"robust: {kind}{LOW_PERCENT}nd to {HIGH_PERCENT}th percentile of the cells"
    return _count_beyond(replace(plain, low=low, high=high, text=text), numbers)


def _count_beyond(scale: PaletteScale, numbers: Floats) -> PaletteScale:
    below, above = int(np.count_nonzero(numbers < scale.low)), int(np.count_nonzero(numbers > scale.high))
    return replace(scale, below=below, above=above)


def _choose_between(plain: PaletteScale, robust: PaletteScale | None, numbers: Floats, kind: str) -> PaletteScale:
    if robust is None:
        equal = kind == "robust"
        return replace(plain, text=f"{plain.text}: no outliers, or too few different values") if equal else plain
    if kind == "robust":
        return robust
    if kind == "linear":
        return plain
    first, last = plain.compute_shares(np.array([robust.low, robust.high])).clip(0.0, 1.0)
    if last - first >= _BLANK_SHARE:
        return plain
    return replace(robust, text=f"{robust.text}, because outliers would blank a {_NAMES[plain.kind]} map")


_NAMES = {"linear": "linear", "log": "logarithmic"}
