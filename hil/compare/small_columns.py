"""Find columns whose values are much smaller than the rest of an output. Criteria hardly depend on such columns."""

from __future__ import annotations

import math

import numpy as np

from hil.compare.values import CHUNK, make_reader, mask_limit
from hil.core.file_tensor import Tensor
from hil.core.tensors import Array

# A column is small if its root mean square is below this fraction of the output's.
SMALL_SHARE = 1 / 100


def find_column_axes(rank: int) -> tuple[int, ...]:
    """Return the axes to search for small columns: the last and the second."""
    return () if rank < 2 else (-1,) if rank == 2 else (-1, 1)


def find_small(array: Tensor, axis: int) -> Array:
    """Return the indices along an axis whose values are small, but not all 0.

    Masks and non-finite values are excluded.
    """
    size, stride = array.shape[axis], math.prod(array.shape[axis % array.ndim + 1 :])
    read, limit = make_reader(array), mask_limit(array.dtype)
    squares = np.zeros(size)
    for start in range(0, array.size, CHUNK):
        chunk = read(start, start + CHUNK)
        with np.errstate(all="ignore"):  # casting a signalling NaN warns
            sizes = np.abs(chunk.astype(np.complex128 if chunk.dtype.kind == "c" else np.float64))
            sizes[~(sizes < limit)] = 0.0
            places = (start + np.arange(chunk.size)) // stride % size
            squares += np.bincount(places, np.square(sizes), minlength=size)
    with np.errstate(over="ignore"):
        return np.flatnonzero((squares > 0) & (squares < SMALL_SHARE**2 * squares.mean()))
