"""Bounds for the inputs of an ONNX model, from the operators that use them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hil.controller.models.importers.onnx_nodes import constants_of

# Operators that hand the values of their first input on unchanged.
_TRANSPARENT = {"Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Flatten", "Expand", "Tile"}


def known_ranges(graph: Any, inputs: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The (low, high) of inputs that go straight into an operator which bounds them, by a graph with inferred shapes.

    Indices of Gather and its kin lie within the gathered axis, of OneHot within its depth; what is quantised lies
    within what its scale and zero point can say; what is clipped lies within the clip's limits.
    """
    look = _Look(graph)
    ranges: dict[str, tuple[float, float]] = {}
    for name in inputs:
        bounds = [bound for bound in look.bounds(name) if bound[0] <= bound[1]]
        if bounds:
            low, high = max(bound[0] for bound in bounds), min(bound[1] for bound in bounds)
            if low <= high:
                ranges[name] = (low, high)
    return ranges


class _Look:
    def __init__(self, graph: Any) -> None:
        self._types = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info, *graph.output)}
        self._constants = constants_of(graph)
        self._users: dict[str, list[tuple[Any, int]]] = {}
        for node in graph.node:
            for position, name in enumerate(node.input):
                self._users.setdefault(name, []).append((node, position))

    def bounds(self, name: str) -> Iterator[tuple[float, float]]:
        pending, seen = [name], {name}
        while pending:
            for node, position in self._users.get(pending.pop(), ()):
                if node.op_type in _TRANSPARENT and position == 0:
                    fresh = [output for output in node.output[:1] if output not in seen]
                    pending += fresh
                    seen.update(fresh)
                    continue
                # Bounds are a help, not a condition: a node whose attributes or constants make no sense bounds nothing.
                bound = None
                with contextlib.suppress(Exception):
                    bound = self._bound(node, position)
                if bound is not None:
                    yield bound

    def _bound(self, node: Any, position: int) -> tuple[float, float] | None:
        kind = (node.op_type, position)
        if kind in (("Gather", 1), ("GatherElements", 1), ("ScatterElements", 1)):
            return self._index(node.input[0], _attribute(node, "axis", 0))
        if kind == ("OneHot", 0):
            depth = self._values(node, 1)
            return None if depth is None else (0.0, float(depth.reshape(-1)[0]) - 1)
        if kind == ("QuantizeLinear", 0):
            return self._quantised(node)
        if kind == ("Clip", 0):
            low, high = self._limit(node, 1, "min", -math.inf), self._limit(node, 2, "max", math.inf)
            # A one-sided clip (a ReLU) bounds nothing that could be drawn from.
            return (low, high) if math.isfinite(low) and math.isfinite(high) else None
        return None

    def _index(self, table: str, axis: int) -> tuple[float, float] | None:
        if table in self._constants:
            shape = list(self._constants[table].dims)
        elif table in self._types and self._types[table].HasField("shape"):
            shape = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in self._types[table].shape.dim]
        else:
            return None
        if not -len(shape) <= axis < len(shape) or shape[axis] < 1:
            return None
        return 0.0, float(shape[axis] - 1)

    def _quantised(self, node: Any) -> tuple[float, float] | None:
        scale = self._values(node, 1)
        zero = self._values(node, 2) if len(node.input) > 2 and node.input[2] else np.zeros(1, np.uint8)
        if scale is None or zero is None or zero.dtype not in (np.int8, np.uint8, np.int16, np.uint16):
            return None
        # Equal shapes, or one number for all: what numpy makes of others could be larger than memory.
        if scale.shape != zero.shape and 1 not in (scale.size, zero.size):
            return None
        limits = np.iinfo(zero.dtype)
        scale, zero = scale.astype(np.float64), zero.astype(np.float64)
        return float(np.min((limits.min - zero) * scale)), float(np.max((limits.max - zero) * scale))

    def _limit(self, node: Any, position: int, name: str, default: float) -> float:
        values = self._values(node, position)
        if values is not None and values.size:
            return float(values.reshape(-1)[0])
        return default if len(node.input) > position and node.input[position] else _attribute(node, name, default)

    def _values(self, node: Any, position: int) -> Any:
        from onnx import numpy_helper

        if len(node.input) <= position or node.input[position] not in self._constants:
            return None
        tensor = self._constants[node.input[position]]
        # Nobody has checked yet where the files of external tensors lie.
        return None if tensor.data_location == tensor.EXTERNAL else numpy_helper.to_array(tensor)


def _attribute(node: Any, name: str, default: Any) -> Any:
    from onnx import helper

    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)
