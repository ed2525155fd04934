"""Define operators for ONNX's evaluator: replacements of its own operators, and ONNX Runtime's operators.

Unsupported attributes and inputs raise an error, because they may change the meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype
from onnx.reference.op_run import OpRun

from hil.controller.backends.references.definitions.attention import (
    append_cache,
    compute_attention,
    join_heads,
    make_window_bias,
    rotate_heads,
    split_heads,
)
from hil.controller.backends.references.definitions.normalization import normalize_rms, skip_rms_normalization
from hil.controller.backends.references.definitions.quantization import (
    dequantize,
    dequantize_nbits_weights,
    multiply_nbits,
)
from hil.core.tensors import Array

_CONTRIB = "com.microsoft"


def _refuse(values: Mapping[str, Any], what: str) -> None:
    """Raise NotImplementedError if any of these attributes or inputs is set."""
    if given := [name for name, value in values.items() if value is not None and not _is_off(value)]:
        raise NotImplementedError(f"unsupported attribute or input of {what}: {', '.join(given)}")


def _is_off(value: Any) -> bool:
    return isinstance(value, int | float | str | bytes) and (not value or value in (-1, "NONE", b"NONE"))


class DequantizeLinear(OpRun):
    """DequantizeLinear of all opsets: later versions only extend earlier versions."""

    op_domain = ""

    def _run(
        self,
        x: Array,
        scale: Array,
        zero_point: Array | None = None,
        axis: int = 1,
        block_size: int = 0,
        output_dtype: int = 0,
    ) -> tuple[Array, ...]:
        dtype = tensor_dtype_to_np_dtype(output_dtype) if output_dtype else scale.dtype
        return (dequantize(x, scale, zero_point, axis=axis, block_size=block_size).astype(dtype),)


class MatMulNBits(OpRun):
    """MatMulNBits for weights of 2, 4 or 8 bits."""

    op_domain = _CONTRIB

    def _run(
        self,
        a: Array,
        b: Array,
        scales: Array,
        zero_points: Array | None = None,
        g_idx: Array | None = None,
        bias: Array | None = None,
        K: int = 0,  # noqa: N803 - the attributes' names
        N: int = 0,  # noqa: N803
        bits: int = 4,
        block_size: int = 32,
        accuracy_level: int = 0,
        **others: Any,
    ) -> tuple[Array, ...]:
        _refuse(others, "MatMulNBits")
        shape = {"rows": K, "columns": N, "bits": bits, "block_size": block_size}
        return (
            multiply_nbits(a, dequantize_nbits_weights(b, scales, zero_points, g_idx, **shape), bias).astype(a.dtype),
        )


class SimplifiedLayerNormalization(OpRun):
    """SimplifiedLayerNormalization, which ONNX Runtime registers in the ONNX domain."""

    op_domain = ""

    def _run(
        self, x: Array, scale: Array, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, **others: Any
    ) -> tuple[Array, ...]:
        _refuse(others, "SimplifiedLayerNormalization")
        y, inverse = normalize_rms(x, scale, axis=axis, epsilon=epsilon)
        return y.astype(scale.dtype), inverse.astype(np.float32)


class SkipSimplifiedLayerNormalization(OpRun):
    """SkipSimplifiedLayerNormalization. The fourth output is the sum of input, skip and bias."""

    op_domain = _CONTRIB

    def _run(
        self,
        x: Array,
        skip: Array,
        gamma: Array,
        bias: Array | None = None,
        epsilon: float = 1e-12,
        **others: Any,
    ) -> tuple[Array, ...]:
        _refuse(others, "SkipSimplifiedLayerNormalization")
        y, inverse, total = skip_rms_normalization(x, skip, gamma, bias, epsilon=epsilon)
        # The mean is not defined for this operator. ONNX Runtime also omits it.
        return y.astype(x.dtype), np.zeros((), np.float32), inverse.astype(np.float32), total.astype(x.dtype)


class RotaryEmbedding(OpRun):
    """RotaryEmbedding of ONNX Runtime. The order of the arguments differs from ONNX's operator."""

    op_domain = _CONTRIB

    def _run(
        self,
        x: Array,
        positions: Array,
        cos: Array,
        sin: Array,
        interleaved: int = 0,
        num_heads: int = 0,
        rotary_embedding_dim: int = 0,
        scale: float = 1.0,
        **others: Any,
    ) -> tuple[Array, ...]:
        _refuse({**others, "scale": None if scale == 1 else scale}, "RotaryEmbedding")
        heads = x if x.ndim == 4 else split_heads(x, num_heads or x.shape[-1] // (2 * cos.shape[-1]))
        batch, length = heads.shape[0], heads.shape[2]
        where = positions + np.arange(length)[None] if positions.size == 1 else positions
        where = np.broadcast_to(where, (batch, length))
        y = rotate_heads(heads, cos, sin, where, interleaved=bool(interleaved), size=rotary_embedding_dim)
        return ((y if x.ndim == 4 else join_heads(y)).astype(x.dtype),)


class GroupQueryAttention(OpRun):
    """GroupQueryAttention without head sinks and smooth softmax."""

    op_domain = _CONTRIB

    def _run(
        self,
        query: Array,
        key: Array | None,
        value: Array | None,
        past_key: Array | None,
        past_value: Array | None,
        seqlens_k: Array,
        total_sequence_length: Array,
        cos: Array | None = None,
        sin: Array | None = None,
        positions: Array | None = None,
        attention_bias: Array | None = None,
        head_sink: Array | None = None,
        num_heads: int = 0,
        kv_num_heads: int = 0,
        scale: float = 0.0,
        softcap: float = 0.0,
        do_rotary: int = 0,
        rotary_interleaved: int = 0,
        local_window_size: int = -1,
        **others: Any,
    ) -> tuple[Array, ...]:
        _refuse({**others, "head_sink": head_sink}, "GroupQueryAttention")
        if key is None or value is None:  # query, key and value are packed
            size = query.shape[-1] // (num_heads + 2 * kv_num_heads)
            cuts = [num_heads * size, (num_heads + kv_num_heads) * size]
            query, key, value = np.split(query, cuts, axis=-1)
        q, k, v = split_heads(query, num_heads), split_heads(key, kv_num_heads), split_heads(value, kv_num_heads)
        length, total = q.shape[2], int(np.asarray(total_sequence_length).ravel()[0])
        ends = np.asarray(seqlens_k).ravel().astype(np.int64) + 1
        if length == total and (ends != total).any():
            raise NotImplementedError(
                "unsupported padded prompts of GroupQueryAttention: the padding rows are undefined"
            )
        starts = np.zeros_like(ends) if length == total else ends - length
        if do_rotary:
            if cos is None or sin is None:
                raise NotImplementedError("GroupQueryAttention with do_rotary requires tables of cosines and sines")
            where = starts[:, None] + np.arange(length)[None] if positions is None else positions
            where = np.minimum(where, cos.shape[0] - 1)  # positions of padding may exceed the table
            turn = {"interleaved": bool(rotary_interleaved), "size": 2 * cos.shape[-1]}
            q, k = (rotate_heads(one, cos, sin, where, **turn) for one in (q, k))
        room = max(total, 0 if past_key is None else past_key.shape[2])
        keys = append_cache(past_key, k.astype(query.dtype), starts, room)
        values = append_cache(past_value, v, starts, room)
        left = local_window_size - 1 if local_window_size > 0 else -1
        bias = make_window_bias(length, room, starts, is_causal=True, left=left)
        if attention_bias is not None:
            more = np.full((*attention_bias.shape[:-1], room), 0.0)
            more[..., : attention_bias.shape[-1]] = attention_bias
            bias = bias + more
        y, _, _ = compute_attention(q, keys, values, bias, scale=scale, softcap=softcap)
        return join_heads(y).astype(query.dtype), keys, values


class Attention(OpRun):
    """Attention of opsets 23 to 25."""

    op_domain = ""

    def _run(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None = None,
        past_key: Array | None = None,
        past_value: Array | None = None,
        lengths: Array | None = None,
        scale: float | None = None,
        is_causal: int = 0,
        q_num_heads: int | None = None,
        kv_num_heads: int | None = None,
        softmax_precision: int | None = None,
        softcap: float = 0.0,
        qk_matmul_output_mode: int = 0,
        left_window_size: int = -1,
        right_window_size: int = -1,
        **others: Any,
    ) -> tuple[Array, ...]:
        _refuse(others, "Attention")
        if qk_matmul_output_mode in (1, 2) and len(self.onnx_node.output) > 3:
            raise NotImplementedError(
                f"unsupported qk_matmul_output_mode {qk_matmul_output_mode}: the definition differs between versions"
            )
        dtype, is_flat = q.dtype, q.ndim == 3
        if is_flat:
            q, k, v = (
                split_heads(q, q_num_heads or 1),
                split_heads(k, kv_num_heads or 1),
                split_heads(v, kv_num_heads or 1),
            )
        keys, values = (
            new if past is None else np.concatenate([past, new], axis=2)
            for past, new in ((past_key, k), (past_value, v))
        )
        queries, count = q.shape[2], keys.shape[2]
        if past_key is not None:
            first = np.array([past_key.shape[2]])
        else:
            first = np.array([0]) if lengths is None else lengths.ravel() - queries
        windows = {"left": left_window_size, "right": right_window_size}
        bias = make_window_bias(queries, count, first, is_causal=bool(is_causal), **windows)
        if mask is not None:
            bias = bias + _make_additive(mask, count)
        if lengths is not None:
            bias = bias + np.where(np.arange(count) < lengths.reshape(-1, 1, 1, 1), 0.0, -np.inf)
        y, products, probabilities = compute_attention(q, keys, values, bias, scale=scale, softcap=softcap or 0.0)
        shown = probabilities if qk_matmul_output_mode == 3 else products
        return (join_heads(y) if is_flat else y).astype(dtype), keys, values, shown.astype(dtype)


class GatherElements(OpRun):
    """GatherElements with a range check.

    ONNX's evaluator takes indices out of range modulo the size. The specification does not allow this.
    """

    op_domain = ""

    def _run(self, x: Array, indices: Array, axis: int = 0) -> tuple[Array, ...]:
        size = x.shape[axis]
        if indices.size and not -size <= indices.min() <= indices.max() < size:
            raise IndexError(f"GatherElements index out of range for axis {axis} of size {size}")
        index: list[Array] = list(np.indices(indices.shape, sparse=True))
        index[axis] = indices
        return (x[tuple(index)],)


def _make_additive(mask: Array, keys: int) -> Array:
    """Return a mask as a bias. If the mask is shorter than the keys, the remaining keys are excluded."""
    bias = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64)
    missing = keys - bias.shape[-1]
    return np.pad(bias, [(0, 0)] * (bias.ndim - 1) + [(0, missing)], constant_values=-np.inf) if missing > 0 else bias


OPERATORS: tuple[type[OpRun], ...] = (
    Attention,
    DequantizeLinear,
    GatherElements,
    GroupQueryAttention,
    MatMulNBits,
    RotaryEmbedding,
    SimplifiedLayerNormalization,
    SkipSimplifiedLayerNormalization,
)
