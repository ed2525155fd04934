"""Read tensors in chunks, and choose the number type for comparing two tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hil.core.file_tensor import FileTensor, Tensor
from hil.core.tensors import DTYPES, Array, get_dtype_name, get_float_limits, parse_dtype

# Elements per chunk. Scratch memory of this size fits in a core's second-level cache.
CHUNK = 1 << 15
_INTEGERS_64 = ("int64", "uint64")
_COMPLEX = ("complex64", "complex128")
EXACT_DTYPES = frozenset(name for name in DTYPES if name.startswith(("bool", "int", "uint", "string")))

# Block size for dot products. OpenBLAS uses threads above 10,000 elements, which costs over twice as much as it saves.
_BLOCK = 1 << 13
# A sum of squares outside these limits may have overflowed or lost small terms.
_SAFE_LOW, _SAFE_HIGH = 1e-250, 1e300

Floats = npt.NDArray[np.float64]
Reader = Callable[[int, int], Array]


def choose_common_kind(dtype: str, reference: str) -> str:
    """Return how to compare tensors with two dtypes: ``real``, ``complex``, ``integer`` (64 bits) or ``string``.

    Return "" if no dtype can represent the values of both.
    """
    both = {dtype, reference}
    if "string" in both:
        return "string" if both == {"string"} else ""
    if both & set(_INTEGERS_64):
        kinds = {parse_dtype(name).kind for name in both}
        return "integer" if kinds <= {"i", "u"} and np.result_type(*map(parse_dtype, both)).kind in "iu" else ""
    return "complex" if both & set(_COMPLEX) else "real"


def as_array(values: Tensor) -> Tensor:
    """Return the values as an array. A :class:`FileTensor` stays in its file."""
    return values if isinstance(values, FileTensor) else np.asarray(values)


def make_reader(array: Tensor) -> Reader:
    """Return a function that reads elements start to stop (C order) as a flat array in native byte order.

    The function copies only these elements.
    """
    plain = as_array(array)
    native = plain.dtype.newbyteorder("=")
    if isinstance(plain, FileTensor):
        return lambda start, stop: np.asarray(plain.elements(start, stop), dtype=native)
    flat = plain.reshape(-1) if plain.flags.c_contiguous else plain.flat
    return lambda start, stop: np.asarray(flat[start:stop], dtype=native)


def compute_dot(x: Floats, y: Floats, *, wide: bool) -> Any:
    """Return the sum of x*y in float64, or in C's long double if float64 was insufficient and ``wide`` is set."""
    whole = x.size - x.size % _BLOCK
    total = np.dot(x[whole:], y[whole:])
    if whole:
        total += np.add.reduce(np.vecdot(x[:whole].reshape(-1, _BLOCK), y[:whole].reshape(-1, _BLOCK)))
    if wide and not _SAFE_LOW < abs(total) < _SAFE_HIGH and x.any() and y.any():
        # Squares of float64 overflow from 1e154 and become 0 below 1e-162. Long double helps on machines where it is
        # wider than float64.
        return np.dot(x.astype(np.longdouble), y.astype(np.longdouble))
    return total


def mask_limit(dtype: np.dtype[Any]) -> float:
    """Return the magnitude from which a value counts as masked or saturated: half of the dtype's largest value.

    The magnitude is infinite for integers, which saturate normally, and for floats of up to 8 bits, which use their
    largest values normally.
    """
    if get_dtype_name(dtype) in EXACT_DTYPES or get_part_dtype(dtype).itemsize == 1:
        return math.inf
    return float(get_float_limits(get_part_dtype(dtype)).max) / 2


def get_part_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a complex dtype's parts, or the dtype itself, in native byte order."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype.newbyteorder("=")


def find_largest(array: Array) -> float:
    """Return the largest finite magnitude; 0 for strings and if no value is finite."""
    if array.dtype.kind == "O":
        return 0.0
    with np.errstate(invalid="ignore"):  # casting a signalling NaN warns
        magnitudes = np.abs(array.astype(np.float64))
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))
