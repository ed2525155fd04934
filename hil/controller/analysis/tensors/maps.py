"""A plane of two tensors, reduced to at most :data:`MAX_CELLS` cells per axis.

Errors are reduced to the maximum of a cell, so that a single wrong element is never averaged away. Every cell also
records which kinds of NaN and infinity it contains, and the map counts these elements. A map's memory does not grow
with the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.controller.analysis.tensors.elements import (
    FINITE,
    NAN_HERE,
    Codes,
    Floats,
    classify_nonfinite,
    compute_difference,
    compute_ratio,
    count_ulps,
    to_reals,
    try_quick_difference,
)
from hil.controller.analysis.tensors.planes import PIECE, Plane, Window
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import Array

# Maximum cells per axis, so that a cell is at least a pixel even on a screen with a width of 390 pixels.
MAX_CELLS = 320
# Reductions from a cell's values to a number; see :func:`make_value_map`.
POOLS = ("mean", "min", "max")
# Code bit set -> the most severe code.
_HIGHEST = np.array([max(one.bit_length() - 1, 0) for one in range(256)], np.uint8)
# Maximum number of temporary arrays with the length of a piece. Each element takes 16 bytes.
_ALIVE = 12

Cells = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
_Touched = tuple[slice, list[int], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Map:
    """A window of a plane, divided into cells.

    Attributes:
        numbers: a number per cell; NaN without a finite element.
        kinds: a bit set per cell, with a bit for every code among the elements, from
            :func:`hil.controller.analysis.tensors.elements.classify_nonfinite`.
        counts: element count per code.
        most: maximum cells per axis.
    """

    window: Window
    numbers: Floats
    kinds: Codes
    counts: Sequence[int]
    most: int = MAX_CELLS

    @cached_property
    def codes(self) -> Codes:
        """The most severe code per cell."""
        return _HIGHEST[self.kinds]

    @property
    def filled(self) -> npt.NDArray[np.bool_]:
        """True for cells with elements: a plane's last row may be short."""
        return np.asarray(self.kinds > 0)

    @property
    def elements(self) -> int:
        """Number of elements in the window."""
        return sum(self.counts)

    @property
    def cell(self) -> tuple[int, int]:
        """Maximum element rows and columns in a cell."""
        rows, columns = self.numbers.shape
        return -(-self.window.rows // max(rows, 1)), -(-self.window.columns // max(columns, 1))

    @property
    def ends(self) -> tuple[float, float] | None:
        """The smallest and the largest number; None without numbers."""
        found = self.numbers[np.isfinite(self.numbers)]
        return (float(found.min()), float(found.max())) if found.size else None

    def get_cell_window(self, row: int, column: int) -> Window:
        """Return the window with a cell's elements."""
        rows, columns = find_edges(self.window, self.most)
        top, left = self.window.top, self.window.left
        return Window(
            top + int(rows[row]), left + int(columns[column]), top + int(rows[row + 1]), left + int(columns[column + 1])
        )


def max_scratch_bytes(itemsize: int) -> int:
    """Return the maximum memory for making a map, in bytes, independent of tensor size.

    Args:
        itemsize: element size in bytes.
    """
    piece = PIECE * max(16, itemsize) * _ALIVE
    return piece + 4 * MAX_CELLS**2 * (8 + 8 + 8 + 1)


def find_edges(window: Window, most: int = MAX_CELLS) -> Cells:
    """Return a window's cell boundaries: row and column starts, with the last cell's end."""

    def split_axis(total: int) -> npt.NDArray[np.int64]:
        cells = min(total, most)
        return np.arange(cells + 1, dtype=np.int64) * total // max(cells, 1)

    return split_axis(window.rows), split_axis(window.columns)


@np.errstate(all="ignore")
def make_value_map(
    array: Tensor, plane: Plane, window: Window, *, pool: str = "mean", part: str = "", most: int = MAX_CELLS
) -> Map:
    """Return a map of values: the mean, minimum or maximum of every cell's finite values.

    Args:
        part: the part of complex numbers, from :data:`hil.controller.analysis.tensors.elements.PARTS`.
        most: maximum cells per axis.
    """
    pooled = _Pooled(window, {"min": np.minimum, "max": np.maximum}.get(pool, np.add), most)
    for top, left, piece in plane.read(array, window):
        values = to_reals(piece, part)
        codes = None
        if not np.isfinite(np.add.reduce(values, axis=None)):
            codes = classify_nonfinite(piece)
            values[codes != FINITE] = pooled.nothing
            # Sums of the finite values may still overflow to infinity if they are near float64's maximum.
        pooled.add(top, left, values, codes)
    return pooled.map()


@np.errstate(all="ignore")
def make_error_map(a: Tensor, b: Tensor, plane: Plane, window: Window, *, part: str = "", most: int = MAX_CELLS) -> Map:
    """Return a map of ``|a-b|``: the maximum over a cell's elements that are finite in both; NaN without any."""
    pooled = _Pooled(window, np.maximum, most)
    for top, left, x, y in _read_pairs(a, b, plane, window):
        codes = None
        found = try_quick_difference(x, y)
        if found is None:
            found = compute_difference(x, y, part)
            odd = classify_nonfinite(x, y)
            if odd.any():
                codes = odd
                found[codes != FINITE] = pooled.nothing
        pooled.add(top, left, found, codes)
    return pooled.map()


@np.errstate(all="ignore")
def make_ratio_map(
    a: Tensor, b: Tensor, plane: Plane, window: Window, tolerance: Tolerance | None, *, most: int = MAX_CELLS
) -> Map:
    """Return a map of ``|a-b| / (atol + rtol*|b|)``: the maximum over a cell's elements, as in an error map.

    For complex elements, ``|a-b|`` is the magnitude. If only equal elements pass, other elements have the largest
    float64.

    Args:
        tolerance: None requires exact equality.
    """
    pooled = _Pooled(window, np.maximum, most)
    for top, left, x, y in _read_pairs(a, b, plane, window):
        found = compute_ratio(x, y, tolerance)
        odd = classify_nonfinite(x, y)
        codes = odd if odd.any() else None
        if codes is not None:
            found[codes != FINITE] = pooled.nothing
        pooled.add(top, left, found, codes)
    return pooled.map()


@np.errstate(all="ignore")
def make_ulp_map(a: Tensor, b: Tensor, plane: Plane, window: Window) -> Map:
    """Return a map of the maximum number of representable values between a and b. See ``elements.ulps``."""
    pooled = _Pooled(window, np.maximum)
    for top, left, x, y in _read_pairs(a, b, plane, window):
        found = count_ulps(x, y).astype(np.float64)
        odd = None
        if x.dtype.kind != "f" or not np.isfinite(np.add.reduce(np.add(x, y), axis=None)):
            odd = classify_nonfinite(x, y)
            found[odd != FINITE] = pooled.nothing
        pooled.add(top, left, found, odd)
    return pooled.map()


@np.errstate(all="ignore")
def make_nonfinite_map(array: Tensor, plane: Plane, window: Window) -> Map:
    """Return a map of the NaN and infinities in a tensor without a reference."""
    pooled = _Pooled(window, np.maximum)
    for top, left, piece in plane.read(array, window):
        codes = classify_nonfinite(piece)
        pooled.add(top, left, np.zeros(piece.shape), codes if codes.any() else None)
    return pooled.map()


def _read_pairs(a: Tensor, b: Tensor, plane: Plane, window: Window) -> Iterator[tuple[int, int, Array, Array]]:
    for (top, left, x), (_, _, y) in zip(plane.read(a, window), plane.read(b, window), strict=True):
        yield top, left, x, y


class _Pooled:
    """Accumulates pieces into cells."""

    def __init__(self, window: Window, pool: np.ufunc, most: int = MAX_CELLS) -> None:
        self._window = window
        self._pool = pool
        self._most = most
        self._edges = find_edges(window, most)
        self._lately: dict[int, tuple[int, int, _Touched]] = {}
        # Neutral element of the reduction.
        self.nothing = 0.0 if pool is np.add else math.inf if pool is np.minimum else -math.inf
        shape = (self._edges[0].size - 1, self._edges[1].size - 1)
        self._numbers = np.full(shape, self.nothing)
        self._kinds = np.zeros(shape, np.uint8)
        self._finite = np.zeros(shape, np.int64)
        self._counts = np.zeros(NAN_HERE + 1, np.int64)

    def add(self, top: int, left: int, values: Array, codes: Codes | None) -> None:
        """Add a piece with the first element at this row and column; codes are None if all elements are finite."""
        height, width = values.shape
        rows, down, high = self._find_touched_cells(0, top - self._window.top, height)
        columns, across, wide = self._find_touched_cells(1, left - self._window.left, width)
        place = (rows, columns)
        pool: Any = self._pool
        self._numbers[place] = pool(self._numbers[place], _reduce_piece(values, down, across, pool))
        counts = np.outer(high, wide)
        if codes is None:
            self._kinds[place] |= 1 << FINITE
            self._finite[place] += counts
            self._counts[FINITE] += values.size
            return
        self._kinds[place] |= _reduce_piece(np.uint8(1) << codes, down, across, np.bitwise_or)
        self._counts += np.bincount(codes.ravel(), minlength=self._counts.size)
        self._finite[place] += _reduce_piece((codes == FINITE).astype(np.int64), down, across, np.add)

    def _find_touched_cells(self, axis: int, start: int, count: int) -> _Touched:
        """Return the cells that a range of positions touches, their starts, and their position counts."""
        # Cache the last result, because pieces with the same columns repeat this lookup.
        if (known := self._lately.get(axis)) is not None and known[:2] == (start, count):
            return known[2]
        edges = self._edges[axis]
        first = int(np.searchsorted(edges, start, "right")) - 1
        last = int(np.searchsorted(edges, start + count, "left"))
        begins = [max(0, int(edge) - start) for edge in edges[first:last]]
        found = slice(first, last), begins, np.diff([*begins, count])
        self._lately[axis] = (start, count, found)
        return found

    def map(self) -> Map:
        """Return the map for all added pieces."""
        numbers = self._numbers
        if self._pool is np.add:
            numbers = numbers / self._finite
        numbers[self._finite == 0] = np.nan
        return Map(self._window, numbers, self._kinds, self._counts.tolist(), self._most)


def _reduce_piece(values: Array, down: list[int], across: list[int], pool: Callable[..., Any]) -> Array:
    """Reduce a piece's elements to cells with these start rows and columns."""
    ufunc: Any = pool
    dtype = {"dtype": np.float64} if ufunc is np.add and values.dtype.kind == "f" else {}
    lines = ufunc.reduce(values, axis=0, keepdims=True, **dtype) if len(down) == 1 else ufunc.reduceat(values, down, 0)
    return np.asarray(ufunc.reduceat(lines, across, 1) if len(across) < values.shape[1] else lines)
