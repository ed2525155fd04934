"""Measure the distance of floats in representable values (ULP)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.core.tensors import Array, get_dtype_name, parse_dtype


class LargestUlp:
    """Running maximum of the distance in representable values (ULP).

    The bits of a float are sign and magnitude, and magnitudes count representable values. For equal signs the
    distance is the difference of the magnitudes; for different signs it is their sum. Both fit in the unsigned
    dtype of the same width, where a signed subtraction would overflow. +0 and -0 have distance 0. An 8-bit
    float uses a table of its values.

    Args:
        dtype: the float dtype; for a complex tensor, the dtype of its parts.
        capacity: maximum number of floats per call.
    """

    def __init__(self, dtype: np.dtype[Any], capacity: int) -> None:
        self.largest: int = 0
        self._ranks = rank_bytes(get_dtype_name(dtype)) if dtype.itemsize == 1 else None
        self._scratch = np.empty(capacity, f"u{dtype.itemsize}")

    def add(self, a: Array, b: Array, difference: Array, highest: int) -> None:
        """Add a chunk of finite floats.

        Args:
            a, b: the bits of the floats, unsigned.
            difference: ``a ^ b``; used as scratch memory.
            highest: the largest element of ``difference``.
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
            np.right_shift(opposite, last, out=opposite)  # all ones if the signs differ, all zeros otherwise
            np.add(a, b, out=scratch)  # sum of the magnitudes, plus a single sign bit
            scratch ^= a.dtype.type(top)
            scratch &= difference
            self._raise(scratch)
            if self.largest >= top:  # values of the same sign cannot be farther apart
                return
        np.subtract(a, b, out=scratch)
        np.abs(scratch.view(signed), out=scratch.view(signed))
        if crossing:
            scratch &= np.invert(difference, out=difference)
        self._raise(scratch)

    def _raise(self, distances: Array) -> None:
        self.largest = max(self.largest, int(np.maximum.reduce(distances)))


@lru_cache
def rank_bytes(dtype: str) -> npt.NDArray[np.int16]:
    """Return the rank of each byte of an 8-bit or 4-bit float among all finite values."""
    values = np.arange(256, dtype=np.uint8).view(parse_dtype(dtype)).astype(np.float64)
    finite = np.unique(values[np.isfinite(values)])
    return np.searchsorted(finite, values).astype(np.int16)
