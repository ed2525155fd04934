"""How the values of two tensors are read side by side: in chunks, and as what kind of number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hil.core.tensors import DTYPES, Array, dtype_name, dtype_of

CHUNK = 1 << 17
_INTEGERS_64 = ("int64", "uint64")
_COMPLEX = ("complex64", "complex128")
EXACT_DTYPES = frozenset(name for name in DTYPES if name.startswith(("bool", "int", "uint", "string")))

Reader = Callable[[int, int], Array]


def common_kind(dtype: str, reference: str) -> str:
    """How tensors of these dtypes are compared: ``real``, ``complex``, ``integer`` (64 bits), ``string`` or "" (not at
    all, because no dtype holds the values of both).
    """
    both = {dtype, reference}
    if "string" in both:
        return "string" if both == {"string"} else ""
    if both & set(_INTEGERS_64):
        kinds = {dtype_of(name).kind for name in both}
        return "integer" if kinds <= {"i", "u"} and np.result_type(*map(dtype_of, both)).kind in "iu" else ""
    return "complex" if both & set(_COMPLEX) else "real"


def reader(array: Array) -> Reader:
    """Reads elements start to stop (C order) as a flat array in the machine's byte order; copies at most those."""
    plain = np.asarray(array)
    flat = plain.reshape(-1) if plain.flags.c_contiguous else plain.flat
    native = plain.dtype.newbyteorder("=")
    return lambda start, stop: np.asarray(flat[start:stop], dtype=native)


def mask_limit(dtype: np.dtype[Any]) -> float:
    """The magnitude from which on a value is taken for a mask or for saturated: half of the dtype's largest.

    It is infinite for integers, which saturate in the normal course, and for floats of 8 bits and less, whose largest
    values are ordinary ones.
    """
    if dtype_name(dtype) in EXACT_DTYPES or part_of(dtype).itemsize == 1:
        return math.inf
    import ml_dtypes

    return float(ml_dtypes.finfo(part_of(dtype)).max) / 2  # type: ignore[no-untyped-call]


def part_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the real and the imaginary part of a complex dtype; any other dtype itself, in native byte order."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype.newbyteorder("=")


def largest(array: Array) -> float:
    """The largest finite magnitude; 0 where there is none, and of texts."""
    if array.dtype.kind == "O":
        return 0.0
    with np.errstate(invalid="ignore"):  # a signalling NaN warns when it is cast
        magnitudes = np.abs(array.astype(np.float64))
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))
