"""One small ONNX model for each class of operators, and its outputs in an arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from hil.core.tensors import Array

_RNG = np.random.default_rng(7)


def _values(*shape: int) -> Array:
    return _RNG.normal(size=shape).astype(np.float32)


@dataclass(frozen=True)
class OperatorClass:
    """Sequence of nodes. Each node takes the previous result (``x``) and constants."""

    nodes: tuple[onnx.NodeProto, ...]
    inputs: Mapping[str, Array]
    constants: Mapping[str, Array] = field(default_factory=dict)
    contracts: bool = False  # whether int8 hardware quantizes its operands

    def model(self, nodes: tuple[onnx.NodeProto, ...] | None = None) -> onnx.ModelProto:
        """Return the whole model, or a model with some of its nodes."""
        return model_of(nodes or self.nodes, self.inputs, self.constants)


def model_of(
    nodes: tuple[onnx.NodeProto, ...], inputs: Mapping[str, Array], constants: Mapping[str, Array], opset: int = 17
) -> onnx.ModelProto:
    """Return an ONNX model; its output is that of the last node."""
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, one.shape) for name, one in inputs.items()],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(one, name) for name, one in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return onnx.shape_inference.infer_shapes(model)


def _single(kind: str, inputs: Mapping[str, Array], *, contracts: bool = False, **more: Any) -> OperatorClass:
    constants = more.pop("constants", {})
    names = [*inputs, *constants]
    return OperatorClass((helper.make_node(kind, names, ["y"], "op", **more),), inputs, constants, contracts)


_IMAGE = _values(1, 4, 8, 8)
_ROWS = _values(4, 16)
OPERATOR_CLASSES: dict[str, OperatorClass] = {
    "matmul": _single("MatMul", {"x": _ROWS}, constants={"w": _values(16, 8)}, contracts=True),
    "matmul_of_activations": _single("MatMul", {"x": _ROWS, "z": _values(16, 8)}, contracts=True),
    "gemm": _single("Gemm", {"x": _ROWS}, constants={"w": _values(8, 16), "b": _values(8)}, contracts=True, transB=1),
    "conv": _single(
        "Conv", {"x": _IMAGE}, constants={"w": _values(6, 4, 3, 3), "b": _values(6)}, contracts=True, pads=[1, 1, 1, 1]
    ),
    "depthwise_conv": _single("Conv", {"x": _IMAGE}, constants={"w": _values(4, 1, 3, 3)}, contracts=True, group=4),
    "conv_transpose": _single(
        "ConvTranspose", {"x": _IMAGE}, constants={"w": _values(4, 3, 2, 2)}, contracts=True, strides=[2, 2]
    ),
    "attention": OperatorClass(
        (
            helper.make_node("MatMul", ["q", "k"], ["scores"], "scores"),
            helper.make_node("Softmax", ["scores"], ["weights"], "weights"),
            helper.make_node("MatMul", ["weights", "v"], ["y"], "mixed"),
        ),
        {"q": _values(2, 6, 8), "k": _values(2, 8, 6), "v": _values(2, 6, 8)},
        contracts=True,
    ),
    "elementwise": _single("Mul", {"x": _ROWS, "z": _values(4, 16)}),
    "activation": _single("Tanh", {"x": _ROWS}),
    "reduction": _single("ReduceSum", {"x": _ROWS}, constants={"axes": np.array([1])}),
    "softmax": _single("Softmax", {"x": _ROWS}),
    "layer_normalization": _single(
        "LayerNormalization", {"x": _ROWS}, constants={"scale": _values(16), "bias": _values(16)}
    ),
    "instance_normalization": _single(
        "InstanceNormalization", {"x": _IMAGE}, constants={"scale": _values(4), "bias": _values(4)}
    ),
    "pooling": _single("AveragePool", {"x": _IMAGE}, kernel_shape=[2, 2]),
    "global_pooling": _single("GlobalAveragePool", {"x": _IMAGE}),
    "movement": _single("Transpose", {"x": _ROWS}),
}


def run_onnx(model: onnx.ModelProto, given: Mapping[str, Array], *, optimized: bool = True) -> Array:
    """Return the first output, computed by ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    array: Array = session.run(None, dict(given))[0]
    return array


def predict(one: OperatorClass, arithmetic: str) -> Array:
    """Return the output in an arithmetic.

    This function runs each node alone, and rounds its operands and its result.
    """
    round_value: Callable[[Array], Array] = (lambda array: array) if arithmetic == "int8" else _narrowed(arithmetic)
    env = {name: _rounded(array, round_value) for name, array in {**one.inputs, **one.constants}.items()}
    for node in one.nodes:
        operands = {name: env[name] for name in node.input}
        if arithmetic == "int8" and node.op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose"):
            for place, name in enumerate(node.input[:2]):
                operands[name] = _int8(operands[name], _axis(node, place) if name in one.constants else None)
        result = run_onnx(model_of((node,), operands, {}) if _all_floats(operands) else _with(node, operands), operands)
        env[node.output[0]] = _rounded(result, round_value)
    return env[one.nodes[-1].output[0]]


def _all_floats(operands: Mapping[str, Array]) -> bool:
    return all(array.dtype == np.float32 for array in operands.values())


def _with(node: onnx.NodeProto, operands: dict[str, Array]) -> onnx.ModelProto:
    """Return a model with one node. Its integer operands (axes) become constants."""
    whole = {name: operands.pop(name) for name in list(operands) if operands[name].dtype != np.float32}
    return model_of((node,), operands, whole)


def _rounded(array: Array, round_value: Callable[[Array], Array]) -> Array:
    return round_value(array) if array.dtype == np.float32 else array


def _narrowed(arithmetic: str) -> Callable[[Array], Array]:
    narrow = np.dtype(np.float16 if arithmetic == "float16" else ml_dtypes.bfloat16)
    return lambda array: array.astype(narrow).astype(np.float32)


def _axis(node: onnx.NodeProto, place: int) -> int | None:
    transposed = any(one.name == "transB" and one.i for one in node.attribute)
    axes = {"MatMul": -1, "Gemm": 0 if transposed else 1, "Conv": 0, "ConvTranspose": 1}
    return axes[node.op_type] if place else None


def _int8(array: Array, axis: int | None) -> Array:
    kept = None if axis is None else tuple(number for number in range(array.ndim) if number != axis % array.ndim)
    scale = np.abs(array).max(axis=kept, keepdims=True) / 127
    rounded: Array = (np.clip(np.round(array / scale), -127, 127) * scale).astype(np.float32)
    return rounded
