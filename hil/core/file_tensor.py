"""A tensor in a file, read piece by piece with plain reads.

A memory map of a file that somebody shortens ends the process with a signal as soon as it is looked at; here that is
an error like others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from hil.core.tensors import Array
from hil.errors import UsageError

# So many bytes are read at a time, with what lies between the elements that are wanted.
_SPAN = 1 << 20
# Reading so many bytes more takes as long as reading once more.
_GAP = 16 << 10


class OpenFile:
    """A file that is open until nobody has it any more."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self._descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        os.close(self._descriptor)

    def read(self, count: int, offset: int) -> bytes:
        """So many bytes from a place on. Raises UsageError: they are not there any more."""
        data = os.pread(self._descriptor, count, offset)
        while len(data) < count:
            more = os.pread(self._descriptor, count - len(data), offset + len(data))
            if not more:
                raise UsageError(f"{self.path.name} was shortened while it was read", hint="try again")
            data += more
        return data


class FileTensor:
    """What an array has of dtype and shape, slices of it (of a step of 1), and `np.asarray`, which reads what is left.

    Slices keep the file open, and nothing else. It stands where functions take an array that they read in pieces, as
    :func:`hil.compare.values.reader` does.

    Attributes:
        strides: of each axis, in bytes, as numpy has them; never negative.
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
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """What its elements take."""
        return self.size * self.dtype.itemsize

    @property
    def is_line(self) -> bool:
        """Whether its elements lie beside each other in reading order."""
        return not self.size or self.strides == contiguous(self.shape, self.dtype.itemsize)

    @property
    def T(self) -> FileTensor:  # noqa: N802 - numpy's name
        """It with its axes in reverse order."""
        return self._with(self.shape[::-1], self.strides[::-1])

    def view(self, dtype: np.dtype[Any]) -> FileTensor:
        """The same bytes as elements of another dtype of the same size."""
        if dtype.itemsize != self.dtype.itemsize:
            raise ValueError(f"elements of {self.dtype.itemsize} bytes are none of {dtype}")
        return FileTensor(self._file, dtype, self.shape, self.strides, self._offset)

    def rows_of(self, columns: int) -> FileTensor:
        """A line of elements as whole rows; what is left of them is not in it."""
        if not self.is_line:
            raise ValueError("its elements do not lie beside each other")
        shape = (self.size // columns, columns)
        return self._with(shape, contiguous(shape, self.dtype.itemsize))

    def __getitem__(self, places: Any) -> FileTensor:
        places = places if isinstance(places, tuple) else (places,)
        offset, shape, strides = self._offset, list[int](), list[int]()
        for axis, (dim, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            place = places[axis] if axis < len(places) else slice(None)
            if isinstance(place, slice):
                start, stop, step = place.indices(dim)
                if step != 1:
                    raise ValueError("slices have a step of 1 here")
                shape.append(max(0, stop - start))
                strides.append(stride)
            else:
                start = int(place)
                if not 0 <= start < dim:
                    raise IndexError(f"axis {axis} has {dim} places, and none is {start}")
            offset += start * stride
        return self._with(shape, strides, offset)

    def _with(self, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> FileTensor:
        offset = self._offset if offset is None else offset
        return FileTensor(self._file, self.dtype, shape, strides, offset)

    def elements(self, start: int, stop: int) -> Array:
        """Elements in reading order, as a flat array."""
        start, stop = min(start, self.size), min(stop, self.size)
        if start >= stop:
            return np.empty(0, self.dtype)
        if self.is_line:
            return self._read(self._offset + start * self.dtype.itemsize, (stop - start,), (self.dtype.itemsize,))
        row = math.prod(self.shape[1:])
        first, last = -(-start // row), stop // row
        if first > last:  # within one place of the first axis
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
        if not axes or (span <= _SPAN and span - wanted <= _GAP * self._runs(shape, strides)):
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

    def _runs(self, shape: Sequence[int], strides: Sequence[int]) -> int:
        """How many times would be read if nothing but what is wanted were."""
        run = self.dtype.itemsize
        for stride, dim in sorted(zip(strides, shape, strict=True)):
            if stride != run and dim > 1:
                break
            run *= dim
        return math.prod(shape) * self.dtype.itemsize // run


# What functions take that read a tensor in pieces.
Tensor: TypeAlias = "Array | FileTensor"


def contiguous(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides of elements that lie beside each other in reading order."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
