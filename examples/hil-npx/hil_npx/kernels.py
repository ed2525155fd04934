"""The operations of the chip, as numpy functions: the stand-in for the hardware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def conv(x: Any, w: Any, bias: Any = None, *, strides: Any, dilations: Any, pads: Any, group: int) -> Any:
    """Return the 2-D convolution of ``x`` (NCHW) with ``w``."""
    windows = _slide(np.pad(x, _spread(pads)), w.shape[2:], strides, dilations)
    batch, _, height, width, *kernel = windows.shape
    windows = windows.reshape(batch, group, -1, height, width, *kernel)
    weights = w.reshape(group, -1, *w.shape[1:])
    y = np.einsum("bgchwij,gkcij->bgkhw", windows, weights, optimize=True).reshape(batch, -1, height, width)
    return y if bias is None else y + bias.reshape(1, -1, 1, 1)


def gemm(a: Any, b: Any, c: Any = None, *, alpha: float, beta: float, transA: int, transB: int) -> Any:  # noqa: N803
    """Return ``alpha * a @ b + beta * c``. The arguments have the names of ONNX's attributes."""
    y = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return y if c is None else y + beta * c


def max_pool(x: Any, *, kernel: Any, strides: Any, pads: Any) -> Any:
    """Return the maximum of each window."""
    low = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    return _slide(np.pad(x, _spread(pads), constant_values=low), kernel, strides, (1, 1)).max((-2, -1))


def average_pool(x: Any, *, kernel: Any, strides: Any) -> Any:
    """Return the mean of each window."""
    return _slide(x, kernel, strides, (1, 1)).mean((-2, -1))


def softmax(x: Any, *, axis: int) -> Any:
    """Return the softmax along an axis."""
    powers = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
    return powers / powers.sum(axis, keepdims=True)


def flatten(x: Any, *, axis: int) -> Any:
    """Return ``x`` as a matrix."""
    rows = int(np.prod(x.shape[:axis]))
    return x.reshape(rows, x.size // rows if rows else int(np.prod(x.shape[axis:])))


def reshape(x: Any, *, shape: Any) -> Any:
    """Return ``x`` with another shape. The compiler has computed the shape."""
    return x.reshape(shape)


def _slide(x: Any, kernel: Any, strides: Any, dilations: Any) -> Any:
    reach = [(size - 1) * step + 1 for size, step in zip(kernel, dilations, strict=True)]
    view = sliding_window_view(x, reach, (2, 3))
    return view[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]


def _spread(pads: Any) -> list[tuple[int, int]]:
    top, left, bottom, right = pads
    return [(0, 0), (0, 0), (top, bottom), (left, right)]


KERNELS: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "AveragePool": average_pool,
    "Concat": lambda *parts, axis: np.concatenate(parts, axis),
    "Conv": conv,
    "Div": lambda x, y: x / y if x.dtype.kind == "f" else np.trunc(x / y).astype(x.dtype),
    "Flatten": flatten,
    "Gemm": gemm,
    "Identity": lambda x: x,
    "MatMul": np.matmul,
    "MaxPool": max_pool,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Relu": lambda x: np.maximum(x, 0),
    "Reshape": reshape,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Softmax": softmax,
    "Sub": np.subtract,
    "Tanh": np.tanh,
    "Transpose": lambda x, perm: np.transpose(x, perm),
}
