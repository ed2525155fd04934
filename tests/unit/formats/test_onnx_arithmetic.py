"""Every class of operators, rewritten for an arithmetic, matches the prediction for this arithmetic."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.operator_classes import OPERATOR_CLASSES, model_of, predict, run_onnx

from hil.formats.onnx_arithmetic import rewrite

ARITHMETICS = ["float16", "bfloat16", "int8"]


def rms(array):
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("name", OPERATOR_CLASSES)
def test_rewrite_error_matches_predicted_arithmetic(name, arithmetic):
    one = OPERATOR_CLASSES[name]
    model = one.model()
    exact = run_onnx(model, one.inputs)
    rewritten = rewrite(model, arithmetic)
    onnx.checker.check_model(rewritten, full_check=True)
    predicted, answer = predict(one, arithmetic), run_onnx(rewritten, one.inputs)
    if arithmetic == "int8" and not one.contracts:
        np.testing.assert_array_equal(answer, exact)
        return
    # Another order of summation may move a value to the adjacent step, which is no more than rounding does.
    moved = rms(predicted - exact)
    assert moved > 30 * np.finfo(np.float32).eps * rms(exact)
    assert rms(answer - predicted) < 0.3 * moved


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_rewrite_output_independent_of_optimization(arithmetic):
    one = OPERATOR_CLASSES["attention"]
    rewritten = rewrite(one.model(), arithmetic)
    plain = run_onnx(rewritten, one.inputs, optimized=False)
    np.testing.assert_allclose(run_onnx(rewritten, one.inputs), plain, rtol=1e-5, atol=1e-6)


def test_rewrite_rounds_inside_subgraphs():
    def branch(name, factor):
        nodes = [
            helper.make_node("Constant", [], [f"{name}_c"], value=numpy_helper.from_array(np.float32(factor))),
            helper.make_node("Mul", ["x", f"{name}_c"], [f"{name}_y"]),
        ]
        output = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [4])
        return helper.make_graph(nodes, name, [], [output])

    nodes = (
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=branch("a", 1.001), else_branch=branch("b", 3.3)),
    )
    x = np.array([1.0001, 2.0003, 0.3, 0.7], np.float32)
    model = model_of(nodes, {"x": x}, {"zero": np.float32(0).reshape(())})
    half = np.float16
    wanted = (x.astype(half).astype(np.float32) * np.float32(half(1.001))).astype(half).astype(np.float32)
    np.testing.assert_array_equal(run_onnx(rewrite(model, "float16"), {"x": x}), wanted)


def test_rewrite_leaves_resize_scales_unchanged():
    scales = np.array([1, 1, 1.2003, 1.2003], np.float32)
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear")
    x = np.ones((1, 1, 10, 10), np.float32)
    rewritten = rewrite(model_of((node,), {"x": x}, {"scales": scales}), "bfloat16")
    assert [numpy_helper.to_array(one).tolist() for one in rewritten.graph.initializer] == [scales.tolist()]
    assert run_onnx(rewritten, {"x": x}).shape == (1, 1, 12, 12)


def test_rewrite_saturates_weights_but_not_infinities():
    weights = np.array([-3e38, 70000.0, np.inf, 1.0], np.float32)
    model = model_of((helper.make_node("Add", ["x", "w"], ["y"]),), {"x": np.zeros(4, np.float32)}, {"w": weights})
    (tensor,) = rewrite(model, "float16").graph.initializer
    assert numpy_helper.to_array(tensor).tolist() == [-65504.0, 65504.0, np.inf, 1.0]


def test_rewrite_leaves_integers_unchanged():
    node = helper.make_node("ArgMax", ["x"], ["i"], axis=1, keepdims=0)
    model = model_of((node,), {"x": np.eye(4, dtype=np.float32)}, {})
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    assert run_onnx(rewrite(model, "bfloat16"), {"x": np.eye(4, dtype=np.float32)}).tolist() == [0, 1, 2, 3]
