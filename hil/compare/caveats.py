"""Detect limits of a verdict: constant outputs, and subnormal numbers that the board flushed to 0."""

from __future__ import annotations

import numpy as np

from hil.compare.reasons import count
from hil.compare.values import CHUNK, EXACT_DTYPES, get_part_dtype, make_reader
from hil.core.file_tensor import Tensor
from hil.core.results import Tolerance
from hil.core.tensors import Array, get_dtype_name, get_float_limits


def note_constant(reference: Tensor) -> str:
    """Return a note if all output values are equal; "" if they differ.

    An output with a single nonzero value gets no note.
    """
    if not reference.size or get_dtype_name(reference.dtype) == "string":
        return ""
    read = make_reader(reference)
    first = read(0, 1)[0]
    with np.errstate(invalid="ignore"):  # signalling NaN
        if reference.size == 1 and first != 0:
            return ""
        if not all(bool((read(start, start + CHUNK) == first).all()) for start in range(0, reference.size, CHUNK)):
            return ""
    return f"every expected value is {first:.9g}: a board that computes nothing could also pass"


def is_subnormal(tolerance: Tolerance | None, reference: Tensor) -> bool:
    """Return True if the tolerance is smaller than the reference dtype's smallest normal number."""
    if tolerance is None or get_dtype_name(reference.dtype) in EXACT_DTYPES:
        return False
    return tolerance.atol < float(get_float_limits(get_part_dtype(reference.dtype)).smallest_normal)


def count_flushed(actual: Tensor, reference: Tensor) -> int:
    """Count the zeros at subnormal reference values. Both tensors need the same shape."""
    return sum(int(np.count_nonzero(flushed)) for flushed in _find_flushed(actual, reference))


def flush_reference(actual: Tensor, reference: Tensor) -> Array:
    """Return a copy of the reference with 0 at each subnormal value that the board flushed."""
    values = make_reader(reference)(0, reference.size).copy()
    for number, flushed in enumerate(_find_flushed(actual, reference)):
        values[number * CHUNK : (number + 1) * CHUNK][flushed] = 0
    return values.reshape(reference.shape)


def format_flushed(flushed: int, name: str) -> str:
    """Return a message on flushed values that names the option to accept them."""
    return f"the device flushed {count(flushed, 'subnormal value')} to 0 (accept with --allow-flush={name})"


def _find_flushed(actual: Tensor, reference: Tensor) -> list[Array]:
    dtype = get_dtype_name(reference.dtype)
    if actual.shape != reference.shape or dtype in EXACT_DTYPES or get_dtype_name(actual.dtype) != dtype:
        return []
    smallest = float(get_float_limits(get_part_dtype(reference.dtype)).smallest_normal)
    read_a, read_b = make_reader(actual), make_reader(reference)
    found = []
    wide = np.complex128 if reference.dtype.kind == "c" else np.float64
    for start in range(0, reference.size, CHUNK):
        with np.errstate(invalid="ignore"):  # signalling NaN
            sizes = np.abs(read_b(start, start + CHUNK).astype(wide))
            found.append((read_a(start, start + CHUNK) == 0) & (sizes > 0) & (sizes < smallest))
    return found
