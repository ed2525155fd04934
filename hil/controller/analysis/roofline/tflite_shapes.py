"""Read the operators and shapes of a TFLite model, and count their operations.

The counts of operators with an ONNX counterpart are those of ONNX. The bias of a convolution and fused activations are
not counted, as for ONNX convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.analysis.profile.compilation.estimate import count_operations
from hil.core.files import MAX_MODEL_BYTES, read_file

Shape = Sequence[int] | None

# TFLite's operators that compute like an ONNX operator with the same inputs.
_LIKE_ONNX = {
    **{
        name: name.capitalize()
        for name in "ABS ADD CEIL COS DIV ELU EQUAL EXP FLOOR GELU GREATER LESS LOG MUL NEG POW RELU ROUND SIGN SIN "
        "SQRT SUB TANH SOFTMAX RESHAPE SQUEEZE SHAPE TRANSPOSE PAD TILE CAST GATHER SLICE SPLIT WHERE RANGE".split()
    },
    **{
        "MAXIMUM": "Max",
        "MINIMUM": "Min",
        "LOGISTIC": "Sigmoid",
        "LOG_SOFTMAX": "LogSoftmax",
        "LEAKY_RELU": "LeakyRelu",
        "PRELU": "PRelu",
        "HARD_SWISH": "HardSwish",
        "RELU6": "Clip",
        "RELU_N1_TO_1": "Clip",
        "RSQRT": "Sqrt",
        "SQUARE": "Mul",
        "SQUARED_DIFFERENCE": "Sub",
        "FLOOR_DIV": "Div",
        "FLOOR_MOD": "Mod",
        "GREATER_EQUAL": "GreaterOrEqual",
        "LESS_EQUAL": "LessOrEqual",
        "NOT_EQUAL": "Equal",
        "LOGICAL_AND": "And",
        "LOGICAL_OR": "Or",
        "LOGICAL_NOT": "Not",
        "SELECT": "Where",
        "SELECT_V2": "Where",
        "QUANTIZE": "QuantizeLinear",
        "DEQUANTIZE": "DequantizeLinear",
        "ADD_N": "Sum",
        "MEAN": "ReduceMean",
        "SUM": "ReduceSum",
        "REDUCE_MAX": "ReduceMax",
        "REDUCE_MIN": "ReduceMin",
        "REDUCE_PROD": "ReduceProd",
        "ARG_MAX": "ArgMax",
        "ARG_MIN": "ArgMin",
        "CUMSUM": "CumSum",
        "TOPK_V2": "TopK",
        "EXPAND_DIMS": "Unsqueeze",
        "CONCATENATION": "Concat",
        "PACK": "Concat",
        "UNPACK": "Split",
        "PADV2": "Pad",
        "MIRROR_PAD": "Pad",
        "STRIDED_SLICE": "Slice",
        "GATHER_ND": "GatherND",
        "SCATTER_ND": "ScatterND",
        "SPLIT_V": "Split",
        "BROADCAST_TO": "Expand",
        "FILL": "ConstantOfShape",
        "ONE_HOT": "OneHot",
        "DEPTH_TO_SPACE": "DepthToSpace",
        "SPACE_TO_DEPTH": "SpaceToDepth",
        "RESIZE_BILINEAR": "Resize",
        "RESIZE_NEAREST_NEIGHBOR": "Resize",
    },
}


def _count_convolution(ins: Sequence[Any], outs: Sequence[Any], options: Any) -> int:
    """Weights: [outputs, height, width, inputs per group]. A multiply-accumulate counts as two operations."""
    return int(2 * math.prod(outs[0]) * math.prod(ins[1][1:]))


def _count_depthwise(ins: Sequence[Any], outs: Sequence[Any], options: Any) -> int:
    """Weights: [1, height, width, outputs]. Each output element reads a single input channel."""
    return int(2 * math.prod(outs[0]) * ins[1][1] * ins[1][2])


def _count_transposed(ins: Sequence[Any], outs: Sequence[Any], options: Any) -> int:
    """Inputs: output shape, weights [outputs, height, width, inputs], data."""
    return int(2 * math.prod(ins[2]) * math.prod(ins[1][:3]))


def _count_convolution_3d(ins: Sequence[Any], outs: Sequence[Any], options: Any) -> int:
    """Weights: [depth, height, width, inputs, outputs]."""
    return int(2 * math.prod(outs[0]) * math.prod(ins[1][:4]))


def _count_dense(ins: Sequence[Any], outs: Sequence[Any], options: Any) -> int:
    """Weights: [outputs, inputs]. The bias is an addition per output, as in ONNX's Gemm."""
    return int(math.prod(outs[0]) * (2 * ins[1][1] + (1 if len(ins) > 2 and ins[2] is not None else 0)))


def _count_matmul(ins: Sequence[Any], outs: Sequence[Any], options: Any) -> int:
    return int(2 * math.prod(outs[0]) * ins[0][-2 if options is not None and options.adjX else -1])


def _count_pool(ins: Sequence[Any], outs: Sequence[Any], options: Any) -> int:
    return int(math.prod(outs[0]) * options.filterHeight * options.filterWidth)


_COUNTS: Mapping[str, Callable[[Sequence[Any], Sequence[Any], Any], int]] = {
    "CONV_2D": _count_convolution,
    "DEPTHWISE_CONV_2D": _count_depthwise,
    "TRANSPOSE_CONV": _count_transposed,
    "CONV_3D": _count_convolution_3d,
    "FULLY_CONNECTED": _count_dense,
    "BATCH_MATMUL": _count_matmul,
    "AVERAGE_POOL_2D": _count_pool,
    "MAX_POOL_2D": _count_pool,
    "L2_POOL_2D": _count_pool,
}


def read_tflite(model: str, function: str) -> dict[str, Any]:
    """Read a function's operators. Runs in an isolated process.

    Returns:
        ``nodes``: lists [name, operator, inputs, outputs, flops, ONNX operator or ""] in order; ``values`` and
        ``results`` as in :func:`hil.controller.analysis.profile.compilation.estimate.read`. Tensors have the names
        ``t0``, ``t1``, ..., because a graph may give multiple tensors the same name.
    """
    from ai_edge_litert import schema_py_generated as schema

    data = read_file(Path(model), MAX_MODEL_BYTES)
    whole = schema.ModelT.InitFromObj(schema.Model.GetRootAs(data))
    graph = whole.subgraphs[_find_graph(whole, function)]
    operators = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}
    kinds = {value: name for name, value in vars(schema.TensorType).items() if isinstance(value, int)}
    shapes: list[Shape] = [_read_shape(tensor) for tensor in graph.tensors]
    nodes: list[list[Any]] = []
    counts: dict[str, int] = {}
    for operator in graph.operators:
        code = whole.operatorCodes[operator.opcodeIndex]
        op_type = operators.get(max(code.builtinCode, code.deprecatedBuiltinCode), "?")
        if op_type == "CUSTOM":
            op_type = bytes(code.customCode or b"custom").decode(errors="replace")
        places, made = _list_tensors(operator.inputs), _list_tensors(operator.outputs)
        ins, outs = ([None if at < 0 else shapes[at] for at in side] for side in (places, made))
        name = _decode_name(graph.tensors[made[0]].name) if made else op_type
        counts[name] = counts.get(name, 0) + 1
        nodes.append(
            [
                name if counts[name] == 1 else f"{name} ({counts[name]})",
                op_type,
                [f"t{at}" for at in places if at >= 0],
                [f"t{at}" for at in made],
                count_tflite(op_type, ins, outs, operator.builtinOptions),
                _LIKE_ONNX.get(op_type, ""),
            ]
        )
    values = {}
    for number, (tensor, shape) in enumerate(zip(graph.tensors, shapes, strict=True)):
        known = _DTYPES.get(kinds.get(tensor.type, ""))
        if known is not None and shape is not None:
            text, bits = known
            values[f"t{number}"] = ["x".join([*map(str, shape), text]), -(-math.prod(shape) * bits // 8)]
    return {"nodes": nodes, "values": values, "results": [f"t{at}" for at in _list_tensors(graph.outputs)]}


# Type of a tensor -> name of the element type, and bits.
_DTYPES = {
    "FLOAT32": ("f32", 32),
    "FLOAT16": ("f16", 16),
    "BFLOAT16": ("bf16", 16),
    "FLOAT64": ("f64", 64),
    "INT64": ("i64", 64),
    "UINT64": ("ui64", 64),
    "INT32": ("i32", 32),
    "UINT32": ("ui32", 32),
    "INT16": ("i16", 16),
    "UINT16": ("ui16", 16),
    "INT8": ("i8", 8),
    "UINT8": ("ui8", 8),
    "INT4": ("i4", 4),
    "BOOL": ("i1", 8),
}


def count_tflite(op_type: str, ins: Sequence[Shape], outs: Sequence[Shape], options: Any) -> int | None:
    """Count an operator's operations; None if the operator or a required shape is unknown.

    Args:
        ins, outs: shapes, in order; None for an unknown shape or an omitted input.
        options: the operator's options in the file.
    """
    if op_type in _LIKE_ONNX:
        return count_operations(_LIKE_ONNX[op_type], ins, outs, {})
    try:
        return _COUNTS[op_type](ins, outs, options) if op_type in _COUNTS else None
    except (TypeError, ValueError, LookupError, AttributeError):  # a shape is None or has an unexpected rank
        return None


def _find_graph(model: Any, function: str) -> int:
    """Return the number of a function's graph; 0 if the model has no signatures."""
    for signature in model.signatureDefs or ():
        if _decode_name(signature.signatureKey) == function:
            return int(signature.subgraphIndex)
    return 0


def _read_shape(tensor: Any) -> Shape:
    """Return a tensor's shape; None if a dimension is dynamic. A tensor without a shape is a scalar."""
    signature = tensor.shapeSignature
    if signature is not None and any(int(size) < 0 for size in signature):
        return None
    return [int(size) for size in tensor.shape] if tensor.shape is not None else []


def _list_tensors(places: Any) -> list[int]:
    return [int(place) for place in places] if places is not None else []


def _decode_name(name: Any) -> str:
    return bytes(name).decode(errors="replace") if name is not None else ""
