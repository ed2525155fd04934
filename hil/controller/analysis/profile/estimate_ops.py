"""How many operations each of ONNX's operators takes, by its shapes. A multiplication and an addition are two.

Scalar functions (exp, tanh, erf) count as one each, comparing and rounding too: estimates, to tell the large from the
small and what computes from what only moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Shape = Sequence[int]

# Operators whose output is one of their inputs' memory, seen otherwise: nothing is computed, nothing moved.
VIEWS = frozenset("Reshape Flatten Squeeze Unsqueeze Identity Shape Size Constant".split())
# Operators that read no more of their first input than they write.
PICKING = frozenset("Gather GatherElements GatherND Slice Split".split())
_MOVING = (
    VIEWS
    | PICKING
    | frozenset(
        "Transpose Concat Pad Expand Tile Cast CastLike DepthToSpace SpaceToDepth ConstantOfShape Range Scatter "
        "ScatterElements ScatterND Compress EyeLike ReverseSequence TensorScatter Trilu OneHot".split()
    )
)
# Operations for each element of the output.
_EACH_OUTPUT = {
    **dict.fromkeys(
        "Abs Add And Ceil Cos Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual Less LessOrEqual Log Max Min Mod Mul "
        "Neg Not Or Pow Reciprocal Relu Round Sign Sin Sinh Sqrt Sub Sum Mean Tan Tanh Where Xor Atan Acos Asin Asinh "
        "Acosh Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor IsInf IsNaN".split(),
        1,
    ),
    **dict.fromkeys("Clip LeakyRelu PRelu ThresholdedRelu DequantizeLinear Dropout Shrink".split(), 2),
    **dict.fromkeys("Elu Celu Selu HardSigmoid Softplus Softsign".split(), 3),
    **dict.fromkeys("Sigmoid QuantizeLinear BatchNormalization LpNormalization".split(), 4),
    **dict.fromkeys("Softmax LogSoftmax HardSwish Swish Mish RMSNormalization".split(), 5),
    **dict.fromkeys("Gelu LayerNormalization InstanceNormalization GroupNormalization".split(), 8),
    "MeanVarianceNormalization": 6,
    "Hardmax": 2,
    "Resize": 7,
    "DynamicQuantizeLinear": 6,
    "QLinearAdd": 7,
    "QLinearMul": 7,
}
# Operations for each element of the first input.
_EACH_INPUT = {
    **dict.fromkeys(
        "ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ArgMax ArgMin CumSum GlobalAveragePool GlobalMaxPool "
        "NonZero TopK".split(),
        1,
    ),
    **dict.fromkeys("ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum GlobalLpPool".split(), 2),
    "ReduceLogSumExp": 3,
}
_POOLING = frozenset("AveragePool MaxPool LpPool MaxUnpool".split())
# The position of the weights among a convolution's inputs, and of both factors of a product's.
_CONVOLUTION = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3, "DeformConv": 1}
_PRODUCT = {"MatMul": (0, 1), "MatMulInteger": (0, 1), "QLinearMatMul": (0, 3)}
# Scalar operations of a recurrent cell's gates, for each of its states.
_RECURRENT = {"LSTM": 24, "GRU": 20, "RNN": 4}


def operations(
    op_type: str, ins: Sequence[Shape | None], outs: Sequence[Shape | None], given: Mapping[str, Any]
) -> int | None:
    """How many operations a node takes.

    Args:
        op_type: of ONNX's own domain.
        ins, outs: shapes, in order; None where a shape is unknown or an input left out.
        given: the node's attributes.

    Returns:
        None where the operator or one of the shapes that count is unknown.
    """
    if op_type in _MOVING:
        return 0
    try:
        return _operations(op_type, ins, outs, given)
    except (_Unknown, IndexError):
        return None


class _Unknown(Exception):
    """A shape that counts is not known."""


def _known(shapes: Sequence[Shape | None], position: int) -> Shape:
    shape = shapes[position]
    if shape is None:
        raise _Unknown
    return shape


def _operations(
    op_type: str, ins: Sequence[Shape | None], outs: Sequence[Shape | None], given: Mapping[str, Any]
) -> int | None:
    if (each := _EACH_OUTPUT.get(op_type)) is not None:
        return each * math.prod(_known(outs, 0))
    if (each := _EACH_INPUT.get(op_type)) is not None:
        return each * math.prod(_known(ins, 0))
    if op_type in _POOLING:
        return int(math.prod(_known(outs, 0)) * math.prod(given.get("kernel_shape", ())))
    if op_type in _CONVOLUTION:
        weights = _known(ins, _CONVOLUTION[op_type])
        return 2 * math.prod(_known(outs, 0)) * math.prod(weights[1:])
    if op_type == "ConvTranspose":
        return 2 * math.prod(_known(ins, 0)) * math.prod(_known(ins, 1)[1:])
    if op_type == "Gemm":
        left = _known(ins, 0)
        common = left[0] if given.get("transA") else left[1]
        return math.prod(_known(outs, 0)) * (2 * common + (1 if len(ins) > 2 else 0))
    if op_type in _PRODUCT:
        return 2 * math.prod(_known(outs, 0)) * _known(ins, _PRODUCT[op_type][0])[-1]
    if op_type == "Einsum":
        return _einsum(str(given.get("equation", "")), ins)
    if op_type in _RECURRENT:
        steps, batch = _known(ins, 0)[:2]
        weights, recurrent = _known(ins, 1), _known(ins, 2)
        states = recurrent[0] * recurrent[2]
        factors = math.prod(weights) + math.prod(recurrent)
        return int(steps * batch * (2 * factors + _RECURRENT[op_type] * states))
    if op_type == "Attention":
        return _attention(ins, given)
    if op_type == "LRN":
        return math.prod(_known(outs, 0)) * (2 * int(given.get("size", 1)) + 4)
    return None


def _einsum(equation: str, ins: Sequence[Shape | None]) -> int | None:
    """A product of two tensors, each index named: one multiplication and one addition for each set of indices."""
    operands, _, _ = equation.replace(" ", "").partition("->")
    words = operands.split(",")
    if len(words) != 2 or "." in equation:
        return None
    sizes: dict[str, int] = {}
    for word, shape in zip(words, ins, strict=True):
        if shape is None or len(shape) != len(word):
            return None
        sizes.update(zip(word, shape, strict=True))
    return 2 * math.prod(sizes.values())


def _attention(ins: Sequence[Shape | None], given: Mapping[str, Any]) -> int:
    """Queries by keys, a softmax, and that by values."""
    query, key, value = (_known(ins, position) for position in range(3))
    if len(query) == 4:
        batch, heads, rows, size = query
        columns, value_size = key[2], value[3]
    else:
        heads = int(given["q_num_heads"])
        batch, rows, size = query[0], query[1], query[2] // heads
        columns, value_size = key[1], value[2] // int(given["kv_num_heads"])
    return int(batch * heads * rows * columns * (2 * size + 2 * value_size + 5))
