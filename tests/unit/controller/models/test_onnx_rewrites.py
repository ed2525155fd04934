from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hil.controller.models.onnx_files.onnx_rewrites import get_opset, list_needed_rewrites, name_nodes, rewrite_model
from hil.controller.models.onnx_files.rewrite_check import find_difference, run_plainly
from hil.formats.onnx_functions import inline_functions

FLOAT = TensorProto.FLOAT


def net(nodes: Any, opset: int, constants: dict[str, Any] | None = None, functions: Any = (), size: Any = (1, 2, 5, 6)):
    """A model from x of this size to y."""
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()]
    x, y = helper.make_tensor_value_info("x", FLOAT, size), helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph(nodes, "net", [x], [y], held)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=8)


def change(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    """Return the differences that ONNX Runtime finds on random values."""
    size = [dim.dim_value for dim in before.graph.input[0].type.tensor_type.shape.dim]
    given = {"x": np.random.default_rng(0).standard_normal(size).astype(np.float32)}
    answers = [run_plainly(model.SerializeToString(), Path(), given) for model in (before, after)]
    assert answers[0] is not None and answers[1] is not None
    return find_difference(*answers)


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(model.SerializeToString())


def converted(model: onnx.ModelProto) -> onnx.ModelProto:
    return rewrite_model(copy_of(model))


@pytest.mark.parametrize(
    ("op", "opset", "attributes"),
    [
        *((op, opset, {}) for op in ("Hardmax", "Softmax", "LogSoftmax") for opset in (7, 9, 11, 12)),
        *(("Hardmax", 11, {"axis": axis}) for axis in (-3, -1, 0, 2, 3)),
        ("Clip", 7, {"min": -0.5}),
        ("Slice", 9, {"starts": [1], "ends": [-1], "axes": [3]}),
        ("Pad", 7, {"pads": [0, 0, 1, 0, 0, 0, 0, 2], "value": 1.5}),
        ("ReduceSum", 11, {"axes": [1, -1], "keepdims": 0}),
        ("AveragePool", 7, {"kernel_shape": [3, 3], "pads": [1, 1, 0, 0]}),
        ("Unsqueeze", 11, {"axes": [0, -1]}),
    ],
)
def test_conversion_preserves_operator_results(op: str, opset: int, attributes: dict[str, Any]) -> None:
    model = net([helper.make_node(op, ["x"], ["y"], **attributes)], opset)
    made = converted(model)
    assert get_opset(made) == 17 and change(model, made) == ""


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize(
    ("op", "opset", "scales"),
    [
        ("Resize", 10, [1, 1, 2, 3]),
        ("Resize", 10, [1, 1, 1.5, 1.7]),
        ("Resize", 10, [1, 1, 0.5, 0.7]),
        ("Upsample", 9, [1, 1, 2, 3]),
        ("Upsample", 9, [1, 1, 1.5, 1.7]),
    ],
)
def test_conversion_preserves_resize_results(op: str, opset: int, scales: list[float], mode: str) -> None:
    node = helper.make_node(op, ["x", "s"], ["y"], name="zoom", mode=mode)
    model = net([node], opset, {"s": np.array(scales, np.float32)})
    made = converted(model)
    assert get_opset(made) == 17 and change(model, made) == ""
    assert "zoom" in [node.name for node in made.graph.node]


@pytest.mark.parametrize("constants", [{}, {"s": np.array([1, 1, 2, 0.5], np.float32)}], ids=["unknown", "both ways"])
def test_conversion_skips_inexpressible_resize(constants: dict[str, Any]) -> None:
    scales = helper.make_node("Add", ["s0", "s0"], ["s"])
    nodes = [*([] if constants else [scales]), helper.make_node("Resize", ["x", "s"], ["y"], name="zoom")]
    model = net(nodes, 10, constants or {"s0": np.array([0.5, 0.5, 1, 1], np.float32)})
    made = converted(model)
    assert get_opset(made) == 10 and change(model, made) == ""


def test_conversion_includes_subgraphs() -> None:
    out = helper.make_tensor_value_info("z", FLOAT, (2, 3, 4))
    branches = {
        name: helper.make_graph([helper.make_node(op, ["x"], ["z"])], name, [], [out])
        for name, op in (("then_branch", "Hardmax"), ("else_branch", "Identity"))
    }
    nodes = [helper.make_node("If", ["yes"], ["y"], **branches)]
    model = net(nodes, 11, {"yes": np.array(True)}, size=(2, 3, 4))
    made = converted(model)
    assert get_opset(made) == 17 and change(model, made) == ""


def test_conversion_of_unchanged_operators_sets_opset_only() -> None:
    model = net([helper.make_node("Relu", ["x"], ["h"], name="a"), helper.make_node("Neg", ["h"], ["y"], name="b")], 9)
    made = converted(model)
    assert list_needed_rewrites(model) == [] and get_opset(made) == 17
    assert list(made.graph.node) == list(model.graph.node)


def test_needed_rewrites_names_versions_and_inliner() -> None:
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    function = helper.make_function("own", "F", ["x"], ["y"], relu, [helper.make_opsetid("", 13)])
    call = helper.make_node("F", ["x"], ["y"], domain="own")
    assert list_needed_rewrites(net([helper.make_node("Clip", ["x"], ["y"], min=0.0)], 10)) == [
        "onnx.version_converter 10 -> 17"
    ]
    assert list_needed_rewrites(net([call], 13, functions=[function])) == ["onnx.inliner"]
    assert list_needed_rewrites(net([helper.make_node("Clip", ["x"], ["y"])], 18)) == []


def leaky(name: str, default: float) -> onnx.FunctionProto:
    """A function whose slope is an attribute with a default."""
    node = helper.make_node("LeakyRelu", ["x"], ["y"])
    node.attribute.append(onnx.AttributeProto(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="slope"))
    opsets = [helper.make_opsetid("", 17)]
    slope = helper.make_attribute("slope", default)
    return helper.make_function("own", name, ["x"], ["y"], [node], opsets, attribute_protos=[slope])


def call(name: str, given: str = "x", made: str = "y", **attributes: float) -> onnx.NodeProto:
    return helper.make_node(name, [given], [made], domain="own", **attributes)


def outer(*, passes_on: bool) -> onnx.FunctionProto:
    """Return a function that calls the other function, with or without its attribute."""
    inner = call("Leaky")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    if not passes_on:
        return helper.make_function("own", "Outer", ["x"], ["y"], [inner], opsets)
    inner.attribute.append(onnx.AttributeProto(name="slope", type=onnx.AttributeProto.FLOAT, ref_attr_name="steep"))
    steep = helper.make_attribute("steep", 0.75)
    return helper.make_function("own", "Outer", ["x"], ["y"], [inner], opsets, attribute_protos=[steep])


@pytest.mark.parametrize(
    ("nodes", "functions", "slope"),
    [
        ([call("Leaky")], [leaky("Leaky", 0.25)], 0.25),
        ([call("Leaky", slope=0.5)], [leaky("Leaky", 0.25)], 0.5),
        ([call("Outer")], [leaky("Leaky", 0.25), outer(passes_on=False)], 0.25),
        ([call("Outer")], [leaky("Leaky", 0.25), outer(passes_on=True)], 0.75),
        ([call("Outer", steep=0.5)], [leaky("Leaky", 0.25), outer(passes_on=True)], 0.5),
        ([call("Leaky", made="h"), call("Leaky", given="h", slope=0.5)], [leaky("Leaky", 0.25)], 0.125),
    ],
)
def test_inlining_preserves_attribute_defaults(nodes: Any, functions: Any, slope: float) -> None:
    model = net(nodes, 17, functions=functions)
    before = copy_of(model)
    made = inline_functions(model)
    assert model == before, "the model itself stays as it is"
    assert {node.op_type for node in made.graph.node} == {"LeakyRelu"} and not made.functions
    assert change(model, made) == ""
    slopes = [helper.get_node_attr_value(node, "alpha") for node in made.graph.node]
    assert np.prod(slopes) == pytest.approx(slope)


def test_name_nodes_makes_names_unique() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"], name="n"), helper.make_node("Relu", ["a"], ["b"], name="n")]
    model = net([*nodes, helper.make_node("Neg", ["b"], ["y"])], 17)
    name_nodes(model)
    assert [node.name for node in model.graph.node] == ["n", "n_1", "Neg_2"]
