"""Which nodes of an ONNX model draw random numbers, and which outputs depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from hil.controller.models.onnx_files.random_nodes import find_random_nodes

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
NORMAL = helper.make_node("RandomNormalLike", ["x"], ["r"], name="noise")
BRANCH = helper.make_graph([NORMAL], "branch", [], [helper.make_tensor_value_info("r", FLOAT, [4])])


def model_of(
    nodes: Sequence[Any], outputs: Sequence[str] = ("y",), *, functions: Sequence[Any] = (), **held: Any
) -> Any:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        list(nodes),
        "g",
        [value("x", FLOAT, [4])],
        [value(name, FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions)


def dropout(*inputs: str, **more: Any) -> Any:
    return helper.make_node("Dropout", ["x", *inputs], ["y"], name="drop", **more)


def function(name: str, inputs: Sequence[str], nodes: Sequence[Any]) -> Any:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, inputs, ["y"], nodes, opsets)


def constant(name: str, value: bool) -> Any:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value)))


RATIO, TRAINING, INFERENCE = np.float32(0.5), np.array(True), np.array(False)


@pytest.mark.parametrize(
    ("model", "label"),
    [
        (model_of([helper.make_node("RandomUniform", [], ["y"], shape=[4], seed=1.0)]), "y (RandomUniform)"),
        (model_of([helper.make_node("Bernoulli", ["x"], ["y"])]), "y (Bernoulli)"),
        (model_of([helper.make_node("Multinomial", ["x"], ["y"], name="draw")]), "draw (Multinomial)"),
        (model_of([dropout("ratio", "training")], ratio=RATIO, training=TRAINING), "drop (Dropout)"),
        (model_of([dropout("", "training")], training=TRAINING), "drop (Dropout)"),
        (model_of([dropout("", "flag"), constant("flag", True)][::-1]), "drop (Dropout)"),
        (
            model_of(
                [helper.make_node("If", ["c"], ["y"], name="choice", then_branch=BRANCH, else_branch=BRANCH)],
                c=np.array(True),
            ),
            "choice (If)",
        ),
        (
            model_of(
                [helper.make_node("Outer", ["x", "training"], ["y"], domain="own", name="call")],
                functions=[
                    function("Outer", ["x", "t"], [helper.make_node("Inner", ["x", "t"], ["y"], domain="own")]),
                    function("Inner", ["x", "t"], [helper.make_node("Dropout", ["x", "", "t"], ["y"])]),
                ],
                training=TRAINING,
            ),
            "call (Outer)",
        ),
    ],
    ids=["uniform", "bernoulli", "multinomial", "dropout", "no-ratio", "constant-node", "subgraph", "function"],
)
def test_random_nodes_finds_drawing_node(model, label):
    assert find_random_nodes(model) == {"nodes": [label], "outputs": ["y"]}


@pytest.mark.parametrize(
    "model",
    [
        model_of([dropout()]),
        model_of([dropout("ratio")], ratio=RATIO),
        model_of([dropout("ratio", "training")], ratio=RATIO, training=INFERENCE),
        model_of([dropout("ratio", "training")], ratio=np.float32(0), training=TRAINING),
        model_of([helper.make_node("RandomNormal", ["x"], ["y"], domain="own")]),
        model_of(
            [helper.make_node("Drop", ["x", "training"], ["y"], domain="own")],
            functions=[function("Drop", ["x", "t"], [helper.make_node("Dropout", ["x", "", "t"], ["y"])])],
            training=INFERENCE,
        ),
        # No output depends on the drawn numbers; at most on their shape.
        model_of([NORMAL, helper.make_node("Relu", ["x"], ["y"])]),
        model_of([NORMAL, helper.make_node("Shape", ["r"], ["y"])]),
    ],
    ids=["plain", "opset7", "inference", "ratio0", "own-domain", "function-inference", "unused", "shape"],
)
def test_random_nodes_ignores_deterministic_nodes(model):
    assert find_random_nodes(model) == {}


def test_random_nodes_names_dependent_outputs():
    nodes = [NORMAL, helper.make_node("Add", ["x", "r"], ["y"]), helper.make_node("Relu", ["x"], ["z"])]
    assert find_random_nodes(model_of(nodes, ["z", "y"])) == {"nodes": ["noise (RandomNormalLike)"], "outputs": ["y"]}


def test_random_nodes_accepts_recursive_functions():
    call = helper.make_node("Loops", ["x"], ["y"], domain="own")
    assert find_random_nodes(model_of([call], functions=[function("Loops", ["x"], [call])])) == {}
