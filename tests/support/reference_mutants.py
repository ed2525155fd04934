"""Wrong versions of small ONNX models, as a faulty rewrite, optimizer or cache would produce them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hil.core.tensors import Array

Mutate = Callable[[onnx.ModelProto], None]


def _random(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _weights(name: str, *shape: int, scale: float = 0.5) -> onnx.TensorProto:
    values = _random(name).standard_normal(shape) * scale
    return numpy_helper.from_array(values.astype(np.float32), name)


def _model(
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int],
    out: Sequence[int],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(nodes),
        "test",
        [value("x", TensorProto.FLOAT, shape)],
        [value("y", TensorProto.FLOAT, out)],
        list(weights),
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("test", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=list(functions))


def conv_net() -> onnx.ModelProto:
    """Conv, Relu, MaxPool, Gemm, Softmax: [1, 3, 8, 8] -> [1, 6]."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "g", "h"], ["l"]),
        helper.make_node("Softmax", ["l"], ["y"], axis=1),
    ]
    weights = [
        _weights("w", 4, 3, 3, 3),
        _weights("b", 4),
        _weights("g", 64, 6, scale=0.1),
        _weights("h", 6),
    ]
    return _model(nodes, [1, 3, 8, 8], [1, 6], weights)


def mixer() -> onnx.ModelProto:
    """LayerNormalization, MatMul, Transpose, Concat, Slice, Gather, Clip, LeakyRelu: [4, 6] -> [3, 12]."""
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale"], ["n"], epsilon=0.1),
        helper.make_node("MatMul", ["n", "w"], ["m"]),
        helper.make_node("LeakyRelu", ["m"], ["k"], alpha=0.3),
        helper.make_node("Clip", ["k", "low", "high"], ["c"]),
        helper.make_node("Concat", ["c", "x"], ["j"], axis=1),
        helper.make_node("Gather", ["j", "order"], ["g"], axis=0),
        helper.make_node("Slice", ["g", "start", "stop", "axes"], ["y"]),
    ]
    whole = [("order", [3, 1, 0, 2]), ("start", [1]), ("stop", [4]), ("axes", [0])]
    weights = [
        _weights("w", 6, 6),
        _weights("scale", 6),
        numpy_helper.from_array(np.float32(-0.05), "low"),
        numpy_helper.from_array(np.float32(0.05), "high"),
        *(numpy_helper.from_array(np.array(values, np.int64), name) for name, values in whole),
    ]
    return _model(nodes, [4, 6], [3, 12], weights)


def quantized() -> onnx.ModelProto:
    """DequantizeLinear (per channel, with zero points), Mul and MatMul: [5, 16] -> [5, 8].

    Without the Mul, ONNX Runtime's optimizer computes the product at accuracy level 4.
    """
    values = _random("q").integers(-128, 128, (16, 8)).astype(np.int8)
    weights = [
        numpy_helper.from_array(values, "q"),
        numpy_helper.from_array(_random("s").uniform(0.01, 0.05, 8).astype(np.float32), "s"),
        numpy_helper.from_array(_random("z").integers(-20, 20, 8).astype(np.int8), "z"),
        numpy_helper.from_array(np.float32(0.5), "half"),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], axis=1),
        helper.make_node("Mul", ["d", "half"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    return _model(nodes, [5, 16], [5, 8], weights)


def resize() -> onnx.ModelProto:
    """Resize with half_pixel coordinates: [1, 1, 3, 5] -> [1, 1, 7, 9]."""
    sizes = numpy_helper.from_array(np.array([1, 1, 7, 9], np.int64), "sizes")
    node = helper.make_node(
        "Resize", ["x", "", "", "sizes"], ["y"], mode="linear", coordinate_transformation_mode="half_pixel"
    )
    return _model([node], [1, 1, 3, 5], [1, 1, 7, 9], [sizes])


def _reference_to(parameter: str, name: str) -> onnx.AttributeProto:
    return onnx.AttributeProto(name=name, ref_attr_name=parameter, type=onnx.AttributeProto.FLOAT)


def function_default() -> onnx.ModelProto:
    """A local function whose attribute has a default: [8] -> [8]."""
    node = helper.make_node("LeakyRelu", ["a"], ["b"])
    node.attribute.append(_reference_to("slope", "alpha"))
    function = helper.make_function(
        "test",
        "Leak",
        ["a"],
        ["b"],
        [node],
        [helper.make_opsetid("", 17)],
        attribute_protos=[helper.make_attribute("slope", 0.5)],
    )
    call = helper.make_node("Leak", ["x"], ["y"], domain="test")
    return _model([call], [8], [8], functions=[function])


def batch_norm() -> onnx.ModelProto:
    """BatchNormalization: [2, 4, 5] -> [2, 4, 5]."""
    weights = [
        _weights("scale", 4),
        _weights("shift", 4),
        _weights("mean", 4),
        numpy_helper.from_array(np.full(4, 0.01, np.float32), "variance"),
    ]
    node = helper.make_node("BatchNormalization", ["x", "scale", "shift", "mean", "variance"], ["y"], epsilon=0.01)
    return _model([node], [2, 4, 5], [2, 4, 5], weights)


def old_softmax() -> onnx.ModelProto:
    """Softmax of opset 11, which flattens from its axis on: [2, 3, 4] -> [2, 3, 4]."""
    return _model([helper.make_node("Softmax", ["x"], ["y"], axis=1)], [2, 3, 4], [2, 3, 4], opset=11)


def long_sum() -> onnx.ModelProto:
    """ReduceSum over 3,000 values: [2, 3000] -> [2, 1]."""
    whole = [("start", [0]), ("stop", [3000]), ("axes", [1])]
    nodes = [
        helper.make_node("Slice", ["x", "start", "stop", "axes"], ["s"]),
        helper.make_node("ReduceSum", ["s", "axes"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.array(values, np.int64), name) for name, values in whole]
    return _model(nodes, [2, 3000], [2, 1], weights)


def _node(model: onnx.ModelProto, operator: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == operator)


def set_attribute(operator: str, **values: object) -> Mutate:
    """Set attributes of the first node of an operator."""

    def mutate(model: onnx.ModelProto) -> None:
        node = _node(model, operator)
        kept = [one for one in node.attribute if one.name not in values]
        del node.attribute[:]
        node.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in values.items())])

    return mutate


def drop_attribute(operator: str, name: str) -> Mutate:
    """Remove an attribute, so that its default applies."""

    def mutate(model: onnx.ModelProto) -> None:
        node = _node(model, operator)
        kept = [one for one in node.attribute if one.name != name]
        assert len(kept) < len(node.attribute)
        del node.attribute[:]
        node.attribute.extend(kept)

    return mutate


def rename_operator(operator: str, other: str) -> Mutate:
    """Replace an operator by another operator."""

    def mutate(model: onnx.ModelProto) -> None:
        _node(model, operator).op_type = other

    return mutate


def bypass(operator: str) -> Mutate:
    """Remove a node with one input and one output."""

    def mutate(model: onnx.ModelProto) -> None:
        node = _node(model, operator)
        for other in model.graph.node:
            for place, name in enumerate(other.input):
                if name == node.output[0]:
                    other.input[place] = node.input[0]
        model.graph.node.remove(node)

    return mutate


def drop_input(operator: str, place: int) -> Mutate:
    """Leave out an optional input."""

    def mutate(model: onnx.ModelProto) -> None:
        del _node(model, operator).input[place]

    return mutate


def swap_inputs(operator: str) -> Mutate:
    """Swap the first two inputs."""

    def mutate(model: onnx.ModelProto) -> None:
        node = _node(model, operator)
        node.input[0], node.input[1] = node.input[1], node.input[0]

    return mutate


def change_weight(name: str, change: Callable[[Array], Array]) -> Mutate:
    """Replace a weight by a function of it."""

    def mutate(model: onnx.ModelProto) -> None:
        tensor = next(one for one in model.graph.initializer if one.name == name)
        before = numpy_helper.to_array(tensor)
        after = np.ascontiguousarray(change(before)).astype(before.dtype)
        assert after.tobytes() != before.tobytes()
        tensor.CopyFrom(numpy_helper.from_array(after.reshape(before.shape), name))

    return mutate


def set_opset(version: int) -> Mutate:
    """Use a different opset for the same nodes."""

    def mutate(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    return mutate


def default_of_function(value: float) -> Mutate:
    """Change the default of a function's attribute."""

    def mutate(model: onnx.ModelProto) -> None:
        model.functions[0].attribute_proto[0].f = value

    return mutate


def _zero_last(values: Array) -> Array:
    changed = values.copy()
    changed[-1] = 0
    return changed


@dataclass(frozen=True)
class Mutant:
    """A model and the function that makes it wrong."""

    name: str
    build: Callable[[], onnx.ModelProto]
    mutate: Mutate


def _bfloat16(values: Array) -> Array:
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


MUTANTS = [
    Mutant("weights_in_float16", conv_net, change_weight("w", lambda w: w.astype(np.float16))),
    Mutant("weights_in_bfloat16", conv_net, change_weight("g", _bfloat16)),
    Mutant("last_weights_zero", conv_net, change_weight("g", _zero_last)),
    Mutant("last_filter_zero", conv_net, change_weight("w", _zero_last)),
    Mutant("kernel_flipped", conv_net, change_weight("w", lambda w: w[:, :, ::-1, ::-1])),
    Mutant("kernel_transposed", conv_net, change_weight("w", lambda w: w.transpose(0, 1, 3, 2))),
    Mutant("bias_missing", conv_net, drop_input("Conv", 2)),
    Mutant("gemm_bias_missing", conv_net, drop_input("Gemm", 2)),
    Mutant("pads_shifted", conv_net, set_attribute("Conv", pads=[0, 0, 2, 2])),
    Mutant("relu_missing", conv_net, bypass("Relu")),
    Mutant("relu_leaks", conv_net, rename_operator("Relu", "LeakyRelu")),
    Mutant("pool_averages", conv_net, rename_operator("MaxPool", "AveragePool")),
    Mutant("gemm_scaled", conv_net, set_attribute("Gemm", alpha=1.01)),
    Mutant("softmax_on_wrong_axis", conv_net, set_attribute("Softmax", axis=0)),
    Mutant("softmax_logs", conv_net, rename_operator("Softmax", "LogSoftmax")),
    Mutant("epsilon_default", mixer, drop_attribute("LayerNormalization", "epsilon")),
    Mutant("matmul_transposed", mixer, change_weight("w", lambda w: w.T)),
    Mutant("slope_default", mixer, drop_attribute("LeakyRelu", "alpha")),
    Mutant("clip_without_maximum", mixer, drop_input("Clip", 2)),
    Mutant("concat_swapped", mixer, swap_inputs("Concat")),
    Mutant("gather_off_by_one", mixer, change_weight("order", lambda order: (order + 1) % 4)),
    Mutant("slice_off_by_one", mixer, change_weight("start", lambda start: start - 1)),
    Mutant("zero_points_missing", quantized, drop_input("DequantizeLinear", 2)),
    Mutant("scale_of_first_channel", quantized, change_weight("s", lambda s: np.full_like(s, s[0]))),
    Mutant("zero_point_of_first_channel", quantized, change_weight("z", lambda z: np.full_like(z, z[0]))),
    Mutant("low_bits_of_weights_lost", quantized, change_weight("q", lambda q: q & ~np.int8(15))),
    Mutant("coordinates_asymmetric", resize, set_attribute("Resize", coordinate_transformation_mode="asymmetric")),
    Mutant("coordinates_aligned", resize, set_attribute("Resize", coordinate_transformation_mode="align_corners")),
    Mutant("resize_nearest", resize, set_attribute("Resize", mode="nearest")),
    Mutant("function_default_lost", function_default, default_of_function(0.01)),
    Mutant("batch_norm_epsilon_default", batch_norm, drop_attribute("BatchNormalization", "epsilon")),
    Mutant("opset_raised_without_conversion", old_softmax, set_opset(13)),
    Mutant("sum_truncated", long_sum, change_weight("stop", lambda stop: stop - 1)),
]
