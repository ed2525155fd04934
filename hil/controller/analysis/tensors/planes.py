"""A tensor of any rank as rows and columns: a slice along two axes, or all of it in reading order.

A plane is read in pieces of a bounded size, whatever the tensor's layout is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hil.compare.values import reader
from hil.core.file_tensor import FileTensor, Tensor
from hil.core.tensors import Array

# So many elements are read at a time.
PIECE = 1 << 17
# A longer vector becomes a square in reading order, which otherwise were a row of hairlines.
_LONG_ROW = 64


@dataclass(frozen=True)
class Window:
    """A part of a plane, in its rows and columns; the ends are not in it."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.bottom - self.top

    @property
    def columns(self) -> int:
        """How many columns."""
        return self.right - self.left


@dataclass(frozen=True)
class Plane:
    """The rows and columns of a tensor of one shape. Make it with :func:`plane_of`."""

    shape: tuple[int, ...]
    rows: int
    columns: int
    # row_axis, column_axis: None where a row is a piece of all elements in reading order.
    row_axis: int | None = None
    column_axis: int | None = None
    index: tuple[int, ...] = ()  # of the axes that are not drawn; a place for each axis

    @property
    def whole(self) -> Window:
        """All of it."""
        return Window(0, 0, self.rows, self.columns)

    @property
    def in_reading_order(self) -> bool:
        """Whether it has all of the tensor's elements."""
        return self.column_axis is None

    @property
    def elements(self) -> int:
        """How many there are; the last row may be shorter than the others."""
        return math.prod(self.shape) if self.in_reading_order else self.rows * self.columns

    def place_of(self, index: Sequence[int]) -> tuple[int, int] | None:
        """The row and column of an element; None if it is not in the plane."""
        if self.column_axis is None:
            flat = int(np.ravel_multi_index(tuple(index), self.shape)) if self.shape else 0
            return divmod(flat, self.columns)
        drawn = (self.row_axis, self.column_axis)
        if any(
            at != place for axis, (at, place) in enumerate(zip(self.index, index, strict=True)) if axis not in drawn
        ):
            return None
        return (0 if self.row_axis is None else index[self.row_axis]), index[self.column_axis]

    def index_of(self, row: int, column: int) -> tuple[int, ...] | None:
        """The index of an element; None beyond the end of the last row."""
        if self.column_axis is None:
            flat = row * self.columns + column
            if flat >= self.elements:
                return None
            return tuple(int(place) for place in np.unravel_index(flat, self.shape)) if self.shape else ()
        found = list(self.index)
        if self.row_axis is not None:
            found[self.row_axis] = row
        found[self.column_axis] = column
        return tuple(found)

    def clipped(self, top: int, left: int, rows: int, columns: int) -> Window:
        """A window of some size that lies in the plane; 0 rows or columns are all."""
        rows, columns = min(rows or self.rows, self.rows), min(columns or self.columns, self.columns)
        top, left = max(0, min(top, self.rows - rows)), max(0, min(left, self.columns - columns))
        return Window(top, left, top + rows, left + columns)

    def read(self, array: Tensor, part: Window) -> Iterator[tuple[int, int, Array]]:
        """A window's elements, as pieces of two dimensions, each with the row and column where it begins.

        A piece has at most :data:`PIECE` elements. Of all arrays of one shape the pieces are the same.
        """
        native, fetch = array.dtype.newbyteorder("="), self._fetcher(array)
        if self.row_axis is not None and self.column_axis is not None and self.row_axis > self.column_axis:
            # In the order in which the elements lie, as far as that can be known.
            for cut in map(_turned, _cuts(_turned(part))):
                yield cut.top, cut.left, np.asarray(fetch(cut), native)
            return
        full = self.elements // self.columns if self.columns else 0  # rows; one more may be begun
        begun = self.elements - full * self.columns
        for cut in _cuts(Window(part.top, part.left, min(part.bottom, full), part.right)):
            yield cut.top, cut.left, np.asarray(fetch(cut), native)
        if part.bottom > full and part.left < begun:
            for cut in _cuts(Window(full, part.left, full + 1, min(part.right, begun))):
                yield cut.top, cut.left, np.asarray(fetch(cut), native)

    def _fetcher(self, array: Tensor) -> Callable[[Window], Array]:
        """What gives the elements of a small window in which every row is whole."""
        if self.column_axis is not None:
            drawn = (self.row_axis, self.column_axis)
            flat = array[tuple(slice(None) if axis in drawn else at for axis, at in enumerate(self.index))]
            if self.row_axis is None:
                return lambda cut: np.asarray(flat[cut.left : cut.right])[np.newaxis]
            if self.row_axis > self.column_axis:
                flat = flat.T
            return lambda cut: np.asarray(flat[cut.top : cut.bottom, cut.left : cut.right])
        line = reader(array)
        grid = _grid(array, self.columns)

        def fetch(cut: Window) -> Array:
            first, last = cut.top * self.columns, cut.bottom * self.columns
            if cut.rows == 1:
                return line(first + cut.left, first + cut.right)[np.newaxis]
            if grid is not None:
                return np.asarray(grid[cut.top : cut.bottom, cut.left : cut.right])
            if last - first <= 4 * PIECE:
                return line(first, last).reshape(-1, self.columns)[:, cut.left : cut.right]
            return np.stack([line(at + cut.left, at + cut.right) for at in range(first, last, self.columns)])

        return fetch


def _grid(array: Tensor, columns: int) -> Tensor | None:
    """An array in reading order as whole rows; None where its elements lie in another order."""
    if not columns:
        return None
    if isinstance(array, FileTensor):
        return array.rows_of(columns) if array.is_line else None
    rows = array.size // columns
    return array.reshape(-1)[: rows * columns].reshape(rows, columns) if array.flags.c_contiguous else None


def plane_of(
    shape: Sequence[int], rows: int | None = None, columns: int | None = None, index: Sequence[int] = ()
) -> Plane:
    """The plane of two axes, or of all elements in reading order if no columns are named.

    Args:
        rows: the axis whose places are rows; None is one row.
        columns: the axis whose places are columns.
        index: where the other axes are; what is missing is 0.

    Raises:
        ValueError: there is no such axis or place, or one axis is both.
    """
    dims = tuple(int(dim) for dim in shape)
    if columns is None:
        return _in_reading_order(dims)
    for axis in (rows, columns):
        if axis is not None and not 0 <= axis < len(dims):
            raise ValueError(f"there is no axis {axis} in {len(dims)}")
    if rows == columns:
        raise ValueError(f"axis {rows} cannot be both rows and columns")
    places = [*index, *[0] * len(dims)][: len(dims)]
    for axis, (place, dim) in enumerate(zip(places, dims, strict=True)):
        if axis not in (rows, columns) and not 0 <= place < dim:
            raise ValueError(f"axis {axis} has {dim} places, and none is {place}")
    return Plane(dims, 1 if rows is None else dims[rows], dims[columns], rows, columns, tuple(places))


def _in_reading_order(shape: tuple[int, ...]) -> Plane:
    size = math.prod(shape)
    columns = shape[-1] if shape else 1
    if not size:
        return Plane(shape, 0, 0)
    if size > _LONG_ROW and columns in (1, size):
        columns = math.isqrt(size - 1) + 1
    return Plane(shape, -(-size // columns), columns)


def _turned(part: Window) -> Window:
    return Window(part.left, part.top, part.right, part.bottom)


def _cuts(part: Window) -> Iterator[Window]:
    """A window in small ones: of several rows or, where a row is long, of parts of one."""
    if part.columns <= 0:
        return
    step = max(1, PIECE // part.columns)
    for top in range(part.top, part.bottom, step):
        for left in range(part.left, part.right, PIECE):
            yield Window(top, left, min(part.bottom, top + step), min(part.right, left + PIECE))
