"""Round values to an arithmetic, to nearest or randomly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hil.controller.models.importers.onnx_nodes import iter_nodes, list_graphs
from hil.core.arithmetic import FLOATS, INT8_LEVELS, Arithmetic
from hil.core.tensors import Array, get_dtype_name

# Significand bits of the dtypes that an arithmetic may narrow.
_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
# Operators that int8 hardware computes -> channel axes of the first two inputs.
_CONTRACTIONS = {
    "MatMul": (None, -1),
    "Gemm": (None, 1),
    "Conv": (None, 0),
    "ConvTranspose": (None, 1),
    "MatMulNBits": (None, None),  # the second operand is already quantized
}
_DOMAINS = ("", "ai.onnx", "com.microsoft")
# Operators whose inputs after the first determine shapes.
_SHAPING = ("Resize", "Upsample")


@dataclass(frozen=True)
class Names:
    """Names of values in a model with special rules for rounding."""

    constants: frozenset[str]
    shaping: frozenset[str]

    @classmethod
    def from_model(cls, model: Any) -> Names:
        """Collect the names from a model and the subgraphs."""
        nodes = list(iter_nodes(model.graph.node))
        constants = {tensor.name for graph in list_graphs(model.graph) for tensor in graph.initializer}
        constants |= {node.output[0] for node in nodes if node.op_type == "Constant"}
        shaping = {name for node in nodes if node.op_type in _SHAPING for name in node.input[1:] if name}
        return cls(frozenset(constants), frozenset(shaping))


class Exact:
    """Rounding that changes nothing, for the reference run of a control."""

    def round_operand(self, array: Array, node: Any, place: int) -> Array:
        """Return an operand of a node. Subclasses round the operand."""
        return array

    def value(self, array: Array, name: str) -> Array:
        """Return a model input or a node's result. Subclasses round the value."""
        return array


class Rounding(Exact):
    """Rounding of the operands and results of a model's nodes.

    Args:
        arithmetic: ``float16``, ``bfloat16`` or ``int8``.
        names: Names of constants (weights), and of values that determine shapes and are not rounded.
        seed: Seed for random rounding up or down, with probabilities by distance (D. S. Parker, Monte Carlo Arithmetic,
            1997). None rounds to nearest.

    Attributes:
        clipped: Names of constants with finite values that exceed the range of the arithmetic.
    """

    def __init__(self, arithmetic: str, names: Names, *, seed: int | None = None) -> None:
        self._float = FLOATS.get(arithmetic)
        self._names = names
        self.clipped: set[str] = set()
        self._rng = None if seed is None else np.random.default_rng(seed)

    def round_operand(self, array: Array, node: Any, place: int) -> Array:
        """Round a constant or, for int8, an operand of a contraction."""
        constant = node.input[place] in self._names.constants
        if get_dtype_name(array.dtype) not in _DIGITS or not array.size:
            return array
        if self._float is None:
            if place > 1 or node.op_type not in _CONTRACTIONS or node.domain not in _DOMAINS:
                return array
            return self._to_int8(array, _find_axis(node, place) if constant and array.ndim > 1 else None)
        if constant and node.input[place] not in self._names.shaping:
            rounded = self._to_float(array, self._float, saturate=True)
            sizes = np.abs(rounded)
            if bool(((sizes == self._float.largest) & np.isfinite(array) & (sizes < np.abs(array))).any()):
                self.clipped.add(node.input[place])
            return rounded
        return array

    def value(self, array: Array, name: str) -> Array:
        """Round a computed value, for float arithmetics."""
        if self._float is None or name in self._names.constants or name in self._names.shaping:
            return array
        return self._to_float(array, self._float, saturate=False)

    def _to_float(self, array: Array, to: Arithmetic, *, saturate: bool) -> Array:
        if not array.size or _DIGITS.get(get_dtype_name(array.dtype), 0) <= to.digits:
            return array
        values = array.astype(np.float64)
        with np.errstate(all="ignore"):
            step = np.ldexp(1.0, np.frexp(values)[1] - to.digits)
            step = np.maximum(step, to.smallest)
            rounded = self._to_whole(values / step) * step
            limit = np.copysign(to.largest if saturate else np.inf, values)
            rounded = np.where(np.abs(rounded) > to.largest, limit, rounded)
            return np.asarray(np.where(np.isfinite(values), rounded, values).astype(array.dtype))

    def _to_int8(self, array: Array, axis: int | None) -> Array:
        others = None if axis is None else tuple(n for n in range(array.ndim) if n != axis % array.ndim)
        values = array.astype(np.float64)
        with np.errstate(all="ignore"):
            largest = np.max(np.abs(values), axis=others, keepdims=True)
            scale = np.where(largest > 0, largest, 1.0) / INT8_LEVELS
            return np.asarray((self._to_whole(values / scale) * scale).astype(array.dtype))

    def _to_whole(self, values: Array) -> Array:
        return np.rint(values) if self._rng is None else np.floor(values + self._rng.random(values.shape))


def _find_axis(node: Any, place: int) -> int | None:
    if node.op_type == "Gemm" and place == 1 and any(one.name == "transB" and one.i for one in node.attribute):
        return 0
    return _CONTRACTIONS[node.op_type][place]
