"""Elementwise comparison of two tensors: differences and non-finite elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hil.compare.ulp import rank_bytes
from hil.compare.values import EXACT_DTYPES, get_part_dtype
from hil.core.results import Tolerance
from hil.core.tensors import Array, get_dtype_name

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]

# Drawable parts of complex numbers.
PARTS = ("magnitude", "phase", "real", "imaginary")

# Codes from :func:`classify_nonfinite`, the most severe last. A group of elements is shown with the largest code in
# the group.
FINITE, SAME, INF_THERE, NAN_THERE, MINUS_INF_HERE, INF_HERE, NAN_HERE = range(7)
NONFINITE = {
    SAME: "the same NaN or infinity on both sides",
    INF_THERE: "infinite only in the reference",
    NAN_THERE: "NaN only in the reference",
    MINUS_INF_HERE: "-infinite, but not in the reference",
    INF_HERE: "infinite, but not in the reference",
    NAN_HERE: "NaN, but not in the reference",
}
# Like :data:`NONFINITE`, for a tensor without a reference.
NONFINITE_ALONE = {MINUS_INF_HERE: "-infinite", INF_HERE: "infinite", NAN_HERE: "NaN"}

_FULL_TURN = 2 * np.pi


@np.errstate(all="ignore")  # casting a signalling NaN warns
def to_reals(values: Array, part: str = "") -> Floats:
    """Return a float64 per element; for complex elements the requested part (default: the magnitude)."""
    if values.dtype.kind != "c":
        return values.astype(np.float64)
    wide = values.astype(np.complex128)
    if part == "real":
        return wide.real
    if part == "imaginary":
        return wide.imag
    return np.asarray(np.angle(wide) if part == "phase" else np.abs(wide), np.float64)


def compute_difference(a: Array, b: Array, part: str = "") -> Floats:
    """Return ``|a-b|``: 0 for equal NaN or infinity, inf if only one side is finite, never 0 for unequal integers.

    Args:
        part: complex part to compare; "" and "magnitude" give abs(a - b).
    """
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        wide = np.result_type(a, b)
        if wide.kind in "iu":
            x, y = a.astype(wide), b.astype(wide)
            # The exact difference fits in uint64, and unsigned subtraction with wrapping gives this difference.
            unsigned = np.dtype(f"u{wide.itemsize}")
            apart = np.maximum(x, y).view(unsigned) - np.minimum(x, y).view(unsigned)
            return np.asarray(apart, np.float64)
    with np.errstate(all="ignore"):
        p, q = _convert_numbers(a, part), _convert_numbers(b, part)
        found: Floats = np.abs(p - q)
        if part == "phase" and "c" in (a.dtype.kind, b.dtype.kind):
            found = np.minimum(found, _FULL_TURN - found)
        odd = ~np.isfinite(found)
        if odd.any():
            # A difference between finite numbers may overflow float64, so use the largest finite value.
            found[odd] = np.where(np.isfinite(p[odd]) & np.isfinite(q[odd]), np.finfo(np.float64).max, np.inf)
            found[(p == q) | ((p != p) & (q != q))] = 0.0
    return found


def compute_ratio(a: Array, b: Array, tolerance: Tolerance | None) -> Floats:
    """Return ``|a-b| / (atol + rtol*|b|)``: above 1 if an element is out of tolerance. 0 for equal elements.

    If only equal elements pass, or the ratio overflows, the result is the largest float64.
    """
    limits = tolerance or Tolerance(0.0, 0.0)
    found = compute_difference(a, b)
    with np.errstate(all="ignore"):
        limit = limits.atol + limits.rtol * np.abs(to_reals(b)) if limits.rtol else np.full(found.shape, limits.atol)
        ratio = np.where(found == 0, 0.0, found / limit)
    return np.asarray(np.minimum(ratio, np.finfo(np.float64).max), np.float64)


def try_quick_difference(a: Array, b: Array) -> Floats | None:
    """Return ``|a-b|`` by plain subtraction, or None if that is unsafe.

    Requires floats with the same dtype, at least 32 bits wide, and finite differences.
    """
    if a.dtype != b.dtype or a.dtype.kind != "f" or a.dtype.itemsize < 4:
        return None
    with np.errstate(all="ignore"):
        found = np.abs(np.subtract(a, b))
        return found if np.isfinite(np.maximum.reduce(found, axis=None, initial=0)) else None


def classify_nonfinite(a: Array, b: Array | None = None) -> Codes:
    """Return every element's code from :data:`NONFINITE` (without b: :data:`NONFINITE_ALONE`), or FINITE."""
    with np.errstate(all="ignore"):
        p = _convert_numbers(a)
        nan, finite = np.isnan(p), np.isfinite(p)
        found = np.where(nan, NAN_HERE, np.where(finite, FINITE, INF_HERE)).astype(np.uint8)
        if p.dtype.kind != "c":
            found[p == -np.inf] = MINUS_INF_HERE
        if b is None:
            return found
        q = _convert_numbers(b)
        there = np.where(np.isnan(q), NAN_THERE, np.where(np.isfinite(q), FINITE, INF_THERE)).astype(np.uint8)
        found = np.where(finite, there, found)
        found[~finite & ((p == q) | (nan & np.isnan(q)))] = SAME
    return found


def has_ulps(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """Return True if ULPs can be counted, which requires floats with the same dtype."""
    return get_dtype_name(a) == get_dtype_name(b) and get_dtype_name(a) not in EXACT_DTYPES


def count_ulps(a: Array, b: Array) -> npt.NDArray[np.uint64]:
    """Count the representable values between two float elements; 0 if any is not finite.

    For complex elements, return the maximum over both parts.
    """
    part = get_part_dtype(a.dtype)
    unsigned = np.dtype(f"u{part.itemsize}")
    shape = (*a.shape, -1) if a.dtype.kind == "c" else a.shape
    x, y = (np.ascontiguousarray(one).view(unsigned).reshape(shape) for one in (a, b))
    if part.itemsize == 1:
        places = rank_bytes(get_dtype_name(part)).astype(np.int64)
        found = np.abs(places[x] - places[y]).astype(np.uint64)
    else:
        # The bits of a float are a sign and a magnitude, and the magnitude as an integer counts the representable
        # values from 0.
        top = unsigned.type(1 << (part.itemsize * 8 - 1))
        p, q = x & ~top, y & ~top
        apart = np.maximum(p, q) - np.minimum(p, q)
        found = np.where((x ^ y) & top, p + q, apart).astype(np.uint64)
    with np.errstate(all="ignore"):
        found[~(np.isfinite(x.view(part)) & np.isfinite(y.view(part)))] = 0
    return np.asarray(found.max(axis=-1) if a.dtype.kind == "c" else found, np.uint64)


def _convert_numbers(values: Array, part: str = "") -> Array:
    if values.dtype.kind == "c" and part in ("", "magnitude"):
        return values.astype(np.complex128)
    return to_reals(values, part)
