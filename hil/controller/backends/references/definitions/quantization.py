"""Dequantize weights to float64.

Sources: the operators DequantizeLinear of the ONNX specification (https://onnx.ai/onnx/operators), MatMulNBits of ONNX
Runtime (docs/ContribOperators.md), and the OCP Microscaling Formats (MX) specification, version 1.0.
"""

from __future__ import annotations

import numpy as np

from hil.core.tensors import Array

# Block sizes of formats with shared scales: MX (OCP MX 5.2), and NVIDIA's NVFP4 with a float8_e4m3fn scale.
MX_BLOCK, NVFP4_BLOCK = 32, 16


def widen(array: Array) -> Array:
    """Return the values in float64, which represents all values of formats with up to 32 bits exactly."""
    return np.asarray(array).astype(np.float64)


def dequantize(x: Array, scale: Array, zero_point: Array | None = None, *, axis: int = 1, block_size: int = 0) -> Array:
    """Return ``(x - zero_point) * scale`` (DequantizeLinear).

    Args:
        x: Integers or floats of 4 or 8 bits, of any shape.
        scale, zero_point: One value for the tensor (a scalar, or 1 element); or one value for every index of ``axis``
            (1-D); or one value for every block of ``block_size`` elements along ``axis`` (same rank as ``x``).

    Raises:
        ValueError: the shapes do not match.
    """
    factor = spread(widen(scale), x.shape, axis, block_size)
    offset = 0.0 if zero_point is None else spread(widen(zero_point), x.shape, axis, block_size)
    values: Array = (widen(x) - offset) * factor
    return values


def spread(values: Array, shape: tuple[int, ...], axis: int, block_size: int) -> Array:
    """Reshape scales or zero points so that they broadcast to a shape. Arguments: see :func:`dequantize`."""
    if values.size == 1:
        return values.reshape(())
    place = axis + len(shape) if axis < 0 else axis
    if not 0 <= place < len(shape):
        raise ValueError(f"invalid axis {axis} of a tensor of rank {len(shape)}")
    if not block_size:
        if values.shape != (shape[place],):
            raise ValueError(f"invalid shape {values.shape} of scales for axis {place} of {shape}")
        return values.reshape([-1 if number == place else 1 for number in range(len(shape))])
    blocks = -(-shape[place] // block_size)
    wanted = (*shape[:place], blocks, *shape[place + 1 :])
    if values.shape != wanted:
        raise ValueError(f"expected scales of shape {wanted} for blocks of {block_size}, got {values.shape}")
    spread_out: Array = np.repeat(values, block_size, axis=place).take(range(shape[place]), axis=place)
    return spread_out


def dequantize_block_scaled(
    x: Array, scales: Array, *, axis: int = -1, block_size: int = MX_BLOCK, global_scale: float = 1.0
) -> Array:
    """Dequantize block-scaled elements: MXFP4, MXFP8 and MXINT8 (scales in E8M0), or NVFP4 (scales in E4M3).

    A value is ``element * block scale * global_scale`` (OCP MX 5.1; NVFP4 has a float32 scale for the tensor).
    """
    return dequantize(x, scales, axis=axis, block_size=block_size) * global_scale


def unpack_bits(packed: Array, bits: int, count: int) -> Array:
    """Unpack unsigned integers from bytes. The first integer is in the lowest bits.

    Args:
        packed: uint8, shape [..., bytes].
        bits: 2, 4 or 8.
        count: Number of integers along the last axis.

    Raises:
        ValueError: unsupported width, or too few bytes.
    """
    if bits not in (2, 4, 8):
        raise ValueError(f"expected 2, 4 or 8 bits, got {bits}")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    values = (packed[..., np.newaxis] >> shifts) & ((1 << bits) - 1)
    flat = values.reshape(*packed.shape[:-1], -1)
    if flat.shape[-1] < count:
        raise ValueError(f"expected {count} values, got {flat.shape[-1]} in {packed.shape[-1]} bytes")
    return np.asarray(flat[..., :count])


def dequantize_nbits_weights(
    b: Array,
    scales: Array,
    zero_points: Array | None = None,
    g_idx: Array | None = None,
    *,
    rows: int,
    columns: int,
    bits: int,
    block_size: int,
) -> Array:
    """Return the weights of MatMulNBits, shape [columns, rows] (N, K).

    Args:
        b: uint8, shape [N, blocks, bytes per block].
        scales: N * blocks elements.
        zero_points: Packed like ``b`` (uint8), or numbers of the scales' dtype; None means ``2 ** (bits - 1)``.
        g_idx: The block of each row; None means that blocks are in order.
    """
    blocks = -(-rows // block_size)
    values = unpack_bits(b.reshape(columns, blocks, -1), bits, block_size).reshape(columns, -1)[:, :rows]
    if zero_points is None:
        offsets = np.full((columns, blocks), 1 << (bits - 1))
    elif zero_points.dtype == np.uint8:
        offsets = unpack_bits(zero_points.reshape(columns, -1), bits, blocks)
    else:
        offsets = zero_points.reshape(columns, blocks)
    places = np.arange(rows) // block_size if g_idx is None else np.asarray(g_idx)
    factors = widen(scales).reshape(columns, blocks)
    weights: Array = (widen(values) - widen(offsets)[:, places]) * factors[:, places]
    return weights


def multiply_nbits(a: Array, weights: Array, bias: Array | None = None) -> Array:
    """Return ``a @ weights.T + bias`` in float64 (MatMulNBits). ``weights``: see :func:`dequantize_nbits_weights`."""
    product: Array = widen(a) @ weights.T
    return product if bias is None else product + widen(bias)
