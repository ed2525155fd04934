"""The distance of two floats in representable values (units in the last place)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.core.tensors import Array, dtype_name, dtype_of


class LargestUlp:
    """The largest distance seen so far.

    The bits of a float are sign and magnitude, and magnitudes count representable values. Of one sign the distance is
    the difference of the magnitudes, of two signs it is their sum; either fits in the unsigned dtype of that width,
    where a signed subtraction would overflow. +0 and -0 are 0 apart. An 8-bit float goes through a table of its values.

    Args:
        dtype: the float dtype (the part's, where the tensor is complex).
        capacity: how many floats come in one call at most.
    """

    def __init__(self, dtype: np.dtype[Any], capacity: int) -> None:
        self.largest = 0
        self._ranks = _ranks(dtype_name(dtype)) if dtype.itemsize == 1 else None
        self._scratch = np.empty(capacity, f"u{dtype.itemsize}")

    def add(self, a: Array, b: Array, difference: Array, highest: int) -> None:
        """Look at a chunk of finite floats.

        Args:
            a, b: their bits, unsigned.
            difference: ``a ^ b``; used as scratch memory.
            highest: the largest of ``difference``.
        """
        if self._ranks is not None:
            self._raise(np.abs(self._ranks[a] - self._ranks[b]))
            return
        last = a.dtype.itemsize * 8 - 1
        top = 1 << last
        signed = np.dtype(f"i{a.dtype.itemsize}")
        scratch = self._scratch[: a.size]
        opposite = difference.view(signed)
        crossing = highest >= top
        if crossing:
            np.right_shift(opposite, last, out=opposite)  # all ones where the signs differ, else all zeros
            np.add(a, b, out=scratch)  # the magnitudes' sum, and the one sign bit
            scratch ^= a.dtype.type(top)
            scratch &= difference
            self._raise(scratch)
            if self.largest >= top:  # no two of one sign are as far apart
                return
        np.subtract(a, b, out=scratch)
        np.abs(scratch.view(signed), out=scratch.view(signed))
        if crossing:
            scratch &= np.invert(difference, out=difference)
        self._raise(scratch)

    def _raise(self, distances: Array) -> None:
        self.largest = max(self.largest, int(np.maximum.reduce(distances)))


@lru_cache
def _ranks(dtype: str) -> npt.NDArray[np.int16]:
    """For each byte of an 8-bit (or 4-bit) float: the place of its value among all finite ones."""
    values = np.arange(256, dtype=np.uint8).view(dtype_of(dtype)).astype(np.float64)
    finite = np.unique(values[np.isfinite(values)])
    return np.searchsorted(finite, values).astype(np.int16)
