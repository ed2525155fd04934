"""Compute Softmax, LogSoftmax and Hardmax as before opset 13: over all axes from ``axis`` on, not over a single axis.

Source: Softmax-1 and Softmax-11 of the ONNX specification (https://github.com/onnx/onnx/blob/main/docs/Changelog.md).
ONNX's evaluator applies the definition of opset 13 to models of every opset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from hil.controller.backends.references.definitions.quantization import widen
from hil.core.tensors import Array

_CHANGED = 13


class _SoftmaxLike(OpRun):
    op_domain = ""

    def _run(self, x: Array, axis: int | None = None, **others: Any) -> tuple[Array, ...]:
        if not x.size:
            return (x.copy(),)
        is_old = self.run_params["opsets"][""] < _CHANGED
        place = (1 if is_old else -1) if axis is None or not self._has_axis else axis
        place = place + x.ndim if place < 0 else place
        last = tuple(range(place, x.ndim)) if is_old else (place,)
        moved = np.moveaxis(widen(x), last, range(x.ndim - len(last), x.ndim))
        flat = moved.reshape(*moved.shape[: x.ndim - len(last)], -1)
        y = self.compute(flat).reshape(moved.shape)
        return (np.moveaxis(y, range(x.ndim - len(last), x.ndim), last).astype(x.dtype),)

    @property
    def _has_axis(self) -> bool:
        """True if the node specifies an axis.

        Default values come from the newest schema, so this function cannot use them.
        """
        return any(attribute.name == "axis" for attribute in self.onnx_node.attribute)

    @staticmethod
    def compute(x: Array) -> Array:
        """Compute over the last axis, in float64."""
        raise NotImplementedError


class Softmax(_SoftmaxLike):
    """``exp(x) / sum(exp(x))``."""

    @staticmethod
    def compute(x: Array) -> Array:
        """Compute over the last axis, in float64."""
        powers = np.exp(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
        y: Array = powers / powers.sum(axis=-1, keepdims=True)
        return y


class LogSoftmax(_SoftmaxLike):
    """``x - log(sum(exp(x)))``."""

    @staticmethod
    def compute(x: Array) -> Array:
        """Compute over the last axis, in float64."""
        shifted = x - x.max(axis=-1, keepdims=True, initial=-np.inf)
        y: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return y


class Hardmax(_SoftmaxLike):
    """1 at the first maximum, 0 elsewhere."""

    @staticmethod
    def compute(x: Array) -> Array:
        """Compute over the last axis, in float64."""
        y: Array = (np.arange(x.shape[-1]) == x.argmax(axis=-1)[..., np.newaxis]).astype(np.float64)
        return y


OPERATORS: tuple[type[OpRun], ...] = (Hardmax, LogSoftmax, Softmax)
