"""Derive bounds for an ONNX model's inputs from the operators that use them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hil.controller.models.importers.onnx_nodes import iter_nodes, read_constants
from hil.formats.onnx_file import iter_subgraphs

# Operators that only copy values -> the inputs with these values.
_TRANSPARENT = {
    **dict.fromkeys("Identity Cast Reshape Unsqueeze Squeeze Transpose Flatten Expand Tile Slice Split".split(), (0,)),
    **dict.fromkeys("Gather GatherElements GatherND Pad Compress ReverseSequence Trilu".split(), (0,)),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
    "Where": (1, 2),
    "Concat": None,  # all inputs
}
# Indices into an axis: (operator, index input) -> (data input, axis attribute, default axis).
_INDICES: dict[tuple[str, int], tuple[int, str, int]] = {
    **{(name, 1): (0, "axis", 0) for name in ("Gather", "GatherElements", "ScatterElements", "Scatter")},
    ("GatherBlockQuantized", 1): (0, "gather_axis", 0),
    ("EmbedLayerNormalization", 0): (2, "", 0),
    ("EmbedLayerNormalization", 1): (4, "", 0),
    ("EmbedLayerNormalization", 8): (3, "", 0),
}
# Operators whose input 1 is a scalar axis of input 0.
_AXES = ("CumSum", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2")


def find_ranges(graph: Any, inputs: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return (low, high) for every input whose values reach an operator with bounds. The graph needs inferred shapes.

    The indexed axis bounds indices (GatherND and ScatterND: the shortest of the axes). The number of elements bounds
    depths and counts. Scale and zero point bound quantised values. The limits of a Clip bound clipped values.
    """
    look = _GraphIndex(graph)
    ranges: dict[str, tuple[float, float]] = {}
    for name in inputs:
        bounds = [bound for bound in look.iter_bounds(name) if bound[0] <= bound[1]]
        if bounds:
            low, high = max(bound[0] for bound in bounds), min(bound[1] for bound in bounds)
            if low <= high:
                ranges[name] = (low, high)
    return ranges


class _GraphIndex:
    def __init__(self, graph: Any) -> None:
        nodes = list(iter_nodes(graph.node))
        graphs = [graph, *(inner for node in nodes for inner in iter_subgraphs(node))]
        self._types: dict[str, Any] = {}
        self._constants: dict[str, Any] = {}
        for each in graphs:
            values = (*each.input, *each.value_info, *each.output)
            self._types |= {value.name: value.type.tensor_type for value in values}
            self._constants |= read_constants(each)
        self._users: dict[str, list[tuple[Any, int]]] = {}
        for node in nodes:
            for position, name in enumerate(node.input):
                self._users.setdefault(name, []).append((node, position))

    def iter_bounds(self, name: str) -> Iterator[tuple[float, float]]:
        pending, seen = [name], {name}
        while pending:
            for node, position in self._users.get(pending.pop(), ()):
                if _is_passing_on(node, position):
                    fresh = [output for output in node.output if output not in seen]
                    pending += fresh
                    seen.update(fresh)
                # Bounds are optional: ignore nodes with invalid attributes or constants.
                bound = None
                with contextlib.suppress(Exception):
                    bound = self._bound(node, position)
                if bound is not None:
                    yield bound

    def _bound(self, node: Any, position: int) -> tuple[float, float] | None:
        kind = (node.op_type, position)
        if kind in _INDICES:
            place, attribute, default = _INDICES[kind]
            shape = self._shape(node.input[place])
            return _make_bounds(shape[_get_attribute(node, attribute, default)] - 1)
        if kind in (("GatherND", 1), ("ScatterND", 1)):
            return self._index_of_several(node)
        if kind in (("RotaryEmbedding", 1 if _is_foreign(node) else 3), ("TensorScatter", 2)):
            return self._find_position_bounds(node)
        if kind in (("OneHot", 0), ("ArrayFeatureExtractor", 1)):
            depth = self._read_values(node, 1) if node.op_type == "OneHot" else self._shape(node.input[0])[-1]
            return None if depth is None else _make_bounds(float(np.reshape(depth, -1)[0]) - 1)
        if kind == ("MaxUnpool", 1):
            return _make_bounds(math.prod(self._shape(node.output[0])) - 1)
        if kind == ("TopK", 1):
            return 1.0, float(self._shape(node.input[0])[_get_attribute(node, "axis", -1)])
        if position == 1 and node.op_type in _AXES:
            # Accept only a single axis: several axes must differ from each other, which a range cannot express.
            return (
                _make_bounds(len(self._shape(node.input[0])) - 1)
                if math.prod(self._shape(node.input[1])) == 1
                else None
            )
        if kind == ("QuantizeLinear", 0):
            return self._find_quantised_bounds(node)
        if kind == ("Clip", 0):
            low, high = self._limit(node, 1, "min", -math.inf), self._limit(node, 2, "max", math.inf)
            # A Clip with only one limit (a ReLU) does not define a range for random inputs.
            return (low, high) if math.isfinite(low) and math.isfinite(high) else None
        return None

    def _shape(self, name: str) -> list[int]:
        """Return a value's shape, with -1 for unknown sizes. Raises KeyError if the shape is unknown."""
        if name in self._constants:
            return list(self._constants[name].dims)
        kind = self._types[name]
        if not kind.HasField("shape"):
            raise KeyError(name)
        return [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim]

    def _index_of_several(self, node: Any) -> tuple[float, float] | None:
        """Return bounds for index tuples.

        A tuple has an index for each of multiple axes; the shortest axis defines the bound.
        """
        first = _get_attribute(node, "batch_dims", 0)
        count = self._shape(node.input[1])[-1]
        sizes = self._shape(node.input[0])[first : first + count]
        return None if count < 1 or len(sizes) < count else _make_bounds(min(sizes) - 1)

    def _find_position_bounds(self, node: Any) -> tuple[float, float] | None:
        """Return bounds for positions in a cache. The rest of the sequence must fit after the position."""
        if node.op_type == "TensorScatter":
            axis = _get_attribute(node, "axis", -2)
            return _make_bounds(self._shape(node.input[0])[axis] - self._shape(node.input[1])[axis])
        length = self._shape(node.input[2 if _is_foreign(node) else 1])[0]
        # ONNX Runtime's operator also accepts a scalar, which is the first position.
        is_first = _is_foreign(node) and self._shape(node.input[1]) == [1]
        return _make_bounds(length - (self._shape(node.input[0])[-2] if is_first else 1))

    def _find_quantised_bounds(self, node: Any) -> tuple[float, float] | None:
        scale = self._read_values(node, 1)
        zero = self._read_values(node, 2) if len(node.input) > 2 and node.input[2] else np.zeros(1, np.uint8)
        if scale is None or zero is None or zero.dtype not in (np.int8, np.uint8, np.int16, np.uint16):
            return None
        # Accept only equal shapes or a scalar: numpy's broadcast of other shapes could exceed the memory.
        if scale.shape != zero.shape and 1 not in (scale.size, zero.size):
            return None
        limits = np.iinfo(zero.dtype)
        scale, zero = scale.astype(np.float64), zero.astype(np.float64)
        return float(np.min((limits.min - zero) * scale)), float(np.max((limits.max - zero) * scale))

    def _limit(self, node: Any, position: int, name: str, default: float) -> float:
        values = self._read_values(node, position)
        if values is not None and values.size:
            return float(values.reshape(-1)[0])
        return default if len(node.input) > position and node.input[position] else _get_attribute(node, name, default)

    def _read_values(self, node: Any, position: int) -> Any:
        from onnx import numpy_helper

        if len(node.input) <= position or node.input[position] not in self._constants:
            return None
        tensor = self._constants[node.input[position]]
        # Do not read external data, because its location has not been validated yet.
        return None if tensor.data_location == tensor.EXTERNAL else numpy_helper.to_array(tensor)


def _make_bounds(high: float) -> tuple[float, float]:
    return 0.0, float(high)


def _is_foreign(node: Any) -> bool:
    return node.domain not in ("", "ai.onnx")


def _is_passing_on(node: Any, position: int) -> bool:
    """Return True if the node's outputs contain unchanged values of this input."""
    places = _TRANSPARENT.get(node.op_type, ())
    return places is None or position in places


def _get_attribute(node: Any, name: str, default: Any) -> Any:
    from onnx import helper

    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)
