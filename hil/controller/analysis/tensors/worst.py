"""The elements of two tensors that are furthest apart, with their index and both values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.compare.values import part_of, reader
from hil.controller.analysis.tensors.elements import (
    SAME,
    Floats,
    difference,
    has_ulps,
    nonfinite,
    quick_difference,
    reals,
    ulps,
)
from hil.controller.analysis.tensors.planes import PIECE, Plane, Window
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import Array
from hil.core.text import visible

# How many digits tell two floats of so many bytes apart; longer ones are written in full.
_DIGITS = {1: 4, 2: 5, 4: 9}
# Gives the scores of elements, from both values and the difference.
Measure = Callable[[Array, Array, Floats], Floats]

# How elements are put in order, and what that is called.
ORDERS = {
    "excess": "how far out of tolerance; within it, how much of it they take",
    "abs": "absolute difference",
    "rel": "difference relative to the reference",
    "ulp": "representable values between",
}


@dataclass(frozen=True)
class Element:
    """An element of two tensors."""

    index: tuple[int, ...]
    actual: Any  # Python's own bool, int, float, complex or str
    reference: Any
    difference: float  # inf where only one is finite
    relative: float | None  # None where the reference is 0 or not finite
    ulp: int | None  # None where that is not counted
    mismatch: bool  # whether it is out of tolerance


def worst_elements(
    a: Tensor, b: Tensor, tolerance: Tolerance | None, *, by: str = "excess", most: int = 50
) -> list[Element]:
    """The elements that differ most, the worst first and of equally bad ones the first; equal ones are not told.

    NaN and infinities that are in one tensor alone come before all numbers.

    Args:
        tolerance: within which elements agree; None is exactly.
        by: one of :data:`ORDERS`.
    """
    measure = _measure(by, tolerance or Tolerance(0.0, 0.0), a, b)
    read_a, read_b = reader(a), reader(b)
    places, scores = np.empty(0, np.int64), np.empty(0)
    with np.errstate(all="ignore"):
        for start in range(0, a.size, PIECE):
            x, y = read_a(start, start + PIECE), read_b(start, start + PIECE)
            quick = quick_difference(x, y)
            if quick is not None and not quick.any():
                continue
            score = _scores(x, y, measure)
            chosen = _highest(score, most)
            if places.size == most:
                chosen = chosen[score[chosen] > scores[-1]]
            places = np.concatenate([places, chosen + start])
            scores = np.concatenate([scores, score[chosen]])
            order = np.argsort(-scores, kind="stable")[:most]
            places, scores = places[order], scores[order]
    return [element(a, b, np.unravel_index(int(flat), a.shape), tolerance) for flat in places]


def element(a: Tensor, b: Tensor, index: Any, tolerance: Tolerance | None) -> Element:
    """One element of two tensors of one shape."""
    place = tuple(int(one) for one in index)
    x, y = _one(a, place), _one(b, place)
    with np.errstate(all="ignore"):
        apart = math.inf if nonfinite(x, y)[0] > SAME else float(difference(x, y)[0])
        size = float(np.abs(reals(y))[0])
        counted = has_ulps(a.dtype, b.dtype) and math.isfinite(apart)
        limit = tolerance.atol + tolerance.rtol * size if tolerance is not None else 0.0
    return Element(
        place,
        python(x),
        python(y),
        difference=apart,
        relative=apart / size if size and math.isfinite(size) else None,
        ulp=int(ulps(x, y)[0]) if counted else None,
        mismatch=apart > limit or math.isinf(apart),
    )


def python(one: Array) -> Any:
    """The only element of an array as Python's own value: one of ml_dtypes is a float or an int."""
    value = one[0]
    if one.dtype.kind in "biufcOU":
        return value.item() if isinstance(value, np.generic) else value
    return int(value) if "int" in one.dtype.name else float(value)


def _one(array: Tensor, place: tuple[int, ...]) -> Array:
    return np.asarray(array[place], array.dtype.newbyteorder("=")).reshape(1)


def _scores(a: Array, b: Array, measure: Measure) -> Floats:
    """How bad each element is: inf where only one is finite, -inf where both are equal."""
    apart = difference(a, b)
    odd = nonfinite(a, b) > SAME
    found = measure(a, b, apart)
    found[odd] = np.inf
    found[(apart == 0) & ~odd] = -np.inf
    return found


def _highest(scores: Floats, most: int) -> npt.NDArray[np.int64]:
    """Where the highest scores are, of equal ones the first; those of -inf are left out."""
    if scores.size > most:
        least = np.partition(scores, scores.size - most)[scores.size - most]
        above = np.flatnonzero(scores > least)
        level = np.flatnonzero(scores == least)[: most - above.size]
        found = np.sort(np.concatenate([above, level]))
    else:
        found = np.arange(scores.size)
    return np.asarray(found[scores[found] > -np.inf], np.int64)


def _measure(by: str, tolerance: Tolerance, a: Tensor, b: Tensor) -> Measure:
    """What gives the score of elements by which they are put in order."""
    if by == "ulp" and has_ulps(a.dtype, b.dtype):
        return lambda x, y, apart: ulps(x, y).astype(np.float64)
    if by == "rel":

        def relative(x: Array, y: Array, apart: Floats) -> Floats:
            size = np.abs(reals(y))
            return np.where(size == 0, -1.0, apart / size)

        return relative
    if by == "excess":

        def excess(x: Array, y: Array, apart: Floats) -> Floats:
            limit = tolerance.atol + tolerance.rtol * np.abs(reals(y))
            # Those out of tolerance as hil compares them; of the others, all below 0, the share that they leave of it.
            return np.where(apart > limit, apart - limit, apart / limit - 1.0)

        return excess
    return lambda x, y, apart: apart.copy()


def worst_in(a: Tensor, b: Tensor, plane: Plane, part: Window, by: str) -> tuple[int, ...] | None:
    """The index of the worst element of a part of a plane; None where all are equal."""
    measure = _measure(by, Tolerance(0.0, 0.0), a, b)
    best = -math.inf
    place: tuple[int, int] | None = None
    with np.errstate(all="ignore"):
        for (top, left, x), (_, _, y) in zip(plane.read(a, part), plane.read(b, part), strict=True):
            score = _scores(x, y, measure)
            at = int(score.argmax())
            row, column = divmod(at, x.shape[1])
            here, found = (top + row, left + column), float(score.flat[at])
            # Of equally bad ones the first, whatever the order of the pieces.
            if found > best or (place is not None and found == best and here < place):
                best, place = found, here
    return None if place is None else plane.index_of(*place)


def exact(array: Tensor, index: tuple[int, ...]) -> str:
    """An element's value so that no two values look alike: of a NaN its bits too."""
    one = _one(array, index)
    value = python(one)
    if isinstance(value, str):
        return visible(repr(value))
    text = repr(value)
    if isinstance(value, (float, complex)) and not np.isfinite(value):
        part = part_of(one.dtype)
        bits = [f"0x{int(word):0{2 * part.itemsize}x}" for word in one.view(f"u{part.itemsize}")]
        text += f" (bits {' '.join(bits)})"
    elif isinstance(value, (float, complex)) and (digits := _DIGITS.get(part_of(one.dtype).itemsize)):
        text = f"{value:.{digits}g}"
    return text
