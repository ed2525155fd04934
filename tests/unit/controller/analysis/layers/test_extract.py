"""Split a model into layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from support.layer_models import (
    branches_and_loops,
    constant_sequences,
    dynamic_batch,
    folded,
    indices_of_nonzero,
    integers,
    local_function,
    lstm,
    model_of,
    node,
    noisy,
    of_onnxruntime_alone,
    optional_and_split,
    repeated,
    residual_cnn,
    sequences,
    shared_weight,
    weights,
)
from support.models import DIGITS

from hil.controller.analysis.layers import Layer, extract_layers, get_layer_specs
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.errors import ImportFailed, UsageError

FLOAT = TensorProto.FLOAT
TakenApart = Callable[..., dict[str, Layer]]


def ends(layer: Layer) -> list[str]:
    return [str(spec) for side in get_layer_specs(layer) for spec in side]


def operators(layer: Layer) -> list[str]:
    return [one.op_type for one in onnx.load(layer.path).graph.node]


def test_layers_split_plain_model_by_node(isolated: Isolated, context: dict[str, Any]) -> None:
    layers = extract_layers(import_model(DIGITS / "digits_cnn.onnx", isolated=isolated), **context)
    assert [layer.name for layer in layers] == [
        "Conv_conv1", "Relu_relu1", "MaxPool_pool1", "Conv_conv2", "Relu_relu2", "MaxPool_pool2", "Flatten_flatten",
        "Gemm_fc1",
    ]  # fmt: skip
    assert [layer.depth for layer in layers] == list(range(8))
    assert layers[0].nodes == ("conv1",) and layers[0].op == "Conv"
    assert ends(layers[0]) == ["image: 1x1x8x8 float32", "conv1.out: 1x16x8x8 float32"]


def test_layers_are_valid_models_with_static_shapes(taken_apart: TakenApart) -> None:
    for layer in taken_apart(residual_cnn()).values():
        onnx.checker.check_model(layer.path, full_check=True)
        assert all(spec.is_static for side in get_layer_specs(layer) for spec in side)


def test_layers_fuse_groups_like_compilers(taken_apart: TakenApart) -> None:
    layers = taken_apart(residual_cnn(), "fused")
    assert [layer.op for layer in layers.values()] == [
        "Conv+BatchNormalization+Relu", "Conv+Relu", "Conv+Add+Relu", "GlobalAveragePool", "Flatten",
        "MatMul+Add+Sigmoid",
    ]  # fmt: skip
    block = layers["Conv+Add+Relu_block_conv2"]
    assert block.nodes == ("block/conv2", "block/add", "block/relu2")
    assert block.inputs == ("r2", "r1") and block.outputs == ("r3",)


def test_layers_do_not_fuse_value_used_twice(taken_apart: TakenApart) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], "conv"),
        node("Relu", ["c"], ["r"], "relu"),
        node("Mul", ["c", "r"], ["y"], "gate"),
    ]
    shape = (1, 2, 4, 4)
    weight = np.ones((2, 2, 1, 1), np.float32)
    assert list(taken_apart(model_of(nodes, [("x", FLOAT, shape)], [("y", FLOAT, shape)], {"w": weight}), "fused")) == [
        "Conv_conv", "Relu_relu", "Mul_gate",
    ]  # fmt: skip


def test_layers_keep_quantize_nodes_with_operator(isolated: Isolated, context: dict[str, Any]) -> None:
    model = import_model(DIGITS / "digits_cnn_int8.onnx", isolated=isolated)
    for group in ("node", "fused"):
        layers = {layer.name: layer for layer in extract_layers(model, group=group, **context)}
        conv = layers["DequantizeLinear+Conv+QuantizeLinear_conv2"]
        assert operators(conv).count("DequantizeLinear") == 3  # the value, the weight and the bias
        assert ends(conv) == [
            "pool1.out_QuantizeLinear_Output: 1x16x4x4 int8",
            "relu2.out_QuantizeLinear_Output: 1x32x4x4 int8",
        ]
        assert ends(layers["DequantizeLinear+Gemm+QuantizeLinear+DequantizeLinear_fc1"])[-1] == "logits: 1x10 float32"
        # The weights remain int8: extraction does not dequantize them.
        assert {tensor.data_type for tensor in onnx.load(conv.path).graph.initializer} >= {TensorProto.INT8}


def test_layers_repeat_shared_dequantize_in_each_user(taken_apart: TakenApart) -> None:
    scale = {"scale": np.float32(0.1), "zero": np.int8(3)}
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["q"], "q"),
        node("DequantizeLinear", ["q", "scale", "zero"], ["d"], "d"),
        node("Relu", ["d"], ["r"], "relu"),
        node("QuantizeLinear", ["r", "scale", "zero"], ["rq"], "rq"),
        node("DequantizeLinear", ["rq", "scale", "zero"], ["rd"], "rd"),
        node("Add", ["rd", "d"], ["y"], "add"),
    ]
    layers = taken_apart(model_of(nodes, [("x", FLOAT, (4,))], [("y", FLOAT, (4,))], scale))
    assert {name: layer.nodes for name, layer in layers.items()} == {
        "QuantizeLinear_q": ("q",),
        "DequantizeLinear+Relu+QuantizeLinear_relu": ("d", "relu", "rq"),
        "DequantizeLinear+Add_add": ("d", "rd", "add"),
    }
    assert layers["DequantizeLinear+Add_add"].inputs == ("q", "rq")


def test_layers_keep_activation_in_quantized_operator(taken_apart: TakenApart) -> None:
    constants = {"scale": np.float32(0.1), "zero": np.int8(0), "w": np.ones((4, 4), np.float32)}
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["q"], "q"),
        node("DequantizeLinear", ["q", "scale", "zero"], ["d"], "d"),
        node("MatMul", ["d", "w"], ["m"], "product"),
        node("Relu", ["m"], ["r"], "relu"),
        node("QuantizeLinear", ["r", "scale", "zero"], ["y"], "rq"),
    ]
    layers = taken_apart(model_of(nodes, [("x", FLOAT, (2, 4))], [("y", TensorProto.INT8, (2, 4))], constants))
    assert list(layers) == ["QuantizeLinear_q", "DequantizeLinear+MatMul+Relu+QuantizeLinear_product"]


def test_layers_fold_constants_and_drop_dead_nodes(taken_apart: TakenApart) -> None:
    layers = taken_apart(folded())
    assert list(layers) == ["MatMul_product", "Identity_same"]
    product = onnx.load(layers["MatMul_product"].path).graph
    (weight,) = map(numpy_helper.to_array, product.initializer)
    constant = next(item for item in folded().graph.node if item.op_type == "Constant")
    np.testing.assert_array_equal(weight, numpy_helper.to_array(constant.attribute[0].t).T * np.float32(0.5))


def test_layers_fold_shapes_of_fixed_dimensions(imported: Any, context: dict[str, Any]) -> None:
    fixed = extract_layers(imported(dynamic_batch(), N=5), **context)
    assert [layer.op for layer in fixed] == ["Relu", "Reshape", "MatMul"]
    assert ends(fixed[1]) == ["r: 5x3x4 float32", "flat: 5x12 float32"]
    from_inputs = extract_layers(imported(dynamic_batch()), inputs={"x": np.zeros((5, 3, 4), np.float32)}, **context)
    assert [ends(layer) for layer in from_inputs] == [ends(layer) for layer in fixed]


def test_layers_keep_open_dimensions(imported: Any, context: dict[str, Any]) -> None:
    layers = {layer.op: layer for layer in extract_layers(imported(dynamic_batch()), **context)}
    assert ends(layers["Relu"]) == ["x: Nx3x4 float32", "r: Nx3x4 float32"]
    assert "Gather" in layers


def test_layers_get_shapes_from_run(taken_apart: TakenApart) -> None:
    layers = taken_apart(of_onnxruntime_alone())
    assert ends(layers["FusedMatMul_fused"]) == ["x: 2x3 float32", "h: 2x4 float32"]
    assert ends(layers["Relu_act"]) == ["h: 2x4 float32", "r: 2x4 float32"]


def test_layers_keep_data_dependent_shapes_open(taken_apart: TakenApart) -> None:
    inputs, outputs = get_layer_specs(taken_apart(indices_of_nonzero())["Cast_cast"])
    assert inputs[0].shape[0] == 2 and not isinstance(inputs[0].shape[1], int)
    assert not outputs[0].is_static


def test_layers_mark_repeats_despite_weights_and_names(taken_apart: TakenApart) -> None:
    layers = taken_apart(repeated())
    same = {name: layer.same_as for name, layer in layers.items() if layer.same_as}
    assert same == {
        "MatMul_MatMul_2": "MatMul_MatMul_0",
        "MatMul_MatMul_4": "MatMul_MatMul_0",
        "LeakyRelu_LeakyRelu_3": "LeakyRelu_LeakyRelu_1",
        "LeakyRelu_LeakyRelu_5": "LeakyRelu_LeakyRelu_1",
    }
    # Another slope, other bounds of a slice: those are other layers.
    assert {"LeakyRelu_LeakyRelu_6", "Slice_Slice_7", "Slice_Slice_8"} <= set(layers)


def copies(layers: dict[str, Layer]) -> dict[str, str]:
    return {name: layer.copy_of for name, layer in layers.items() if layer.copy_of}


def two_products(second: np.ndarray, taken: str = "x") -> onnx.ModelProto:
    """Return two MatMuls of the same shape, each followed by a Relu."""
    nodes = [
        node("MatMul", ["x", "w1"], ["a"], "first"),
        node("Relu", ["a"], ["b"], "first_relu"),
        node("MatMul", [taken, "w2"], ["c"], "second"),
        node("Relu", ["c"], ["d"], "second_relu"),
    ]
    outputs = [(name, FLOAT, (2, 4)) for name in ("b", "d")]
    return model_of(nodes, [("x", FLOAT, (2, 4))], outputs, {"w1": weights(4, 4), "w2": second})


def test_layers_with_same_weights_and_inputs_are_copies(taken_apart: TakenApart) -> None:
    expected = {"MatMul_second": "MatMul_first", "Relu_second_relu": "Relu_first_relu"}
    assert copies(taken_apart(two_products(weights(4, 4)))) == expected


@pytest.mark.parametrize("large", [False, True])
def test_layers_with_other_weights_are_not_copies(taken_apart: TakenApart, large: bool) -> None:
    second = weights(4, 4) * np.float32(1e30) if large else np.nextafter(weights(4, 4), np.float32(1))
    layers = taken_apart(two_products(second))
    assert layers["MatMul_second"].same_as == "MatMul_first" and not copies(layers)


@pytest.mark.parametrize("taken", ["a", "b"])
def test_layers_with_other_inputs_are_not_copies(taken_apart: TakenApart, taken: str) -> None:
    layers = taken_apart(two_products(weights(4, 4), taken))
    assert layers["MatMul_second"].same_as == "MatMul_first" and not copies(layers)


def test_random_layers_are_not_copies(taken_apart: TakenApart) -> None:
    nodes = [
        node("RandomNormalLike", ["x"], ["a"], "one"),
        node("RandomNormalLike", ["x"], ["b"], "two"),
        node("Neg", ["a"], ["c"], "neg_one"),
        node("Neg", ["b"], ["d"], "neg_two"),
    ]
    layers = taken_apart(model_of(nodes, [("x", FLOAT, (2,))], [(name, FLOAT, (2,)) for name in ("c", "d")]))
    assert layers["Neg_neg_two"].same_as == "Neg_neg_one" and not copies(layers)


def test_layers_with_other_large_constants_are_not_copies(taken_apart: TakenApart) -> None:
    """Layer signatures omit long integer constants and constants of subgraphs."""

    def body(name: str, value: float) -> onnx.GraphProto:
        held = numpy_helper.from_array(np.full(100, value, np.float32), f"{name}.held")
        output = onnx.helper.make_tensor_value_info(f"{name}.out", FLOAT, (100,))
        return onnx.helper.make_graph([node("Neg", [f"{name}.held"], [f"{name}.out"])], name, [], [output], [held])

    nodes = [
        node("Gather", ["x", "up"], ["a"], "up"),
        node("Gather", ["x", "down"], ["b"], "down"),
        node("If", ["flag"], ["c"], "if_one", then_branch=body("t1", 1), else_branch=body("e1", 2)),
        node("If", ["flag"], ["d"], "if_two", then_branch=body("t2", 1), else_branch=body("e2", 3)),
    ]
    order = np.arange(100, dtype=np.int64)
    inputs = [("x", FLOAT, (100,)), ("flag", TensorProto.BOOL, ())]
    outputs = [(name, FLOAT, (100,)) for name in "abcd"]
    layers = taken_apart(model_of(nodes, inputs, outputs, {"up": order, "down": order[::-1].copy()}))
    assert layers["Gather_down"].same_as == "Gather_up" and layers["If_if_two"].same_as == "If_if_one"
    assert not copies(layers)


def scaled(first: np.ndarray, second: np.ndarray) -> onnx.ModelProto:
    """The same value quantised in two ways."""
    nodes = [
        node("QuantizeLinear", ["x", "scale1"], ["y1"], "one", axis=0),
        node("QuantizeLinear", ["x", "scale2"], ["y2"], "two", axis=0),
    ]
    outputs = [(name, TensorProto.UINT8, (2, 3)) for name in ("y1", "y2")]
    return model_of(nodes, [("x", FLOAT, (2, 3))], outputs, {"scale1": first, "scale2": second})


def test_same_layer_ignores_scale_value_but_not_shape(taken_apart: TakenApart) -> None:
    one, two, each = np.float32(0.1), np.float32(0.2), np.array([0.1, 0.2], np.float32)
    assert taken_apart(scaled(one, two))["QuantizeLinear_two"].same_as == "QuantizeLinear_one"
    assert taken_apart(scaled(one, each))["QuantizeLinear_two"].same_as == ""


def test_same_layer_compares_constants_of_operators(taken_apart: TakenApart) -> None:
    nodes = [node("Pow", ["x", "two"], ["a"], "square"), node("Pow", ["a", "half"], ["y"], "root")]
    constants = {"two": np.float32(2), "half": np.float32(0.5)}
    layers = taken_apart(model_of(nodes, [("x", FLOAT, (2,))], [("y", FLOAT, (2,))], constants))
    assert layers["Pow_root"].same_as == ""


@pytest.mark.parametrize(("number", "same_as"), [(1, "If_one"), (2, "")])
def test_same_layer_compares_constants_in_subgraphs(taken_apart: TakenApart, number: int, same_as: str) -> None:
    def choose(value: str, result: str, end: int, name: str) -> onnx.NodeProto:
        def branch(op: str) -> onnx.GraphProto:
            nodes = [
                node("Slice", [value, "from", "to"], [f"{name}.{op}.part"], f"{name}.{op}.slice"),
                node(op, [f"{name}.{op}.part"], [f"{name}.{op}.out"], f"{name}.{op}"),
            ]
            bounds = [numpy_helper.from_array(integers(to), place) for to, place in ((end - 1, "from"), (end, "to"))]
            outputs = [onnx.helper.make_tensor_value_info(f"{name}.{op}.out", FLOAT, (1,))]
            return onnx.helper.make_graph(nodes, f"{name}.{op}", [], outputs, bounds)

        return node("If", ["flag"], [result], name, then_branch=branch("Neg"), else_branch=branch("Relu"))

    nodes = [choose("x", "y", 1, "one"), choose("x", "z", number, "two")]
    inputs = [("x", FLOAT, (2,)), ("flag", TensorProto.BOOL, ())]
    layers = taken_apart(model_of(nodes, inputs, [("y", FLOAT, (1,)), ("z", FLOAT, (1,))]))
    assert layers["If_two"].same_as == same_as


def test_layers_report_random_numbers(taken_apart: TakenApart) -> None:
    layers = taken_apart(noisy())
    assert [name for name, layer in layers.items() if layer.by_chance] == [
        "RandomNormalLike_noise", "If_choose", "Dropout_drop",
    ]  # fmt: skip
    assert layers["Sum_sum"].inputs == ("a", "u", "d") and layers["If_choose"].inputs == ()


def test_layers_include_captured_values_of_subgraphs(taken_apart: TakenApart) -> None:
    layers = taken_apart(branches_and_loops())
    choose, repeat = layers["If_choose"], layers["Loop_repeat"]
    assert choose.inputs == ("positive", "h") and choose.outputs == ("chosen",)
    assert repeat.inputs == ("chosen", "h") and repeat.outputs == ("last", "every")
    # The layer contains a captured constant.
    assert [tensor.name for tensor in onnx.load(choose.path).graph.initializer] == ["two"]
    assert choose.depth == 2 and repeat.depth == 3


def test_layers_do_not_cut_sequences(taken_apart: TakenApart) -> None:
    layers = taken_apart(sequences())
    joined = layers["SequenceConstruct+SequenceInsert+ConcatFromSequence_pack"]
    assert joined.inputs == ("r", "x", "n")
    # Inputs of the group precede the group, although the model lists them between its nodes.
    assert list(layers).index("Neg_neg") < list(layers).index(joined.name)


def test_layers_keep_constant_sequences(taken_apart: TakenApart) -> None:
    one, three = taken_apart(constant_sequences()).values()
    assert operators(one)[0] == "SequenceEmpty" and operators(three)[0] == "SequenceConstruct"
    for layer in (one, three):
        onnx.checker.check_model(layer.path, full_check=True)


def test_layers_keep_optional_inputs_and_unused_outputs(taken_apart: TakenApart) -> None:
    layers = taken_apart(optional_and_split())
    assert layers["Split_split"].outputs == ("a", "b")
    assert list(onnx.load(layers["Split_split"].path).graph.node[0].output) == ["a", "b", "unused"]
    assert list(onnx.load(layers["Clip_clip"].path).graph.node[0].input) == ["x", "", "most"]
    assert layers["Add_double"].inputs == ("a",)


def test_layers_split_lstm_and_shared_weight(taken_apart: TakenApart) -> None:
    assert taken_apart(lstm())["LSTM_lstm"].outputs == ("all", "last")
    shared = taken_apart(shared_weight())
    assert [tensor.dims for tensor in onnx.load(shared["Gather_embed"].path).graph.initializer] == [[7, 4]]
    assert [tensor.dims for tensor in onnx.load(shared["MatMul_unembed"].path).graph.initializer] == [[4, 7]]


def test_layers_split_model_functions(taken_apart: TakenApart) -> None:
    layers = taken_apart(local_function())
    assert [layer.op for layer in layers.values()] == ["Mul", "Tanh", "Mul", "Tanh"]
    assert [bool(layer.same_as) for layer in layers.values()] == [False, False, True, True]


@pytest.mark.parametrize("names", [["/a/b", "/a b", "a_b"], ["日本", "ж", ""], ["x" * 300, "x" * 299]])
def test_layer_names_are_safe_and_unique(taken_apart: TakenApart, names: list[str]) -> None:
    values = ["x", *(f"v{number}" for number in range(len(names)))]
    nodes = [node("Relu", [values[i]], [values[i + 1]], name) for i, name in enumerate(names)]
    layers = taken_apart(model_of(nodes, [("x", FLOAT, (2,))], [(values[-1], FLOAT, (2,))]))
    assert len(layers) == len(names)
    for name in layers:
        assert name.startswith("Relu") and len(name) < 150
        assert all(char.isascii() and (char.isalnum() or char in "._+-") for char in name)


def test_layers_merge_interdependent_groups(taken_apart: TakenApart) -> None:
    """Two sequences, each of which the other's tensors go into: neither can be computed before the other."""
    nodes = [
        node("SequenceConstruct", ["x"], ["s1"], "s1"),
        node("SequenceConstruct", ["x"], ["s2"], "s2"),
        node("SequenceAt", ["s1", "first"], ["t1"], "t1"),
        node("SequenceAt", ["s2", "first"], ["t2"], "t2"),
        node("SequenceInsert", ["s1", "t2"], ["u1"], "u1"),
        node("SequenceInsert", ["s2", "t1"], ["u2"], "u2"),
        node("ConcatFromSequence", ["u1"], ["y1"], "y1", axis=0),
        node("ConcatFromSequence", ["u2"], ["y2"], "y2", axis=0),
    ]
    outputs = [("y1", FLOAT, (4,)), ("y2", FLOAT, (4,))]
    (layer,) = taken_apart(model_of(nodes, [("x", FLOAT, (2,))], outputs, {"first": np.int64(0)})).values()
    assert layer.inputs == ("x",) and layer.outputs == ("y1", "y2")


def test_layers_embed_external_weights(tmp_path: Path, isolated: Isolated, context: dict[str, Any]) -> None:
    path = tmp_path / "outside.onnx"
    onnx.save(residual_cnn(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    inside, outside = tmp_path / "inside.onnx", import_model(path, isolated=isolated)
    onnx.save(residual_cnn(), inside)
    assert len(outside.files) == 2
    mine, theirs = (extract_layers(model, **context) for model in (outside, import_model(inside, isolated=isolated)))
    for one, other in zip(mine, theirs, strict=True):
        # Each layer embeds its weights and needs no other file.
        assert import_model(one.path, isolated=isolated).files.keys() == {one.path.name}
        assert onnx.load(one.path).graph == onnx.load(other.path).graph


def test_layers_are_cached_by_model_dims_and_group(imported: Any, context: dict[str, Any]) -> None:
    model = imported(dynamic_batch(), N=2)
    first = extract_layers(model, **context)
    closed = Isolated(1)
    closed.close()
    without = {**context, "cache": Cache(context["cache"].root), "isolated": closed}
    assert extract_layers(model, **without) == first
    with pytest.raises(ImportFailed):
        extract_layers(imported(dynamic_batch(), N=3), **without)
    with pytest.raises(ImportFailed):
        extract_layers(model, group="fused", **without)


def test_layers_reject_unknown_group_and_other_formats(
    tmp_path: Path, imported: Any, context: dict[str, Any], isolated: Isolated
) -> None:
    with pytest.raises(UsageError, match="invalid group 'every'"):
        extract_layers(imported(lstm()), group="every", **context)
    path = tmp_path / "double.mlir"
    path.write_text("func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }")
    with pytest.raises(UsageError, match="expected ONNX or a format that converts to ONNX"):
        extract_layers(import_model(path, isolated=isolated), **context)
