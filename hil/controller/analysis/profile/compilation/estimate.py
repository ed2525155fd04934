"""Estimate operations' work from shapes: arithmetic operations, and bytes read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.models.compiling import CachedCall, call_isolated
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import convert_errors
from hil.core.files import read_file
from hil.core.installed import get_version
from hil.core.results import Model
from hil.errors import ImportFailed

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Operations per byte at which computing takes as long as moving the data. While memory delivers 1 to 6 bytes, a core
# with one or two vector multiply-adds per cycle computes 8 to 64 float32 operations. The ratio is about ten, within a
# factor of two, on a Cortex-A53 (8 to 1) and on a server core. Other boards (accelerators: hundreds) need a different
# value.
RIDGE = 10.0
_FILE = "shapes.json"
# Increase this when `read` returns a different result for the same model.
_VERSION = 2

Shapes = Sequence[Any]  # each shape is a sequence of sizes, or None if unknown
Count = Callable[[Shapes, Shapes, Mapping[str, Any]], int]

# Operators whose output shares an input's memory. They neither compute nor move data.
VIEWS = frozenset("Reshape Flatten Squeeze Unsqueeze Identity Shape Size Constant".split())
# Operators that read only as many bytes of the first input as they write.
PICKING = frozenset("Gather GatherElements GatherND Slice Split".split())
_MOVING = frozenset(
    "Transpose Concat Pad Expand Tile Cast CastLike DepthToSpace SpaceToDepth ConstantOfShape Range Scatter "
    "ScatterElements ScatterND Compress EyeLike ReverseSequence TensorScatter Trilu OneHot".split()
).union(VIEWS, PICKING)


def _map_op_types(*groups: tuple[int, str]) -> dict[str, int]:
    return {op_type: operations for operations, op_types in groups for op_type in op_types.split()}


# Operations per output element.
_EACH_OUTPUT = _map_op_types(
    (
        1,
        "Abs Add And Ceil Cos Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual Less LessOrEqual Log Max Min Mod Mul "
        "Neg Not Or Pow Reciprocal Relu Round Sign Sin Sinh Sqrt Sub Sum Mean Tan Tanh Where Xor Atan Acos Asin Asinh "
        "Acosh Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor IsInf IsNaN",
    ),
    (2, "Clip LeakyRelu PRelu ThresholdedRelu DequantizeLinear Dropout Shrink Hardmax"),
    (3, "Elu Celu Selu HardSigmoid Softplus Softsign"),
    (4, "Sigmoid QuantizeLinear BatchNormalization LpNormalization"),
    (5, "Softmax LogSoftmax HardSwish Swish Mish RMSNormalization"),
    (6, "MeanVarianceNormalization DynamicQuantizeLinear"),
    (7, "Resize QLinearAdd QLinearMul"),
    (8, "Gelu LayerNormalization InstanceNormalization GroupNormalization"),
)
# Operations per element in the first input.
_EACH_INPUT = _map_op_types(
    (
        1,
        "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ArgMax ArgMin CumSum GlobalAveragePool GlobalMaxPool "
        "NonZero TopK",
    ),
    (2, "ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum GlobalLpPool"),
    (3, "ReduceLogSumExp"),
)
# Operations per element: maximum, subtraction, exponential, sum and division.
SOFTMAX = 5


@dataclass(frozen=True)
class Estimate:
    """Estimated work for a group of operations.

    Values that pass between operations of the group do not count as moved.
    """

    flops: int | None  # arithmetic operations; None if unknown for any operation
    bytes: int | None  # inputs, weights and outputs, without duplicates; None if any is unknown
    shapes: str = ""  # inputs and outputs, as in :class:`~hil.core.timeline.OpRow`

    @property
    def intensity(self) -> float | None:
        """Operations per byte."""
        return self.flops / self.bytes if self.flops is not None and self.bytes else None

    @property
    def nominal_ns(self) -> float | None:
        """Time on a nominal core that moves 1 byte per ns and computes :data:`RIDGE` operations in the same time.

        The value is used to rank operations. It does not predict the time on a board.
        """
        if self.flops is None or self.bytes is None:
            return None
        return max(self.bytes, self.flops / RIDGE)

    @property
    def bound(self) -> str:
        """The expected bottleneck: ``compute`` or ``memory``; "" if unknown."""
        if self.intensity is None:
            return ""
        return "compute" if self.intensity >= RIDGE else "memory"


@dataclass(frozen=True)
class Node:
    """A node in a model, with value names; ``flops`` is None if unknown."""

    name: str
    op_type: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    flops: int | None


@dataclass(frozen=True)
class Estimates:
    """Data of a whole model for estimates."""

    # name -> node, in model order, including subgraphs.
    nodes: Mapping[str, Node] = field(default_factory=dict)
    # name -> (type as ``1x64xf32``, bytes), for values with a known shape.
    values: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    results: frozenset[str] = frozenset()  # the model's output names

    def estimate(self, names: Iterable[str]) -> Estimate:
        """Return the estimate for these nodes together. Unknown names are ignored."""
        nodes = [self.nodes[name] for name in dict.fromkeys(names) if name in self.nodes]
        if not nodes:
            return Estimate(None, None)
        own = {name for node in nodes for name in node.outputs}
        ins = list(dict.fromkeys(name for node in nodes for name in node.inputs if name not in own))
        inside = {node.name for node in nodes}
        outs = [
            name
            for node in nodes
            for name in node.outputs
            if name and (name in self.results or any(user not in inside for user in self._value_users.get(name, ())))
        ]
        return Estimate(
            sum_counts(node.flops for node in nodes),
            self._count_bytes(nodes, ins, outs),
            f"{self._format_shapes(ins)} -> {self._format_shapes(outs)}" if ins or outs else "",
        )

    @cached_property
    def _value_users(self) -> Mapping[str, list[str]]:
        users: dict[str, list[str]] = {}
        for node in self.nodes.values():
            for name in node.inputs:
                users.setdefault(name, []).append(node.name)
        return users

    def _count_bytes(self, nodes: Sequence[Node], ins: Sequence[str], outs: Sequence[str]) -> int | None:
        if all(node.op_type in VIEWS for node in nodes):
            return 0
        if any(name not in self.values for name in (*ins, *outs)):
            return None
        moved = {name: self.values[name][1] for name in (*ins, *outs)}
        for node in nodes:
            if node.op_type in PICKING and node.inputs and node.inputs[0] in moved:
                written = sum(self.values[name][1] for name in node.outputs if name in self.values)
                moved[node.inputs[0]] = min(moved[node.inputs[0]], written)
        return sum(moved.values())

    def _format_shapes(self, names: Sequence[str]) -> str:
        return ", ".join(self.values[name][0] if name in self.values else "?" for name in names)


def estimate(model: Model, **how: Unpack[CachedCall]) -> Estimates:
    """Return estimation data for an ONNX model; empty for other models."""
    if model.format != "onnx":
        return Estimates()

    def make(folder: Path) -> None:
        arguments = {"model": str(model.path.absolute()), "dims": dict(model.dims)}
        with convert_errors("", "reading the model's shapes", ImportFailed, "the model's shapes cannot be read"):
            found = call_isolated(read, arguments, how)
        (folder / _FILE).write_text(json.dumps(found))

    parts = {"model": model.digest, "dims": dict(model.dims), "onnx": get_version("onnx"), "version": _VERSION}
    entry, _ = how["cache"].get_or_make(Cache.key("shapes", **parts), {"model": model.name, "what": "shapes"}, make)
    document = json.loads(read_file(entry / _FILE))
    nodes = {node[0]: Node(*node) for node in document["nodes"]}
    values = {name: (text, size) for name, (text, size) in document["values"].items()}
    return Estimates(nodes, values, frozenset(document["results"]))


def read(model: str, dims: Mapping[str, int]) -> dict[str, Any]:
    """Read a model's nodes and value types. Runs in an isolated process.

    Returns:
        ``nodes``: lists [name, op_type, inputs, outputs, flops] in order, including subgraphs; ``values``: name ->
        [type as ``1x64xf32``, bytes], for values with a known shape; ``results``: the model's output names.
    """
    from onnx import helper

    from hil.controller.analysis.layers.graph import find_captured, prepare_model
    from hil.controller.models.importers.onnx_nodes import iter_nodes, list_graphs

    graph = prepare_model(Path(model), dims).graph
    values: dict[str, tuple[list[int], int]] = {}
    for inner in list_graphs(graph):
        for tensor in inner.initializer:
            values[tensor.name] = (list(tensor.dims), tensor.data_type)
        for value in (*inner.input, *inner.output, *inner.value_info):
            kind = value.type.tensor_type
            sizes = [dim.dim_value if dim.WhichOneof("value") == "dim_value" else -1 for dim in kind.shape.dim]
            if kind.HasField("shape") and min(sizes, default=0) >= 0:
                values[value.name] = (sizes, kind.elem_type)
    nodes = []
    for node in iter_nodes(graph.node):
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        given = {name: value.decode() if isinstance(value, bytes) else value for name, value in given.items()}
        ins, outs = (
            [values[name][0] if name in values else None for name in names] for names in (node.input, node.output)
        )
        flops = count_operations(node.op_type, ins, outs, given) if node.domain in ("", "ai.onnx") else None
        nodes.append(
            [node.name, node.op_type, [*filter(None, node.input), *find_captured(node)], list(node.output), flops]
        )
    types = {name: _read_type_and_bytes(shape, number) for name, (shape, number) in values.items()}
    return {
        "nodes": nodes,
        "values": {name: known for name, known in types.items() if known is not None},
        "results": [value.name for value in graph.output],
    }


def _read_type_and_bytes(shape: list[int], number: int) -> tuple[str, int] | None:
    from hil.core.tensors import SUB_BYTE_BITS, TensorSpec, parse_dtype
    from hil.errors import UsageError
    from hil.formats.iree_values import format_mlir_type
    from hil.formats.ort_values import ONNX_TYPES

    dtype = next((name for name, known in ONNX_TYPES.items() if known == number), "")
    try:
        bits = SUB_BYTE_BITS.get(dtype) or parse_dtype(dtype).itemsize * 8
        text = format_mlir_type(TensorSpec("", dtype, tuple(shape)))
    except UsageError:  # strings, and dtypes without an MLIR name
        return None
    return text.removeprefix("tensor<").removesuffix(">"), -(-math.prod(shape) * bits // 8)


def count_operations(op_type: str, ins: Shapes, outs: Shapes, given: Mapping[str, Any]) -> int | None:
    """Count a node's arithmetic operations, in ONNX's default domain.

    A multiply-accumulate counts as two operations, as in LINPACK. The counts of other operators are those of ONNX's
    definition of the operator, with one operation for every function such as exp.

    Args:
        ins, outs: shapes, in order; None for an unknown shape or an omitted input.
        given: the attributes.

    Returns:
        The count, or None if the operator or a required shape is unknown.
    """
    if op_type in _MOVING:
        return 0
    try:
        if op_type in _EACH_OUTPUT:
            return _EACH_OUTPUT[op_type] * math.prod(outs[0])
        if op_type in _EACH_INPUT:
            return _EACH_INPUT[op_type] * math.prod(ins[0])
        return int(_COUNTS[op_type](ins, outs, given)) if op_type in _COUNTS else None
    except (TypeError, ValueError, LookupError):  # a shape is None or has an unexpected rank, or an input is missing
        return None


def _make_convolution_count(weights: int) -> Count:
    """Count a multiply-accumulate per output element and weight of its channel (Howard et al., "MobileNets", 2017)."""
    return lambda ins, outs, given: 2 * math.prod(outs[0]) * math.prod(ins[weights][1:])


def _count_gemm(ins: Shapes, outs: Shapes, given: Mapping[str, Any]) -> int:
    common: int = ins[0][0] if given.get("transA") else ins[0][1]
    return math.prod(outs[0]) * (2 * common + (1 if len(ins) > 2 else 0))


def _count_einsum(ins: Shapes, outs: Shapes, given: Mapping[str, Any]) -> int:
    """Count a multiplication and an addition per index tuple, for a product of two tensors."""
    operands, _, _ = str(given["equation"]).replace(" ", "").partition("->")
    if "." in operands:
        raise ValueError("unsupported ellipsis in the equation")
    left, right = operands.split(",")
    sizes: dict[str, int] = dict(zip(left, ins[0], strict=True)) | dict(zip(right, ins[1], strict=True))
    return 2 * math.prod(sizes.values())


def _make_recurrent_count(gates: int) -> Count:
    def count(ins: Shapes, outs: Shapes, given: Mapping[str, Any]) -> int:
        (steps, batch), weights, recurrent = ins[0][:2], ins[1], ins[2]
        factors = math.prod(weights) + math.prod(recurrent)
        return int(steps * batch * (2 * factors + gates * recurrent[0] * recurrent[2]))

    return count


def _count_attention(ins: Shapes, outs: Shapes, given: Mapping[str, Any]) -> int:
    """Count the query-key product, the softmax, and the product with the values."""
    query, key, value = ins[:3]
    if len(query) == 4:
        batch, heads, rows, size = query
        columns, value_size = key[2], value[3]
    else:
        heads = int(given["q_num_heads"])
        batch, rows, size = query[0], query[1], query[2] // heads
        columns, value_size = key[1], value[2] // int(given["kv_num_heads"])
    return int(batch * heads * rows * columns * (2 * size + 2 * value_size + SOFTMAX))


_COUNTS: dict[str, Count] = {
    **dict.fromkeys(
        ("AveragePool", "MaxPool", "LpPool", "MaxUnpool"),
        lambda ins, outs, given: math.prod(outs[0]) * math.prod(given.get("kernel_shape", ())),
    ),
    **dict.fromkeys(("Conv", "ConvInteger", "DeformConv"), _make_convolution_count(weights=1)),
    "QLinearConv": _make_convolution_count(weights=3),
    "ConvTranspose": lambda ins, outs, given: 2 * math.prod(ins[0]) * math.prod(ins[1][1:]),
    "Gemm": _count_gemm,
    **dict.fromkeys(
        ("MatMul", "MatMulInteger", "QLinearMatMul"), lambda ins, outs, given: 2 * math.prod(outs[0]) * ins[0][-1]
    ),
    "Einsum": _count_einsum,
    # Scalar operations in the cell's gates, per state element.
    "LSTM": _make_recurrent_count(gates=24),
    "GRU": _make_recurrent_count(gates=20),
    "RNN": _make_recurrent_count(gates=4),
    "Attention": _count_attention,
    "LRN": lambda ins, outs, given: math.prod(outs[0]) * (2 * int(given.get("size", 1)) + 4),
}


def sum_counts(parts: Iterable[int | None]) -> int | None:
    """Sum counts; None if any is unknown."""
    counts = list(parts)
    return None if None in counts else sum(filter(None, counts))
