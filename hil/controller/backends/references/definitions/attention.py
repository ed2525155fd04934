"""Compute attention and rotary embeddings in float64.

Sources: the operators Attention and RotaryEmbedding of the ONNX specification (https://onnx.ai/onnx/operators, 23 and
24), GroupQueryAttention and RotaryEmbedding of ONNX Runtime (docs/ContribOperators.md); A. Vaswani et al., Attention Is
All You Need, 2017; J. Su et al., RoFormer, 2021.
"""

from __future__ import annotations

import math

import numpy as np

from hil.controller.backends.references.definitions.quantization import widen
from hil.core.tensors import Array


def split_heads(x: Array, heads: int) -> Array:
    """Reshape [batch, length, heads * size] to [batch, heads, length, size]."""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def join_heads(x: Array) -> Array:
    """Reverse :func:`split_heads`."""
    batch, heads, length, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)


def compute_attention(
    q: Array, k: Array, v: Array, bias: Array, *, scale: float | None = None, softcap: float = 0.0
) -> tuple[Array, Array, Array]:
    """Return ``softmax(q k^T * scale + bias) v``, the products ``q k^T * scale``, and the probabilities.

    The output is zero for a query for which all keys are excluded.

    Args:
        q, k, v: Shape [batch, heads, length, size]. The head count of ``q`` is a multiple of the head count of ``k``
            and ``v``.
        bias: Broadcasts to [batch, heads, length of q, length of k]; -inf excludes a key.
        scale: Scale of the products; None or 0 is ``1 / sqrt(size)``.
        softcap: If not 0, products are replaced by ``softcap * tanh(product / softcap)`` before the bias is added.
    """
    q, k, v = widen(q), widen(k), widen(v)
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    products: Array = q @ k.swapaxes(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = softcap * np.tanh(products / softcap) if softcap else products
    scores = scores + bias
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(largest), 0.0, largest))
    total = weights.sum(axis=-1, keepdims=True)
    probabilities = weights / np.where(total == 0, 1.0, total)
    return probabilities @ v, products, probabilities


def make_window_bias(
    queries: int, keys: int, first: Array, *, is_causal: bool, left: int = -1, right: int = -1
) -> Array:
    """Return a bias [batch, 1, queries, keys]: 0 for keys that a query may attend to, -inf for other keys.

    Args:
        first: The position of the first query among the keys, for every batch.
        left, right: Number of keys before and after the query's position; -1 means all keys.
    """
    position = np.reshape(first, (-1, 1, 1, 1)) + np.arange(queries).reshape(1, 1, -1, 1)
    key = np.arange(keys).reshape(1, 1, 1, -1)
    allowed = np.ones(np.broadcast_shapes(position.shape, key.shape), bool)
    if is_causal:
        allowed &= key <= position
    if left >= 0:
        allowed &= key >= position - left
    if right >= 0:
        allowed &= key <= position + right
    return np.where(allowed, 0.0, -np.inf)


def rotate_heads(
    x: Array, cos: Array, sin: Array, positions: Array, *, interleaved: bool = False, size: int = 0
) -> Array:
    """Return heads rotated by their positions.

    Args:
        x: Shape [batch, heads, length, head size].
        cos, sin: Shape [positions, size / 2].
        positions: Shape [batch, length].
        interleaved: True if the two elements of a pair are adjacent. Otherwise, the second elements are in the second
            half of ``size``.
        size: Number of rotated elements of a head; 0 means all elements.
    """
    x = widen(x)
    size = size or x.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    cosine, sine = (widen(table)[positions][:, np.newaxis, :, : size // 2] for table in (cos, sin))
    one, other = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else np.split(rotated, 2, axis=-1)
    real, imaginary = cosine * one - sine * other, sine * one + cosine * other
    if interleaved:
        return np.concatenate([np.stack([real, imaginary], -1).reshape(rotated.shape), rest], axis=-1)
    return np.concatenate([real, imaginary, rest], axis=-1)


def append_cache(past: Array | None, new: Array, lengths: Array, size: int) -> Array:
    """Return a cache of ``size`` positions with past keys or values, then new keys or values, then zeros.

    Args:
        past: Shape [batch, heads, positions, head size], or None.
        new: Shape [batch, heads, length, head size].
        lengths: Number of valid past positions, for every batch.
    """
    batch, heads, length, head = new.shape
    cache = np.zeros((batch, heads, size, head), new.dtype)
    for number, start in enumerate(np.asarray(lengths).ravel().tolist()):
        if past is not None:
            cache[number, :, :start] = past[number, :, :start]
        cache[number, :, start : start + length] = new[number]
    return cache
