"""Tensor in a file, read in chunks without a memory map.

Access to a truncated mapped file ends the process with a signal. A read raises a regular error instead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from hil.core.cancellation import check_cancelled
from hil.core.tensors import Array
from hil.errors import UsageError

# Maximum bytes per read, including gaps between wanted elements.
_SPAN = 1 << 20
# Maximum gap that a read includes: reading this many extra bytes takes as long as a separate read.
_GAP = 16 << 10


class OpenFile:
    """File that stays open until this object is garbage-collected."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self._descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, count: int, offset: int) -> bytes:
        """Read ``count`` bytes at ``offset``. Raises UsageError if the file was truncated."""
        check_cancelled()
        data = os.pread(self._descriptor, count, offset)
        while len(data) < count:
            more = os.pread(self._descriptor, count - len(data), offset + len(data))
            if not more:
                raise UsageError(f"{self.path.name} was truncated during reading", hint="try again")
            data += more
        return data


class FileTensor:
    """Array-like view on a file: dtype, shape, slices with step 1, and `np.asarray`, which reads the slice.

    Slices keep the file open and use no other resources. Functions that read arrays in chunks accept a FileTensor: see
    :func:`hil.compare.values.make_reader`.

    Attributes:
        strides: bytes per step along each axis, like numpy's; never negative.
    """

    def __init__(
        self,
        file: OpenFile,
        dtype: np.dtype[Any],
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
    ) -> None:
        self._file, self._offset = file, offset
        self.dtype, self.shape, self.strides = dtype, tuple(shape), tuple(strides)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def is_line(self) -> bool:
        """True if the elements are contiguous in C order."""
        return not self.size or self.strides == make_contiguous_strides(self.shape, self.dtype.itemsize)

    @property
    def T(self) -> FileTensor:  # noqa: N802 - numpy's name
        """View with the axes reversed."""
        return self._make_view(self.shape[::-1], self.strides[::-1])

    def view(self, dtype: np.dtype[Any]) -> FileTensor:
        """Return a view with another dtype and the same item size."""
        if dtype.itemsize != self.dtype.itemsize:
            raise ValueError(f"elements of {self.dtype.itemsize} bytes cannot be viewed as {dtype}")
        return FileTensor(self._file, dtype, self.shape, self.strides, self._offset)

    def reshape_rows(self, columns: int) -> FileTensor:
        """Reshape contiguous elements to rows, without an incomplete last row."""
        if not self.is_line:
            raise ValueError("elements are not contiguous")
        shape = (self.size // columns, columns)
        return self._make_view(shape, make_contiguous_strides(shape, self.dtype.itemsize))

    def __getitem__(self, places: Any) -> FileTensor:
        places = places if isinstance(places, tuple) else (places,)
        offset, shape, strides = self._offset, list[int](), list[int]()
        for axis, (dim, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            place = places[axis] if axis < len(places) else slice(None)
            if isinstance(place, slice):
                start, stop, step = place.indices(dim)
                if step != 1:
                    raise ValueError("slices must have a step of 1")
                shape.append(max(0, stop - start))
                strides.append(stride)
            else:
                start = int(place)
                if not 0 <= start < dim:
                    raise IndexError(f"index {start} is out of range for axis {axis} of size {dim}")
            offset += start * stride
        return self._make_view(shape, strides, offset)

    def _make_view(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> FileTensor:
        offset = self._offset if offset is None else offset
        return FileTensor(self._file, self.dtype, shape, strides, offset)

    def elements(self, start: int, stop: int) -> Array:
        """Return elements start to stop in C order, as a flat array."""
        start, stop = min(start, self.size), min(stop, self.size)
        if start >= stop:
            return np.empty(0, self.dtype)
        if self.is_line:
            return self._read(self._offset + start * self.dtype.itemsize, (stop - start,), (self.dtype.itemsize,))
        row = math.prod(self.shape[1:])
        first, last = -(-start // row), stop // row
        if first > last:  # start and stop are in the same row
            return self[first - 1].elements(start - (first - 1) * row, stop - (first - 1) * row)
        parts = [np.asarray(self[first:last]).reshape(-1)]
        if start < first * row:
            parts.insert(0, self[first - 1].elements(start - (first - 1) * row, row))
        if last * row < stop:
            parts.append(self[last].elements(0, stop - last * row))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self._read(self._offset, self.shape, self.strides), dtype)

    def _read(self, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
        if not math.prod(shape):
            return np.empty(shape, self.dtype)
        wanted = math.prod(shape) * self.dtype.itemsize
        axes = [axis for axis, dim in enumerate(shape) if dim > 1]
        span = self.dtype.itemsize + sum((shape[axis] - 1) * strides[axis] for axis in axes)
        if not axes or (span <= _SPAN and span - wanted <= _GAP * self._count_runs(shape, strides)):
            return np.ndarray(tuple(shape), self.dtype, self._file.read(span, offset), 0, tuple(strides))
        axis = max(axes, key=lambda one: strides[one])
        step = max(1, min(shape[axis] - 1, _SPAN // strides[axis])) if strides[axis] <= _GAP else 1
        found = np.empty(shape, self.dtype)
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            place = (*(slice(None),) * axis, slice(start, stop))
            part = (*shape[:axis], stop - start, *shape[axis + 1 :])
            found[place] = self._read(offset + start * strides[axis], part, strides)
        return found

    def _count_runs(self, shape: Sequence[int], strides: Sequence[int]) -> int:
        """Return the number of reads required to read only the wanted bytes."""
        run = self.dtype.itemsize
        for stride, dim in sorted(zip(strides, shape, strict=True)):
            if stride != run and dim > 1:
                break
            run *= dim
        return math.prod(shape) * self.dtype.itemsize // run


# Tensor types of functions that read in chunks.
Tensor: TypeAlias = "Array | FileTensor"


def make_contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a contiguous C-order array."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
