"""Compute normalization by the root mean square, in float64.

Source: ONNX Runtime's docs/ContribOperators.md (SimplifiedLayerNormalization, SkipSimplifiedLayerNormalization), and
B. Zhang, R. Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import numpy as np

from hil.controller.backends.references.definitions.quantization import widen
from hil.core.tensors import Array


def normalize_rms(x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5) -> tuple[Array, Array]:
    """Return ``x / sqrt(mean(x^2) + epsilon) * scale``, and ``1 / sqrt(mean(x^2) + epsilon)``.

    Args:
        axis: The first axis of the mean. The mean includes all following axes.
    """
    x = widen(x)
    first = axis + x.ndim if axis < 0 else axis
    axes = tuple(range(first, x.ndim))
    inverse: Array = 1 / np.sqrt(np.mean(np.square(x), axis=axes, keepdims=True) + epsilon)
    return x * inverse * widen(scale), inverse


def skip_rms_normalization(
    x: Array, skip: Array, scale: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, Array, Array]:
    """Return the normalized sum of input, skip and bias; the inverse of its root mean square; and the sum.

    ``skip`` may lack the batch axis, or have a batch size of 1.
    """
    total = widen(x) + widen(skip).reshape((1,) * (x.ndim - skip.ndim) + skip.shape)
    if bias is not None:
        total = total + widen(bias)
    return *normalize_rms(total, scale, epsilon=epsilon), total
