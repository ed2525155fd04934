"""The elements with the largest differences between two tensors, with index and both values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.compare.values import get_part_dtype, make_reader
from hil.controller.analysis.tensors.elements import (
    SAME,
    Floats,
    classify_nonfinite,
    compute_difference,
    compute_ratio,
    count_ulps,
    has_ulps,
    to_reals,
    try_quick_difference,
)
from hil.controller.analysis.tensors.planes import PIECE, Plane, Window
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import Array
from hil.core.text import escape_controls

# Float size in bytes -> decimal digits that distinguish two values; larger floats are written in full.
_DIGITS = {1: 4, 2: 5, 4: 9}
# Computes element scores from both values and the difference.
Measure = Callable[[Array, Array, Floats], Floats]

# Element sort orders, with their descriptions.
ORDERS = {
    "excess": "amount out of tolerance, or share of the tolerance used",
    "abs": "absolute difference",
    "rel": "difference relative to the reference",
    "ulp": "representable values between",
}


@dataclass(frozen=True)
class Element:
    """An element of two tensors."""

    index: tuple[int, ...]
    actual: Any  # a Python bool, int, float, complex or str
    reference: Any
    difference: float  # inf if only one side is finite
    relative: float | None  # None if the reference is 0 or not finite
    ulp: int | None  # None if not countable
    mismatch: bool  # True if out of tolerance
    limit: float = 0.0  # largest difference within the tolerance


def find_worst_elements(
    a: Tensor, b: Tensor, tolerance: Tolerance | None, *, by: str = "excess", most: int = 50
) -> list[Element]:
    """Return the elements with the largest differences, the worst first. Ties are in reading order.

    Equal elements are left out. Elements that are NaN or infinite on one side only precede all numbers.

    Args:
        tolerance: elements within the tolerance agree. None requires exact equality.
        by: from :data:`ORDERS`.
    """
    measure = _choose_measure(by, tolerance or Tolerance(0.0, 0.0), a, b)
    read_a, read_b = make_reader(a), make_reader(b)
    places, scores = np.empty(0, np.int64), np.empty(0)
    with np.errstate(all="ignore"):
        for start in range(0, a.size, PIECE):
            x, y = read_a(start, start + PIECE), read_b(start, start + PIECE)
            quick = try_quick_difference(x, y)
            if quick is not None and not quick.any():
                continue
            score = _score_elements(x, y, measure)
            chosen = _find_highest(score, most)
            if places.size == most:
                chosen = chosen[score[chosen] > scores[-1]]
            places = np.concatenate([places, chosen + start])
            scores = np.concatenate([scores, score[chosen]])
            order = np.argsort(-scores, kind="stable")[:most]
            places, scores = places[order], scores[order]
    return [read_element(a, b, np.unravel_index(int(flat), a.shape), tolerance) for flat in places]


def read_element(a: Tensor, b: Tensor, index: Any, tolerance: Tolerance | None) -> Element:
    """Return an element from two tensors with the same shape."""
    place = tuple(int(one) for one in index)
    x, y = _read_element(a, place), _read_element(b, place)
    with np.errstate(all="ignore"):
        apart = math.inf if classify_nonfinite(x, y)[0] > SAME else float(compute_difference(x, y)[0])
        size = float(np.abs(to_reals(y))[0])
        counted = has_ulps(a.dtype, b.dtype) and math.isfinite(apart)
        limit = tolerance.atol + tolerance.rtol * size if tolerance is not None else 0.0
    return Element(
        place,
        to_python(x),
        to_python(y),
        difference=apart,
        relative=apart / size if size and math.isfinite(size) else None,
        ulp=int(count_ulps(x, y)[0]) if counted else None,
        mismatch=apart > limit or math.isinf(apart),
        limit=limit,
    )


def to_python(one: Array) -> Any:
    """Return the single element of an array as a Python value. Values of ml_dtypes become float or int."""
    value = one[0]
    if one.dtype.kind in "biufcOU":
        return value.item() if isinstance(value, np.generic) else value
    return int(value) if "int" in one.dtype.name else float(value)


def _read_element(array: Tensor, place: tuple[int, ...]) -> Array:
    return np.asarray(array[place], array.dtype.newbyteorder("=")).reshape(1)


def _score_elements(a: Array, b: Array, measure: Measure) -> Floats:
    """Return every element's score: inf if only one side is finite, -inf if both are equal."""
    apart = compute_difference(a, b)
    odd = classify_nonfinite(a, b) > SAME
    found = measure(a, b, apart)
    found[odd] = np.inf
    found[(apart == 0) & ~odd] = -np.inf
    return found


def _find_highest(scores: Floats, most: int) -> npt.NDArray[np.int64]:
    """Return the positions of the highest scores; ties are in order. Scores of -inf are omitted."""
    if scores.size > most:
        least = np.partition(scores, scores.size - most)[scores.size - most]
        above = np.flatnonzero(scores > least)
        level = np.flatnonzero(scores == least)[: most - above.size]
        found = np.sort(np.concatenate([above, level]))
    else:
        found = np.arange(scores.size)
    return np.asarray(found[scores[found] > -np.inf], np.int64)


def _choose_measure(by: str, tolerance: Tolerance, a: Tensor, b: Tensor) -> Measure:
    """Return the score function for an order."""
    if by == "ulp" and has_ulps(a.dtype, b.dtype):
        return lambda x, y, apart: count_ulps(x, y).astype(np.float64)
    if by == "rel":

        def measure_relative(x: Array, y: Array, apart: Floats) -> Floats:
            size = np.abs(to_reals(y))
            return np.where(size == 0, -1.0, apart / size)

        return measure_relative
    if by == "ratio":
        return lambda x, y, apart: compute_ratio(x, y, tolerance)
    if by == "excess":

        def measure_excess(x: Array, y: Array, apart: Floats) -> Floats:
            limit = tolerance.atol + tolerance.rtol * np.abs(to_reals(y))
            # Outside the tolerance, by hil's comparison: the excess. Within the tolerance: minus the unused share,
            # below 0.
            return np.where(apart > limit, apart - limit, apart / limit - 1.0)

        return measure_excess
    return lambda x, y, apart: apart.copy()


def find_worst_in(
    a: Tensor, b: Tensor, plane: Plane, part: Window, by: str, tolerance: Tolerance | None = None
) -> tuple[int, ...] | None:
    """Return the worst element's index in a plane's window; None if all are equal.

    Args:
        by: from :data:`ORDERS`, or ``ratio``: the difference divided by the tolerance.
        tolerance: None requires exact equality.
    """
    measure = _choose_measure(by, tolerance or Tolerance(0.0, 0.0), a, b)
    best = -math.inf
    place: tuple[int, int] | None = None
    with np.errstate(all="ignore"):
        for (top, left, x), (_, _, y) in zip(plane.read(a, part), plane.read(b, part), strict=True):
            score = _score_elements(x, y, measure)
            at = int(score.argmax())
            row, column = divmod(at, x.shape[1])
            here, found = (top + row, left + column), float(score.flat[at])
            # Ties are resolved in reading order, for any order of the pieces.
            if found > best or (place is not None and found == best and here < place):
                best, place = found, here
    return None if place is None else plane.index_of(*place)


def format_exact(array: Tensor, index: tuple[int, ...]) -> str:
    """Format an element's value so that different values have different texts. The text of a NaN includes the bits."""
    one = _read_element(array, index)
    value = to_python(one)
    if isinstance(value, str):
        return escape_controls(repr(value))
    text = repr(value)
    if isinstance(value, (float, complex)) and not np.isfinite(value):
        part = get_part_dtype(one.dtype)
        bits = [f"0x{int(word):0{2 * part.itemsize}x}" for word in one.view(f"u{part.itemsize}")]
        text += f" (bits {' '.join(bits)})"
    elif isinstance(value, (float, complex)) and (digits := _DIGITS.get(get_part_dtype(one.dtype).itemsize)):
        text = f"{value:.{digits}g}"
    return text
