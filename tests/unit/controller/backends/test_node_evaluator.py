"""Runs with recorded decisions follow the recorded path or fail."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.operator_classes import model_of

from hil.controller.backends.references.control import run_controls
from hil.controller.backends.references.runners.node_evaluator import Decisions
from hil.errors import ReferenceFailed

# Rounds to 1 in float32, and to 0 in float16, where the value is 0.5.
X = {"x": np.array([0.50001, 2.3], np.float32)}


def branch(*kinds: str):
    nodes = []
    value = "x"
    for number, kind in enumerate(kinds):
        nodes.append(helper.make_node(kind, [value], [f"{kind}{number}"]))
        value = f"{kind}{number}"
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info(value, TensorProto.FLOAT, [2])])


def model(then: tuple[str, ...], otherwise: tuple[str, ...]):
    """Return a model that branches on a quantized value, for which no decision is recorded."""
    nodes = (
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("Cast", ["q"], ["n"], to=TensorProto.INT32),
        helper.make_node("ReduceMin", ["n"], ["least"], keepdims=0),
        helper.make_node("Cast", ["least"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], then_branch=branch(*then), else_branch=branch(*otherwise)),
    )
    return model_of(nodes, X, {"scale": np.float32(1), "zero": np.int8(0)})


@pytest.mark.parametrize(
    ("then", "otherwise"),
    [(("Floor",), ("Identity",)), (("Identity", "Floor"), ("Floor", "Floor")), (("Floor",), ("Ceil",))],
    ids=["fewer decisions", "more decisions", "other operators"],
)
def test_replay_rejects_different_path_in_low_precision(then: tuple[str, ...], otherwise: tuple[str, ...]) -> None:
    with pytest.raises(ReferenceFailed, match="rounding changes the operators that the model runs"):
        run_controls(model(then, otherwise), X, "float16")


def test_replay_accepts_paths_without_decisions() -> None:
    assert "y" in run_controls(model(("Identity",), ("Neg",)), X, "float16")


def test_replay_rejects_operands_of_other_shape() -> None:
    node = helper.make_node("Floor", ["x"], ["y"])
    decisions = Decisions()
    decisions.decide(node, X, np.zeros(2, np.float32))
    held = decisions.replay()
    assert held.decide(node, X, np.ones(2, np.float32)).tolist() == [0, 0]
    with pytest.raises(ReferenceFailed):
        decisions.replay().decide(node, {"x": np.ones(3, np.float32)}, np.ones(3, np.float32))
    held.check_all_taken()
