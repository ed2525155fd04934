"""Group an output's elements for a control: by channel, or by magnitude.

Values are flat float64 arrays with one value per element.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hil.compare.values import CHUNK
from hil.core.tensors import Array


class Channels:
    """Groups of elements with the same index along an axis. Without an axis, all elements are in one group."""

    def __init__(self, shape: tuple[int, ...], axis: int | None = None) -> None:
        before, size, after = (
            (1, 1, shape) if axis is None else (math.prod(shape[:axis]), shape[axis], shape[axis + 1 :])
        )
        self._shape = (before, size, math.prod(after))

    def count(self) -> Array:
        """Return the group sizes."""
        before, size, after = self._shape
        return np.full(size, before * after)

    def sum_squares(self, values: Array) -> Array:
        """Return the sum of squares for every group."""
        cube = values.reshape(self._shape)
        return np.asarray(np.einsum("ijk,ijk->j", cube, cube))

    def find_largest(self, values: Array) -> Array:
        """Return the largest value per group. Values must not be negative."""
        return np.asarray(values.reshape(self._shape).max(axis=(0, 2), initial=0.0))

    def clip(self, values: Array, limits: Array) -> None:
        """Clip values to their group's limit, in place."""
        cube = values.reshape(self._shape)
        np.minimum(cube, limits.reshape(1, -1, 1), out=cube)


class Magnitudes:
    """Groups of elements by base-16 exponent. Zeros and non-finite values belong to no group.

    Attributes:
        exponents: base-16 exponent of each group, in ascending order.
    """

    def __init__(self, values: Array) -> None:
        numbers = np.empty(values.size, np.int16)  # 0 means no group
        limits = np.finfo(np.float64)
        lowest = int(_convert_exponent(np.frexp(limits.smallest_subnormal)[1])) - 1
        counts = np.zeros(_convert_exponent(limits.maxexp) - lowest + 1, np.intp)
        for start in range(0, values.size, CHUNK):
            part = slice(start, start + CHUNK)
            chunk = values[part]
            found = _convert_exponent(np.frexp(chunk)[1]) - lowest
            numbers[part] = np.where(np.isfinite(chunk) & (chunk != 0), found, 0)
            counts += np.bincount(numbers[part], minlength=counts.size)
        present = 1 + np.flatnonzero(counts[1:])
        self.exponents = [int(one) + lowest for one in present]
        self._numbers, self._counts = numbers, counts[present]
        # Indices of the non-empty groups in arrays with all groups.
        self._present, self._size = present, counts.size

    def count(self) -> Array:
        """Return the group sizes."""
        return self._counts

    def sum_squares(self, values: Array) -> Array:
        """Return the sum of squares for every group."""
        sums = np.zeros(self._size)
        for start in range(0, values.size, CHUNK):
            part = slice(start, start + CHUNK)
            with np.errstate(over="ignore"):
                squares = np.square(values[part])
            sums += np.bincount(self._numbers[part], squares, minlength=sums.size)
        return sums[self._present]

    def find_largest(self, values: Array) -> Array:
        """Return the largest value per group. Values must not be negative."""
        found = np.zeros(self._size)
        np.maximum.at(found, self._numbers, values)
        return found[self._present]

    def clip(self, values: Array, limits: Array) -> None:
        """Clip values to their group's limit, in place."""
        table = np.full(self._size, np.inf)
        table[self._present] = limits
        for start in range(0, values.size, CHUNK):
            part = slice(start, start + CHUNK)
            np.minimum(values[part], table[self._numbers[part]], out=values[part])


Groups = Channels | Magnitudes


def _convert_exponent(binary: Any) -> Any:
    """Convert binary exponents from ``frexp`` to base-16 exponents."""
    return (binary - 1) // 4
