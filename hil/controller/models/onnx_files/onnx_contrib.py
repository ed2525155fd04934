"""Expand operators of ONNX Runtime into standard ONNX operators, for compilers that lack ONNX Runtime's operators.

Source: docs/ContribOperators.md of ONNX Runtime.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hil.controller.models.importers.onnx_nodes import (
    iter_nodes,
    label_node,
    list_graphs,
    list_nodes,
    read_constants,
)
from hil.core.tensors import Array
from hil.errors import CompileFailed
from hil.formats.onnx_file import set_nodes

# ONNX Runtime registers this operator in the domain of ONNX, and the other operators in its own domain.
_IN_ONNX = "SimplifiedLayerNormalization"
_FLOAT, _UINT8 = 1, 2  # TensorProto.DataType
# Attribute of MatMulNBits and similar operators that allows ONNX Runtime to round activations to 8 bits.
ACCURACY = "accuracy_level"
# Oldest opset of the expansions, which use CastLike.
OLDEST_OPSET = 15
# Since this opset, reductions take the axes as an input.
_AXES_INPUT = 18
# End of a slice that includes all remaining elements.
_END = np.iinfo(np.int64).max


def find_contrib(model: Any) -> list[str]:
    """Return the operators in a model that :func:`expand_contrib` expands, sorted."""
    return sorted({node.op_type for node in iter_nodes(model.graph.node) if _is_contrib(node)})


def expand_contrib(model: Any, opset: int) -> Any:
    """Return a copy of a model in which standard operators replace ONNX Runtime's operators.

    The expansion of GroupQueryAttention appends the new keys and values to the past. The past must therefore have no
    unused positions.

    Args:
        opset: Version of ONNX's standard opset that the model uses, at least :data:`OLDEST_OPSET`.

    Raises:
        CompileFailed: An attribute or input of an operator is not supported.
    """
    copy = type(model)()
    copy.CopyFrom(model)
    shapes = _Shapes(copy)
    # Change inner graphs first, because changing a graph copies its nodes with their subgraphs.
    for graph in reversed(list_graphs(copy.graph)):
        nodes: list[Any] = []
        for node in graph.node:
            nodes += _Expansion(node, shapes, opset).expand() if _is_contrib(node) else [node]
        set_nodes(graph, nodes)
    return copy


def remove_accuracy_levels(model: Any) -> None:
    """Remove all accuracy levels from a model, so that ONNX Runtime does not round activations."""
    for node in list_nodes(model):
        for attribute in [one for one in node.attribute if one.name == ACCURACY]:
            node.attribute.remove(attribute)


def _is_contrib(node: Any) -> bool:
    domains = ("", "ai.onnx") if node.op_type == _IN_ONNX else ("com.microsoft",)
    return node.op_type in _EXPANSIONS and node.domain in domains


class _Shapes:
    """Known shapes and types of a model's tensors."""

    def __init__(self, model: Any) -> None:
        self._values: dict[str, tuple[int, list[Any]]] = {}
        for graph in list_graphs(model.graph):
            for value in (*graph.value_info, *graph.output, *graph.input):
                kind = value.type.tensor_type
                if kind.HasField("shape"):
                    self._values[value.name] = kind.elem_type, [dim.dim_value or None for dim in kind.shape.dim]
            for name, tensor in read_constants(graph).items():
                self._values[name] = tensor.data_type, list(tensor.dims)

    def shape_of(self, name: str) -> list[int | None] | None:
        """Return the shape; an unknown size is None. Return None if the rank is unknown."""
        return self._values.get(name, (0, None))[1]

    def type_of(self, name: str) -> int:
        """Return the element type, 0 if unknown."""
        return self._values.get(name, (0, None))[0]


class _Expansion:
    """Nodes that compute the outputs of an operator."""

    def __init__(self, node: Any, shapes: _Shapes, opset: int) -> None:
        from onnx import helper

        self._node = node
        self._shapes = shapes
        self._opset = opset
        self._prefix = f"{node.name or next(filter(None, node.output))}/hil"
        self._nodes: list[Any] = []
        self._attributes = {one.name: helper.get_attribute_value(one) for one in node.attribute}

    def expand(self) -> list[Any]:
        """Return the nodes of the expansion. Raises CompileFailed for unsupported attributes and inputs."""
        _EXPANSIONS[self._node.op_type](self)
        unknown = [name for name, value in self._attributes.items() if not _is_off(value)]
        if unknown:
            self.refuse(f"attribute {unknown[0]}")
        return self._nodes

    def refuse(self, what: str) -> None:
        """Raise CompileFailed for an unsupported part of the operator."""
        raise CompileFailed(
            f"IREE lacks {self._node.op_type}, and hil cannot expand {label_node(self._node)}: unsupported {what}",
            hint="use the runtime onnxruntime, or export the model with standard operators",
        )

    def get_attribute(self, name: str, default: Any) -> Any:
        """Return an attribute and mark it as supported."""
        return self._attributes.pop(name, default)

    def get_input(self, place: int) -> str:
        """Return the name of an input; "" if omitted."""
        return self._node.input[place] if place < len(self._node.input) else ""

    def refuse_inputs(self, first: int) -> None:
        """Raise CompileFailed if the input ``first`` or a later input is set."""
        if any(self._node.input[first:]):
            self.refuse(f"input {first + next(n for n, name in enumerate(self._node.input[first:]) if name)}")

    def get_output(self, place: int) -> str:
        """Return the name of an output; "" if omitted."""
        return self._node.output[place] if place < len(self._node.output) else ""

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node. Return its output."""
        from onnx import helper

        name = f"{self._prefix}/{len(self._nodes)}/{op}"
        self._nodes.append(helper.make_node(op, list(inputs), [output or name], name=name, **attributes))
        return output or name

    def add_constant(self, value: Array) -> str:
        """Add a constant."""
        from onnx import numpy_helper

        return self.add("Constant", value=numpy_helper.from_array(np.asarray(value)))

    def integers(self, *values: int) -> str:
        """Add a constant vector of int64. Return its name."""
        return self.add_constant(np.array(values, np.int64))

    def number(self, value: float, like: str) -> str:
        """Add a number with the type of another tensor."""
        return self.add("CastLike", self.add_constant(np.array(value, np.float32)), like)

    def add_unsqueeze(self, x: str, *axes: int) -> str:
        """Insert axes."""
        return self.add("Unsqueeze", x, self.integers(*axes))

    def slice_last(self, x: str, start: int, end: int) -> str:
        """Return elements ``start`` to ``end`` of the last axis."""
        return self.add("Slice", x, *(self.integers(value) for value in (start, end, -1)))

    def add_size(self, x: str, axis: int) -> str:
        """Return the size of an axis as a scalar."""
        return self.add("Gather", self.add("Shape", x), self.add_constant(np.array(axis, np.int64)))

    def count(self, start: str, stop: str) -> str:
        """Return the integers from start to stop."""
        return self.add("Range", start, stop, self.add_constant(np.array(1, np.int64)))

    def split_heads(self, x: str, heads: int) -> str:
        """Reshape [batch, length, heads * size] to [batch, heads, length, size]."""
        return self.add("Transpose", self.add("Reshape", x, self.integers(0, 0, heads, -1)), perm=[0, 2, 1, 3])

    def join_heads(self, x: str, output: str) -> str:
        """Reverse :meth:`split_heads`."""
        rows = self.add("Transpose", x, perm=[0, 2, 1, 3])
        return self.add("Reshape", rows, self.integers(0, 0, -1), output=output)

    def normalize(self, x: str, scale: str, inverse: str) -> None:
        """Add the normalization by the root mean square of the last axis, computed in float32."""
        wide = self.add("Cast", x, to=_FLOAT)
        square = self.add("Mul", wide, wide)
        if self._opset >= _AXES_INPUT:
            mean = self.add("ReduceMean", square, self.integers(-1))
        else:
            mean = self.add("ReduceMean", square, axes=[-1])
        epsilon = self.add_constant(np.array(self.get_attribute("epsilon", 1e-5), np.float32))
        root = self.add("Sqrt", self.add("Add", mean, epsilon))
        factor = self.add("Reciprocal", root, output=inverse)
        scaled = self.add("Mul", wide, factor)
        product = self.add("Mul", scaled, self.add("Cast", scale, to=_FLOAT))
        self.add("CastLike", product, scale, output=self.get_output(0))

    def rotate(self, x: str, cos: str, sin: str, width: int, *, interleaved: bool) -> str:
        """Rotate the first ``width`` values of each head [batch, heads, length, size].

        Args:
            cos, sin: [batch or 1, 1, length, width / 2].
        """
        half = width // 2
        pairs = self.slice_last(x, 0, width)
        if interleaved:
            pairs = self.add("Reshape", pairs, self.integers(0, 0, 0, half, 2))
            one, other = (
                self.add("Gather", pairs, self.add_constant(np.array(part, np.int64)), axis=-1) for part in (0, 1)
            )
        else:
            one, other = self.slice_last(pairs, 0, half), self.slice_last(pairs, half, width)
        real = self.add("Sub", self.add("Mul", one, cos), self.add("Mul", other, sin))
        imaginary = self.add("Add", self.add("Mul", one, sin), self.add("Mul", other, cos))
        if interleaved:
            stacked = self.add("Concat", self.add_unsqueeze(real, -1), self.add_unsqueeze(imaginary, -1), axis=-1)
            parts = [self.add("Reshape", stacked, self.integers(0, 0, 0, width))]
        else:
            parts = [real, imaginary]
        return self.add("Concat", *parts, self.slice_last(x, width, _END), axis=-1)

    def add_lookup(self, tables: Sequence[str], positions: str, width: int) -> list[str]:
        """Return the cosines and sines of positions [batch or 1, length], for every head."""
        rows = [self.slice_last(self.add("Gather", table, positions), 0, width // 2) for table in tables]
        return [self.add_unsqueeze(row, 1) for row in rows]

    def get_width(self, table: str) -> int:
        """Return how many values of a head are rotated, from the width of the table of cosines."""
        shape = self._shapes.shape_of(table)
        if not shape or shape[-1] is None:
            self.refuse("table of cosines with an unknown size")
            return 0
        return 2 * shape[-1]

    def unpack(self, packed: str, bits: int) -> str:
        """Unpack unsigned integers from bytes [N, M, bytes], lowest bits first. Return floats [N, M, integers]."""
        rest, parts, base = self.add("Cast", packed, to=_FLOAT), [], self.add_constant(np.array(1 << bits, np.float32))
        for _ in range(8 // bits - 1):
            higher = self.add("Floor", self.add("Div", rest, base))
            parts.append(self.add_unsqueeze(self.add("Sub", rest, self.add("Mul", higher, base)), -1))
            rest = higher
        whole = self.add("Concat", *parts, self.add_unsqueeze(rest, -1), axis=-1)
        return self.add("Reshape", whole, self.integers(0, 0, -1))

    # The operators

    def expand_simplified_normalization(self) -> None:
        """Expand SimplifiedLayerNormalization over the last axis."""
        axis, shape = self.get_attribute("axis", -1), self._shapes.shape_of(self.get_input(0))
        if axis != -1 and (shape is None or axis != len(shape) - 1):
            self.refuse(f"axis {axis}")
        if self.get_attribute("stash_type", _FLOAT) != _FLOAT:
            self.refuse("stash_type")
        self.normalize(self.get_input(0), self.get_input(1), self.get_output(1))

    def expand_skip_normalization(self) -> None:
        """Expand SkipSimplifiedLayerNormalization."""
        if self.get_output(1):
            self.refuse("output mean")
        x = self.add(
            "Add", self.get_input(0), self.get_input(1), output="" if self.get_input(3) else self.get_output(3)
        )
        if self.get_input(3):
            x = self.add("Add", x, self.get_input(3), output=self.get_output(3))
        self._attributes.setdefault("epsilon", 1e-12)
        self.normalize(x, self.get_input(2), self.get_output(2))

    def expand_matmul_nbits(self) -> None:
        """Expand MatMulNBits. The weights stay packed in the file."""
        rows, columns = self.get_attribute("K", 0), self.get_attribute("N", 0)
        bits, block = self.get_attribute("bits", 4), self.get_attribute("block_size", 32)
        self.get_attribute(ACCURACY, 0)
        if bits not in (2, 4, 8):
            self.refuse(f"bits {bits}")
        if self.get_input(4):
            self.refuse("input g_idx")
        self.refuse_inputs(6)
        blocks = -(-rows // block)
        one_each = self.integers(columns, blocks, 1)
        scales = self.add("Reshape", self.add("Cast", self.get_input(2), to=_FLOAT), one_each)
        offsets = self.add_constant(np.array(1 << (bits - 1), np.float32))
        if self.get_input(3):
            offsets = self.add("Reshape", self.expand_zero_points(self.get_input(3), columns, blocks, bits), one_each)
        packed = self.add("Reshape", self.get_input(1), self.integers(columns, blocks, -1))
        values = self.add("Mul", self.add("Sub", self.unpack(packed, bits), offsets), scales)
        weights = self.slice_last(self.add("Reshape", values, self.integers(columns, -1)), 0, rows)
        weights = self.add("CastLike", self.add("Transpose", weights, perm=[1, 0]), self.get_input(0))
        bias = self.get_input(5)
        product = self.add("MatMul", self.get_input(0), weights, output="" if bias else self.get_output(0))
        if bias:
            self.add("Add", product, bias, output=self.get_output(0))

    def expand_zero_points(self, name: str, columns: int, blocks: int, bits: int) -> str:
        """Return the zero points of each block as floats.

        The input has packed bytes, or numbers of the scales' type.
        """
        kind = self._shapes.type_of(name)
        if not kind:
            self.refuse("zero points of an unknown type")
        if kind != _UINT8:
            return self.add("Cast", name, to=_FLOAT)
        unpacked = self.unpack(self.add("Reshape", name, self.integers(columns, 1, -1)), bits)
        return self.slice_last(unpacked, 0, blocks)

    def expand_rotary_embedding(self) -> None:
        """Expand RotaryEmbedding."""
        x, positions = self.get_input(0), self.get_input(1)
        shape, where = self._shapes.shape_of(x), self._shapes.shape_of(positions)
        heads, size = self.get_attribute("num_heads", 0), self.get_attribute("rotary_embedding_dim", 0)
        width = size or self.get_width(self.get_input(2))
        if self.get_attribute("scale", 1.0) != 1.0:
            self.refuse("attribute scale")
        if where is None or (shape is None and not heads):
            self.refuse("input of an unknown rank")
        is_flat = len(shape) == 3 if shape is not None else True
        if is_flat and not heads:
            split = self.add("Reshape", x, self.integers(0, 0, -1, width))
            x4 = self.add("Transpose", split, perm=[0, 2, 1, 3])
        else:
            x4 = self.split_heads(x, heads) if is_flat else x
        if where is not None and len(where) == 1:
            length = self.add_size(x4, 2)
            steps = self.count(self.add_constant(np.array(0, np.int64)), length)
            positions = self.add_unsqueeze(self.add("Add", positions, steps), 0)
        cos, sin = self.add_lookup((self.get_input(2), self.get_input(3)), positions, width)
        turned = self.rotate(x4, cos, sin, width, interleaved=bool(self.get_attribute("interleaved", 0)))
        if is_flat:
            self.join_heads(turned, self.get_output(0))
        else:
            self.add("Identity", turned, output=self.get_output(0))

    def expand_group_query_attention(self) -> None:
        """Expand GroupQueryAttention."""
        heads, kv_heads = self.get_attribute("num_heads", 0), self.get_attribute("kv_num_heads", 0)
        self.refuse_inputs(11)
        if self.get_output(3):
            self.refuse("output 3")
        q, k, v = self.split_queries(heads, kv_heads)
        past = [self.get_input(3), self.get_input(4)]
        length = self.add_size(q, 2)
        start = self.add_size(past[0], 2) if past[0] else self.add_constant(np.array(0, np.int64))
        total = self.add("Add", start, length)
        positions = self.count(start, total)
        interleaved = bool(self.get_attribute("rotary_interleaved", 0))
        if self.get_attribute("do_rotary", 0):
            width = self.get_width(self.get_input(7))
            where = self.get_input(9) or self.add_unsqueeze(positions, 0)
            cos, sin = self.add_lookup((self.get_input(7), self.get_input(8)), where, width)
            q, k = (self.rotate(x, cos, sin, width, interleaved=interleaved) for x in (q, k))
        keys, values = (
            self.add("Concat", old, new, axis=2, output=output) if old else self.add("Identity", new, output=output)
            for old, new, output in ((past[0], k, self.get_output(1)), (past[1], v, self.get_output(2)))
        )
        group = self.integers(*np.repeat(np.arange(kv_heads), heads // kv_heads).tolist())
        keys, values = (self.add("Gather", one, group, axis=1) for one in (keys, values))
        scores = self.add("MatMul", self.scale_queries(q), self.add("Transpose", keys, perm=[0, 1, 3, 2]))
        if softcap := self.get_attribute("softcap", 0.0):
            limit = self.number(softcap, scores)
            scores = self.add("Mul", self.add("Tanh", self.add("Div", scores, limit)), limit)
        scores = self.mask_scores(scores, positions, total)
        if self.get_input(10):
            scores = self.add("Add", scores, self.get_input(10))
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), values)
        self.join_heads(mixed, self.get_output(0))

    def split_queries(self, heads: int, kv_heads: int) -> tuple[str, str, str]:
        """Return queries, keys and values [batch, heads, length, size] from the inputs, which may be packed."""
        query, key, value = (self.get_input(place) for place in range(3))
        if key:
            return self.split_heads(query, heads), self.split_heads(key, kv_heads), self.split_heads(value, kv_heads)
        packed = self.split_heads(query, heads + 2 * kv_heads)
        places = [0, heads, heads + kv_heads, heads + 2 * kv_heads]
        one = self.integers(1)
        q, k, v = (
            self.add("Slice", packed, self.integers(begin), self.integers(end), one)
            for begin, end in itertools.pairwise(places)
        )
        return q, k, v

    def scale_queries(self, q: str) -> str:
        """Return the queries multiplied by the scale, by default 1 / sqrt(size)."""
        if scale := self.get_attribute("scale", 0.0):
            return self.add("Mul", q, self.number(scale, q))
        size = self.add("CastLike", self.add_size(q, 3), q)
        return self.add("Div", q, self.add("Sqrt", size))

    def mask_scores(self, scores: str, positions: str, total: str) -> str:
        """Return scores [batch, heads, length, total], with minus infinity for keys that are hidden from a query."""
        keys = self.add_unsqueeze(self.count(self.add_constant(np.array(0, np.int64)), total), 0)
        queries = self.add_unsqueeze(positions, 1)
        seen = self.add("LessOrEqual", keys, queries)
        window = self.get_attribute("local_window_size", -1)
        if window > 0:
            first = self.add("Sub", queries, self.integers(window))
            seen = self.add("And", seen, self.add("Greater", keys, first))
        return self.add("Where", seen, scores, self.number(-np.inf, scores))


def _is_off(value: Any) -> bool:
    return value in (0, -1, b"", b"NONE")


_EXPANSIONS: Mapping[str, Callable[[_Expansion], None]] = {
    "GroupQueryAttention": _Expansion.expand_group_query_attention,
    "MatMulNBits": _Expansion.expand_matmul_nbits,
    "RotaryEmbedding": _Expansion.expand_rotary_embedding,
    _IN_ONNX: _Expansion.expand_simplified_normalization,
    "SkipSimplifiedLayerNormalization": _Expansion.expand_skip_normalization,
}
