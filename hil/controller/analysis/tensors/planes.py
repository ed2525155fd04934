"""A tensor of any rank as rows and columns: a slice along two axes, or all elements in reading order.

A plane is read in pieces of bounded size, for any memory layout of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hil.compare.values import make_reader
from hil.core.file_tensor import FileTensor, Tensor
from hil.core.tensors import Array

# Number of elements read at a time.
PIECE = 1 << 17
# Longer vectors are folded into a square in reading order, because a single row would show only thin lines.
_LONG_ROW = 64


@dataclass(frozen=True)
class Window:
    """A part of a plane, in rows and columns; ``bottom`` and ``right`` are exclusive."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.bottom - self.top

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.right - self.left


@dataclass(frozen=True)
class Plane:
    """Rows and columns for tensors with a common shape. Create a plane with :func:`choose_plane`."""

    shape: tuple[int, ...]
    rows: int
    columns: int
    # row_axis, column_axis: both are None for all elements in reading order.
    row_axis: int | None = None
    column_axis: int | None = None
    index: tuple[int, ...] = ()  # index per axis; used only for axes that are not drawn

    @property
    def whole(self) -> Window:
        """A window for the whole plane."""
        return Window(0, 0, self.rows, self.columns)

    @property
    def in_reading_order(self) -> bool:
        """True if the plane contains all tensor elements, in reading order."""
        return self.column_axis is None

    @property
    def elements(self) -> int:
        """Number of elements. The last row may be shorter than the other rows."""
        return math.prod(self.shape) if self.in_reading_order else self.rows * self.columns

    def place_of(self, index: Sequence[int]) -> tuple[int, int] | None:
        """Return an element's row and column; None if the element is outside the plane."""
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
        """Return the tensor index for a row and column; None beyond the last row's end."""
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

    def clip_window(self, top: int, left: int, rows: int, columns: int) -> Window:
        """Return a window of this size, moved into the plane; 0 rows or columns means all."""
        rows, columns = min(rows or self.rows, self.rows), min(columns or self.columns, self.columns)
        top, left = max(0, min(top, self.rows - rows)), max(0, min(left, self.columns - columns))
        return Window(top, left, top + rows, left + columns)

    def read(self, array: Tensor, part: Window) -> Iterator[tuple[int, int, Array]]:
        """Yield a window's elements as two-dimensional pieces, with their first row and column.

        A piece has at most :data:`PIECE` elements. Arrays with the same shape give the same pieces.
        """
        native, fetch = array.dtype.newbyteorder("="), self._build_fetcher(array)
        if self.row_axis is not None and self.column_axis is not None and self.row_axis > self.column_axis:
            # Read the elements in memory order, if it is known.
            for cut in map(_transpose_window, _split_window(_transpose_window(part))):
                yield cut.top, cut.left, np.asarray(fetch(cut), native)
            return
        full = self.elements // self.columns if self.columns else 0  # full rows; a shorter row may follow
        begun = self.elements - full * self.columns
        for cut in _split_window(Window(part.top, part.left, min(part.bottom, full), part.right)):
            yield cut.top, cut.left, np.asarray(fetch(cut), native)
        if part.bottom > full and part.left < begun:
            for cut in _split_window(Window(full, part.left, full + 1, min(part.right, begun))):
                yield cut.top, cut.left, np.asarray(fetch(cut), native)

    def _build_fetcher(self, array: Tensor) -> Callable[[Window], Array]:
        """Return a function that reads a window of this plane as a two-dimensional array.

        The window must be small, because the function may copy complete rows. The window must not include elements
        beyond the end of the last row.
        """
        if self.column_axis is not None:
            drawn = (self.row_axis, self.column_axis)
            flat = array[tuple(slice(None) if axis in drawn else at for axis, at in enumerate(self.index))]
            if self.row_axis is None:
                return lambda cut: np.asarray(flat[cut.left : cut.right])[np.newaxis]
            if self.row_axis > self.column_axis:
                flat = flat.T
            return lambda cut: np.asarray(flat[cut.top : cut.bottom, cut.left : cut.right])
        line = make_reader(array)
        grid = _view_as_rows(array, self.columns)

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


def _view_as_rows(array: Tensor, columns: int) -> Tensor | None:
    """Return an array in reading order as full rows, or None if the memory order is different."""
    if not columns:
        return None
    if isinstance(array, FileTensor):
        return array.reshape_rows(columns) if array.is_line else None
    rows = array.size // columns
    return array.reshape(-1)[: rows * columns].reshape(rows, columns) if array.flags.c_contiguous else None


def choose_plane(
    shape: Sequence[int], rows: int | None = None, columns: int | None = None, index: Sequence[int] = ()
) -> Plane:
    """Return the plane for two axes, or for all elements in reading order if ``columns`` is None.

    Args:
        rows: the row axis; None means a single row.
        columns: the column axis.
        index: positions on the other axes; missing values are 0.

    Raises:
        ValueError: an axis or a position does not exist, or both axes are the same.
    """
    dims = tuple(int(dim) for dim in shape)
    if columns is None:
        return _build_line_plane(dims)
    for axis in (rows, columns):
        if axis is not None and not 0 <= axis < len(dims):
            raise ValueError(f"invalid axis {axis}: the tensor has {len(dims)} axes")
    if rows == columns:
        raise ValueError(f"axis {rows} cannot be both rows and columns")
    places = [*index, *[0] * len(dims)][: len(dims)]
    for axis, (place, dim) in enumerate(zip(places, dims, strict=True)):
        if axis not in (rows, columns) and not 0 <= place < dim:
            raise ValueError(f"invalid index {place} on axis {axis}: the size is {dim}")
    return Plane(dims, 1 if rows is None else dims[rows], dims[columns], rows, columns, tuple(places))


def _build_line_plane(shape: tuple[int, ...]) -> Plane:
    size = math.prod(shape)
    columns = shape[-1] if shape else 1
    if not size:
        return Plane(shape, 0, 0)
    if size > _LONG_ROW and columns in (1, size):
        columns = math.isqrt(size - 1) + 1
    return Plane(shape, -(-size // columns), columns)


def _transpose_window(part: Window) -> Window:
    return Window(part.left, part.top, part.right, part.bottom)


def _split_window(part: Window) -> Iterator[Window]:
    """Split a window into small windows: full rows, or parts of a long row."""
    if part.columns <= 0:
        return
    step = max(1, PIECE // part.columns)
    for top in range(part.top, part.bottom, step):
        for left in range(part.left, part.right, PIECE):
            yield Window(top, left, min(part.bottom, top + step), min(part.right, left + PIECE))
