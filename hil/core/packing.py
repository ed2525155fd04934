"""Sub-byte tensors (int4 and friends): a byte an element as ml_dtypes keeps them <-> packed as runtimes do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hil.core.tensors import Array, dtype_name, dtype_of

SUB_BYTE_BITS = {"uint4": 4, "int4": 4, "float4_e2m1fn": 4, "uint2": 2, "int2": 2}


def pack(array: Array) -> Array:
    """A sub-byte tensor's elements packed into bytes (uint8, flat), lowest bits first, the rest of the last byte 0."""
    bits = SUB_BYTE_BITS[dtype_name(array.dtype)]
    per_byte = 8 // bits
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    padded = np.zeros(-(-flat.size // per_byte) * per_byte, np.uint8)
    padded[: flat.size] = flat
    lanes = padded.reshape(-1, per_byte) << (np.arange(per_byte, dtype=np.uint8) * bits)
    return np.asarray(np.bitwise_or.reduce(lanes, axis=1), np.uint8)


def unpack(packed: Array, name: str, shape: Sequence[int]) -> Array:
    """The reverse of :func:`pack` for a sub-byte dtype's name: a tensor of ``shape``, one byte an element."""
    bits = SUB_BYTE_BITS[name]
    per_byte = 8 // bits
    lanes = (packed.reshape(-1, 1) >> (np.arange(per_byte, dtype=np.uint8) * bits)) & ((1 << bits) - 1)
    flat = lanes.reshape(-1)[: math.prod(shape)].astype(np.uint8)
    if name.startswith("int"):
        # Sign-extend: ml_dtypes keeps an int4 as the int8 of the same value.
        shift = 8 - bits
        flat = ((flat << shift).view(np.int8) >> shift).view(np.uint8)
    return flat.view(dtype_of(name)).reshape(shape)
