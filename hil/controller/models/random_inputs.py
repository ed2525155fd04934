"""Random tensors that suit their dtype, the same on every machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hil.core.tensors import SUB_BYTE_BITS, Array, TensorSpec, dtype_of
from hil.errors import UsageError

# Random floats are drawn from a standard normal cut off here, so that sums and exponentials stay in range.
_CUT = 4.0
# Random integers wider than 8 bits stay small: sums and products must not overflow, sizes and indices not run away.
_SMALL_INTEGER = 100
_WORDS = ("", "a", "hil", "board", "tensor", "naïve", "日本", "two words")


def random_tensor(
    spec: TensorSpec, shape: Sequence[int], *, seed: int, bounds: tuple[float, float] | None = None
) -> Array:
    """A random tensor that suits the dtype: no NaN, no infinity, the same on every machine.

    Floats are normal (cut off at 4 standard deviations) or uniform within ``bounds``; integers uniform over all values
    up to 8 bits, else between -100 and 100, or within ``bounds``.

    Raises:
        UsageError: the dtype has no value within the bounds.
    """
    digest = hashlib.blake2b(f"{seed}\0{spec.name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    name, dtype, shape = spec.dtype, dtype_of(spec.dtype), tuple(shape)
    if name == "string":
        words = generator.integers(0, len(_WORDS), shape)
        return np.asarray(np.array(_WORDS, dtype=object)[words], dtype=object).reshape(shape)
    if name == "bool":
        return np.asarray(generator.integers(0, 2, shape), np.bool_).reshape(shape)
    low, high = limits_of(name)
    if "int" in name:
        if bounds is not None:
            low, high = _within(spec, bounds, math.ceil(max(low, bounds[0])), math.floor(min(high, bounds[1])))
        elif _bits(name) > 8:
            low, high = max(low, -_SMALL_INTEGER), min(high, _SMALL_INTEGER)
        wide = np.uint64 if low >= 0 else np.int64
        return np.asarray(generator.integers(int(low), int(high), shape, wide, endpoint=True)).astype(dtype)
    if name in ("complex64", "complex128"):
        part = np.float32 if name == "complex64" else np.float64
        real, imaginary = (_floats(generator, shape, part, bounds) for _ in range(2))
        return np.asarray(real + 1j * imaginary, dtype).reshape(shape)
    if bounds is not None:
        bounds = _within(spec, bounds, max(low, bounds[0]), min(high, bounds[1]))
    values = _floats(generator, shape, np.float64 if name == "float64" else np.float32, bounds)
    if low >= 0 and bounds is None:
        values = np.abs(values)  # a dtype without a sign
    return np.clip(values, low, high).astype(dtype)


def _bits(name: str) -> int:
    """How many bits an element of a dtype has."""
    return SUB_BYTE_BITS.get(name) or dtype_of(name).itemsize * 8


def _floats(generator: Any, shape: tuple[int, ...], dtype: Any, bounds: tuple[float, float] | None) -> Array:
    if bounds is None:
        return np.asarray(np.clip(generator.standard_normal(shape, dtype), -_CUT, _CUT), dtype)
    share = np.asarray(generator.random(shape, dtype), dtype)
    # low + share * (high - low) would overflow where the bounds are the dtype's own.
    return np.asarray(share * dtype(bounds[1]) + (dtype(1) - share) * dtype(bounds[0]), dtype)


def limits_of(name: str) -> tuple[float, float]:
    """The lowest and highest finite value of a numeric dtype."""
    if "int" in name:
        bits = _bits(name)
        return (0, (1 << bits) - 1) if name.startswith("u") else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    import ml_dtypes

    finfo: Any = ml_dtypes.finfo
    limits = finfo(dtype_of("float32" if name == "complex64" else "float64" if name == "complex128" else name))
    if name == "float8_e8m0fnu":
        # Powers of two from 2^-127 to 2^127: the least of them would be flushed to zero on the way here.
        return float(limits.smallest_normal), float(limits.max)
    return float(limits.min), float(limits.max)


def _within(spec: TensorSpec, bounds: tuple[float, float], low: float, high: float) -> tuple[float, float]:
    if not low <= high:
        raise UsageError(f"no {spec.dtype} lies between {bounds[0]:g} and {bounds[1]:g}", hint=f"for input {spec}")
    return low, high
