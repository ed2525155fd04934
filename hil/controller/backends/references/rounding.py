"""Make ONNX models whose operators round randomly, to estimate the effect of a different summation order.

The error of a sum of n terms t is about ``u * sqrt(n) * (|sum(t)| + sqrt(sum(t^2)))``. Assumptions: each partial sum is
rounded once, and the errors are independent. A partial sum is about as large as the result plus the root of the sum of
the terms' squares. Sources: Higham, Accuracy and Stability of Numerical Algorithms, 4.2; Higham and Mary, A New
Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019.

A rounding error is uniform within half of eps, so its standard deviation u is ``eps / 2 / sqrt(3)``. The error of an
operator without a sum is u times the result.

:func:`add_rounding` adds a normal error of that size to each result, and the model propagates it to the outputs
(D. S. Parker, Monte Carlo Arithmetic, 1997). Whole numbers are exact and get no error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

# Standard deviation of a rounding error, in eps.
_DEVIATION = 1 / 2 / math.sqrt(3)
# The first opset in which Sign exists and Min and Max broadcast.
_MIN_OPSET = 9
# Maximum magnitude of an error: larger magnitudes are masks. The limit also prevents infinite results.
_MAX_ERROR = 1e30
_AXES_ARE_INPUT = 18
# Number of standard deviations that noise allows: ``NOISE_FACTOR`` in hil.controller.backends.references.noise.
_DEVIATIONS = 8
_SOFTMAX_OF_AXIS = 13
# TensorProto.DataType values.
_FLOAT, _FLOAT16 = 1, 10

_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})
_SUMS = frozenset({"ReduceSum", "ReduceMean", "GlobalAveragePool", "AveragePool"})
# Sums whose terms all have the same sign, so that the result is the sum of the magnitudes.
_POSITIVE = frozenset({"Softmax", "ReduceL1", "ReduceL2", "ReduceSumSquare", "LpNormalization", "RMSNormalization"})
_NORMS = frozenset({"LayerNormalization", "InstanceNormalization"})
# Operators whose intermediate values may be as large as 1, or as the input, even if the result is small.
_OF_ONE = frozenset({"Softplus", "Elu", "Selu", "Celu", "Tanh", "Erf"})
_OF_INPUT = frozenset({"Gelu", "Mish", "LogSoftmax", "BatchNormalization"})
_PLAIN = frozenset(
    "Acos Acosh Add Asin Asinh Atan Atanh Attention Cos Cosh CumSum Div Einsum Exp GridSample GroupNormalization "
    "HardSwish LRN Log Mean Mul Pow Reciprocal ReduceLogSum ReduceLogSumExp Resize Sigmoid Sin Sinh Softsign Sqrt Sub "
    "Sum Swish Tan".split()
)
_ALL = _PRODUCTS | _SUMS | _POSITIVE | _NORMS | _OF_ONE | _OF_INPUT | _PLAIN


def write_rounding_models(
    model: str, folder: str, shapes: Mapping[str, Sequence[int]], units: float, count: int
) -> list[str]:
    """Write copies of a model whose operators round randomly. Runs in an isolated process.

    Returns:
        The file names in the directory; empty if no operator rounds.
    """
    import onnx

    from hil.controller.models.importers.onnx_data import load_with_data

    given = load_with_data(Path(model))
    names = []
    for seed in range(count):
        rounding = add_rounding(given, shapes, seed, units)
        if rounding is None:
            break
        names.append(f"{seed}.onnx")
        onnx.save(rounding, f"{folder}/{names[-1]}")
    return names


def add_rounding(model: ModelProto, inputs: Mapping[str, Sequence[int]], seed: int, units: float) -> ModelProto | None:
    """Return a copy of a model whose operators round randomly, with ``units`` times their usual error.

    Args:
        inputs: Input name -> shape, for the lengths of sums.
        seed: Seed of the errors.

    Returns:
        None if no operator of the main graph rounds float16, float32 or float64.
    """
    import onnx

    opset = next((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), 0)
    if opset < _MIN_OPSET:
        return None
    found = onnx.ModelProto()
    found.CopyFrom(model)
    for value in found.graph.input:
        if value.name in inputs:
            for dim, size in zip(value.type.tensor_type.shape.dim, inputs[value.name], strict=False):
                dim.dim_value = size
    graph = _Graph(found, opset, units)
    nodes: list[NodeProto] = []
    for number, node in enumerate(found.graph.node):
        nodes += graph.round_node(node, seed * 10_007 + number)
    if len(nodes) == len(found.graph.node):
        return None
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found


class _Graph:
    """Types and shapes of a graph, and the nodes that add errors to it."""

    def __init__(self, model: ModelProto, opset: int, units: float) -> None:
        import onnx
        from onnx.shape_inference import infer_shapes

        self.opset, self.units = opset, units
        self.types: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        inferred = infer_shapes(model, data_prop=True).graph
        for value in (*inferred.input, *inferred.value_info, *inferred.output):
            tensor = value.type.tensor_type
            self.types[value.name] = tensor.elem_type
            if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
                self.shapes[value.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
        for weight in model.graph.initializer:
            self.types[weight.name], self.shapes[weight.name] = weight.data_type, tuple(weight.dims)
        self.dtypes: dict[Any, np.dtype[Any]] = {
            onnx.TensorProto.FLOAT: np.dtype(np.float32),
            onnx.TensorProto.DOUBLE: np.dtype(np.float64),
            onnx.TensorProto.FLOAT16: np.dtype(np.float16),
        }
        self.nodes: list[NodeProto] = []
        self.prefix = ""
        self.dtype = np.dtype(np.float32)
        self.eps = 0.0

    def round_node(self, node: NodeProto, seed: int) -> list[NodeProto]:
        """Return a node and, if the node rounds, further nodes that add an error to the first output.

        A float16 result is rounded once: the operator itself, and the nodes of the error, compute in float32.
        """
        dtype = self.dtypes.get(self.types.get(node.output[0])) if node.output else None
        if node.op_type not in _ALL or node.domain not in ("", "ai.onnx") or dtype is None:
            return [node]
        result, exact = node.output[0], f"hil.exact.{node.output[0]}"
        is_half = dtype == np.float16
        self.prefix, self.dtype = f"hil.rounding.{result}", np.dtype(np.float32) if is_half else dtype
        self.eps = float(np.finfo(self.dtype).eps)
        changed = _copy(node)
        changed.output[0] = exact
        self.nodes = [changed]
        if is_half:
            node, exact = self._widen_inputs(node), self._add_op("Cast", exact, to=_FLOAT)
        eps = float(np.finfo(dtype).eps)
        size = self._add_error(node, exact)
        if is_half:
            rounding = self._add_op("Mul", self._add_op("Abs", exact), self._number(self.units * eps * _DEVIATION))
            size = self._add_op("Add", size, rounding)
        size = self._add_op("Mul", size, self._add_movable(exact, eps))
        size = self._add_op("Min", size, self._number(_MAX_ERROR))
        chance = self._add_op("RandomNormalLike", exact, seed=float(seed))
        moved = self._add_op("Add", exact, self._add_op("Mul", size, chance), into="" if is_half else result)
        if is_half:
            self._add_op("Cast", moved, into=result, to=_FLOAT16)
        return self.nodes

    def _widen_inputs(self, node: NodeProto) -> NodeProto:
        """Return a copy of a node whose float16 inputs are cast to float32."""
        found = _copy(node)
        for place, name in enumerate(node.input):
            if name and self.types.get(name) == _FLOAT16:
                found.input[place] = wide = self._add_op("Cast", name, to=_FLOAT)
                if name in self.shapes:
                    self.shapes[wide] = self.shapes[name]
        return found

    def _add_error(self, node: NodeProto, exact: str) -> str:
        """Return the name of a tensor with the standard deviation of each element's error."""
        unit = self.units * self.eps * _DEVIATION
        size = self._add_op("Abs", exact)
        kind, terms = node.op_type, self._count_terms(node)
        if kind in _PRODUCTS | _SUMS:
            size = self._add_op("Add", size, self._add_root_of_squares(node, terms))
        elif kind in _NORMS:
            size = self._add_op("Add", size, self._add_off_center(node))
        elif kind in _OF_ONE:
            size = self._add_op("Add", size, self._number(1.0))
        elif kind in _OF_INPUT:
            size = self._add_op("Add", size, self._add_op("Abs", node.input[0]))
        size = self._add_op("Mul", size, self._number(unit * math.sqrt(terms)))
        return self._add_op("Add", size, self._add_lost_terms(node, exact)) if kind == "Softmax" else size

    def _add_movable(self, exact: str, eps: float) -> str:
        """Return the name of a tensor: 0 for whole numbers that the dtype represents exactly, 1 for other values.

        Args:
            eps: of the result's dtype.
        """
        largest = self._number(_MAX_ERROR)
        bounded = self._add_op("Max", self._add_op("Min", exact, largest), self._add_op("Neg", largest))
        fraction = self._add_op("Sub", bounded, self._add_op("Floor", bounded))
        large = self._add_op("Sub", self._add_op("Abs", bounded), self._number(1 / eps))
        return self._add_op("Max", self._add_op("Sign", fraction), self._add_op("Sign", self._add_op("Relu", large)))

    def _add_root_of_squares(self, node: NodeProto, terms: float) -> str:
        """Return the root of the sum of the terms' squares. The sum is the same operator applied to squared inputs."""
        count = 3 if node.op_type in _PRODUCTS else 1
        squares = [self._add_op("Mul", name, name) if name else "" for name in node.input[:count]]
        clone = _copy(node)
        del clone.input[:count]
        others = list(clone.input)
        clone.input[:] = [*squares, *others]
        for one in clone.attribute:
            if node.op_type == "Gemm" and one.name in ("alpha", "beta"):
                one.f = one.f**2
        clone.name, clone.output[:] = "", [self._name()]
        self.nodes.append(clone)
        is_mean = node.op_type in _SUMS - {"ReduceSum"}
        summed = self._add_op("Mul", clone.output[0], self._number(1 / terms)) if is_mean else clone.output[0]
        return self._add_op("Sqrt", summed)

    def _add_lost_terms(self, node: NodeProto, exact: str) -> str:
        """Return the error of a softmax from terms that its sum may lose: terms smaller than half a step of the sum.

        The error is the result times the lost part of the sum. This is a bound, not a standard deviation, so it is
        divided by 8.
        """
        step = self._number(self.units * self.eps / 2)
        small = self._add_op("Mul", exact, self._add_op("Sign", self._add_op("Relu", self._add_op("Sub", step, exact))))
        axis = _get_attribute(node, "axis", -1)
        lost = self._add_op("Mul", self._add_mean(small, [axis]), self._number(self._count_terms(node) / _DEVIATIONS))
        return self._add_op("Mul", lost, exact)

    def _add_off_center(self, node: NodeProto) -> str:
        """Return how far an error of the mean changes a normalized value, in units of the mean's relative error."""
        x, scale = node.input[0], node.input[1]
        axis = _get_attribute(node, "axis", -1) if node.op_type == "LayerNormalization" else 2
        rank = len(self.shapes.get(x, (1,) * 3))
        axes = list(range(axis % rank, rank))
        mean = self._add_mean(x, axes)
        rest = self._add_op("Sub", x, mean)
        variance = self._add_mean(self._add_op("Mul", rest, rest), axes)
        variance = self._add_op("Add", variance, self._number(_get_attribute(node, "epsilon", 1e-5)))
        relative = self._add_op("Div", self._add_op("Abs", mean), self._add_op("Sqrt", variance))
        largest = self._add_op("ReduceMax", self._add_op("Abs", scale), keepdims=0)
        return self._add_op("Mul", self._add_op("Add", relative, self._number(1.0)), largest)

    def _add_mean(self, x: str, axes: list[int]) -> str:
        if self.opset < _AXES_ARE_INPUT:
            return self._add_op("ReduceMean", x, axes=axes, keepdims=1)
        return self._add_op("ReduceMean", x, self._add_constant(np.array(axes, np.int64)), keepdims=1)

    def _count_terms(self, node: NodeProto) -> float:
        """Return the number of terms that the operator adds for one element; 1 if unknown."""
        shapes = [self.shapes.get(name) for name in node.input]
        out = self.shapes.get(node.output[0])
        lengths = _LENGTHS.get(node.op_type)
        try:
            found = lengths(node, shapes, out, self.opset) if lengths else 1
        except (IndexError, TypeError, ZeroDivisionError):  # shape inference found nothing
            return 1.0
        return float(max(found, 1))

    def _add_op(self, kind: str, *inputs: str, into: str = "", **attributes: Any) -> str:
        from onnx import helper

        output = into or self._name()
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def _number(self, value: float) -> str:
        return self._add_constant(np.array(value, self.dtype))

    def _add_constant(self, value: Any) -> str:
        from onnx import numpy_helper

        return self._add_op("Constant", value=numpy_helper.from_array(value))

    def _name(self) -> str:
        return f"{self.prefix}.{len(self.nodes)}"


def _copy(node: NodeProto) -> NodeProto:
    found = type(node)()
    found.CopyFrom(node)
    return found


def _get_attribute(node: NodeProto, name: str, default: Any) -> Any:
    from onnx import helper

    return next((helper.get_attribute_value(one) for one in node.attribute if one.name == name), default)


def _get_axis_length(node: NodeProto, shape: Any, opset: int) -> Any:
    """Return the number of terms of a softmax. Before opset 13, all axes from ``axis`` on are flattened."""
    if node.op_type != "LpNormalization" and opset < _SOFTMAX_OF_AXIS:
        return math.prod(shape[_get_attribute(node, "axis", 1) :])
    return shape[_get_attribute(node, "axis", -1)]


def _get_matmul_length(left: Any, right: Any) -> Any:
    return left[-1] if left else right[-2 if len(right) > 1 else 0]


def _get_gemm_length(node: NodeProto, left: Any, right: Any) -> Any:
    if right:
        return right[1 if _get_attribute(node, "transB", 0) else 0]
    return left[0 if _get_attribute(node, "transA", 0) else 1]


# Operator -> function that returns the number of terms per element. Arguments: node, input shapes, output shape (shapes
# are None if unknown), opset.
_LENGTHS: dict[str, Callable[[NodeProto, Sequence[Any], Any, int], Any]] = {
    "MatMul": lambda node, given, out, opset: _get_matmul_length(*given),
    "Gemm": lambda node, given, out, opset: _get_gemm_length(node, *given[:2]),
    "Conv": lambda node, given, out, opset: math.prod(given[1][1:]),
    "ConvTranspose": lambda node, given, out, opset: (
        given[1][0] / _get_attribute(node, "group", 1) * math.prod(given[1][2:])
    ),
    "AveragePool": lambda node, given, out, opset: math.prod(_get_attribute(node, "kernel_shape", (1,))),
    "GlobalAveragePool": lambda node, given, out, opset: math.prod(given[0][2:]),
    "InstanceNormalization": lambda node, given, out, opset: math.prod(given[0][2:]),
    "LayerNormalization": lambda node, given, out, opset: math.prod(given[0][_get_attribute(node, "axis", -1) :]),
    "RMSNormalization": lambda node, given, out, opset: math.prod(given[0][_get_attribute(node, "axis", -1) :]),
    **dict.fromkeys(
        ("LpNormalization", "Softmax", "LogSoftmax"),
        lambda node, given, out, opset: _get_axis_length(node, given[0], opset),
    ),
    **dict.fromkeys(
        ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"),
        lambda node, given, out, opset: math.prod(given[0]) / math.prod(out),
    ),
}
