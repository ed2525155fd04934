"""Random rounding by sum length, and planted faults that rounding does not explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from hil.compare.verdict import compare_output
from hil.controller.backends.references.noise import FAR, FAR_RUNS, RUNS, compute_noise, perturb_inputs
from hil.controller.backends.references.rounding import add_rounding
from hil.core.tensors import Array

RNG = np.random.default_rng(9)
EPS = float(np.finfo(np.float32).eps)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def graph(nodes: Sequence[Any], x: Array, rank: int, opset: int = 17, **weights: Array) -> onnx.ModelProto:
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
        for name, dims in (("x", x.shape), ("y", [None] * rank))
    ]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    made = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def run(model: onnx.ModelProto, x: Array) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    found: Array = ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]
    return found


def moves(model: onnx.ModelProto, x: Array, units: int = 1) -> Array:
    """Return the standard deviation of each element of the output, relative to the output's root mean square."""
    base = run(model, x)
    runs = []
    for seed in range(8):
        rounding = add_rounding(model, {"x": x.shape}, seed, units)
        assert rounding is not None
        runs.append(run(rounding, x).astype(np.float64) - base)
    return np.sqrt(np.mean(np.square(runs), axis=0)) / np.sqrt(np.mean(np.square(base.astype(np.float64))))


node = helper.make_node


@pytest.mark.parametrize("terms", [64, 4096])
def test_half_product_error_is_one_rounding(terms: int) -> None:
    """Operators sum in float32 and round the result once, so that the length of the sum does not count."""
    nodes = [node("Cast", ["x"], ["h"], to=TensorProto.FLOAT16), node("MatMul", ["h", "w"], ["m"])]
    nodes.append(node("Cast", ["m"], ["y"], to=TensorProto.FLOAT))
    x, w = floats(4, terms), floats(terms, 64).astype(np.float16)
    found = float(np.sqrt(np.mean(np.square(moves(graph(nodes, x, 2, w=w), x)))))
    unit = float(np.finfo(np.float16).eps) / 2 / np.sqrt(3)
    assert 0.5 * unit < found < 2 * unit


@pytest.mark.parametrize("terms", [64, 4096])
def test_product_error_grows_with_root_of_length(terms: int) -> None:
    x, w = floats(4, terms), floats(terms, 64)
    found = float(np.median(moves(graph([node("MatMul", ["x", "w"], ["y"])], x, 2, w=w), x)))
    unit = EPS / 2 / np.sqrt(3) * np.sqrt(terms)
    assert 1 * unit < found < 3 * unit


OPERATORS: dict[str, tuple[Any, Array, int, dict[str, Array], int]] = {
    "Gemm": (
        node("Gemm", ["x", "w", "b"], ["y"], transB=1),
        floats(8, 256),
        2,
        {"w": floats(9, 256), "b": floats(9)},
        256,
    ),
    "Conv": (node("Conv", ["x", "w"], ["y"]), floats(1, 32, 9, 9), 4, {"w": floats(8, 32, 3, 3)}, 288),
    "ConvTranspose": (
        node("ConvTranspose", ["x", "w"], ["y"]),
        floats(1, 32, 9, 9),
        4,
        {"w": floats(32, 8, 3, 3)},
        288,
    ),
    "ReduceMean": (node("ReduceMean", ["x"], ["y"], axes=[1]), floats(8, 1024), 2, {}, 1024),
    "GlobalAveragePool": (node("GlobalAveragePool", ["x"], ["y"]), floats(2, 8, 32, 32), 4, {}, 1024),
    "AveragePool": (node("AveragePool", ["x"], ["y"], kernel_shape=[8, 8]), floats(1, 2, 16, 16), 4, {}, 64),
    "Softmax": (node("Softmax", ["x"], ["y"]), floats(4, 1024), 2, {}, 1024),
    "LogSoftmax": (node("LogSoftmax", ["x"], ["y"]), floats(4, 1024), 2, {}, 1024),
    "ReduceL2": (node("ReduceL2", ["x"], ["y"], axes=[1]), floats(8, 1024), 2, {}, 1024),
    "LayerNormalization": (
        node("LayerNormalization", ["x", "s", "b"], ["y"]),
        floats(4, 1024),
        2,
        {"s": np.ones(1024, np.float32), "b": np.zeros(1024, np.float32)},
        1024,
    ),
    "Exp": (node("Exp", ["x"], ["y"]), floats(4, 64), 2, {}, 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_error_grows_with_sum_length(name: str) -> None:
    one, x, rank, weights, terms = OPERATORS[name]
    model = graph([one], x, rank, **weights)
    found, far = (float(np.sqrt(np.mean(np.square(moves(model, x, units))))) for units in (1, FAR))
    unit = EPS / 2 / np.sqrt(3) * np.sqrt(terms)
    assert 0.7 * unit < found < 4 * unit
    assert FAR / 2 < far / found < FAR * 2


def test_normalization_error_grows_with_mean() -> None:
    x = floats(1, 2, 32, 32)
    one = node("InstanceNormalization", ["x", "s", "b"], ["y"])
    weights = {"s": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}
    near, far = (float(np.median(moves(graph([one], shifted, 4, **weights), shifted))) for shifted in (x, x + 100))
    assert 20 < far / near < 200


def test_rounding_leaves_whole_numbers_and_infinities() -> None:
    x = np.array([[1, 2, -3, np.inf, -np.inf, 0, 0.3, np.nan]], np.float32)
    model = graph([node("Mul", ["x", "s"], ["y"])], x, 2, s=np.array(2, np.float32))
    rounding = add_rounding(model, {"x": x.shape}, 0, 100)
    assert rounding is not None
    found, base = run(rounding, x)[0], run(model, x)[0]
    assert np.array_equal(np.delete(found, 6), np.delete(base, 6), equal_nan=True) and found[6] != base[6]


def test_with_rounding_returns_none_without_rounding_operator() -> None:
    x = floats(2, 3)
    assert add_rounding(graph([node("Relu", ["x"], ["y"])], x, 2), {"x": x.shape}, 0, 1) is None
    assert add_rounding(graph([node("Exp", ["x"], ["y"])], x, 2, opset=8), {"x": x.shape}, 0, 1) is None


# --- planted faults

HIDDEN, WEIGHTS = 2048, floats(2048, 40)
BIAS = floats(40)
NODES = [
    node("MatMul", ["x", "w"], ["z"]),
    node("Add", ["z", "b"], ["u"]),
    node("Softmax", ["u"], ["p"], axis=-1),
    node("Mul", ["u", "p"], ["v"]),
    node("Add", ["u", "v"], ["y"]),
]
X = floats(6, HIDDEN)


def answer(x: Array = X, w: Array = WEIGHTS, b: Array = BIAS) -> Array:
    return run(graph(NODES, x, 2, w=w, b=b), x)


def changed(values: Array, place: Any, by: Callable[[Array], Any]) -> Array:
    found = values.copy()
    found[place] = by(found[place])
    return found


BASE = answer()
PLANTED: dict[str, Callable[[], Array]] = {
    "one element off by 1e-2": lambda: changed(BASE, (2, 3), lambda v: v * np.float32(1.01)),
    "the largest element off by 1e-3": lambda: changed(
        BASE, np.unravel_index(np.abs(BASE).argmax(), BASE.shape), lambda v: v * np.float32(1.001)
    ),
    "all off by 1e-3": lambda: BASE * np.float32(1.001),
    "column negated": lambda: changed(BASE, np.s_[:, 7], lambda v: -v),
    "row negated": lambda: changed(BASE, np.s_[3], lambda v: -v),
    "column zeroed": lambda: changed(BASE, np.s_[:, 0], lambda v: 0 * v),
    "two columns swapped": lambda: BASE[:, [1, 0, *range(2, 40)]],
    "rows rolled": lambda: np.roll(BASE, 1, axis=0),
    "columns rolled": lambda: np.roll(BASE, 1, axis=1),
    "reversed": lambda: BASE[:, ::-1],
    "first term missing": lambda: answer(changed(X, np.s_[:, 0], lambda v: 0 * v)),
    "last term missing": lambda: answer(changed(X, np.s_[:, -1], lambda v: 0 * v)),
    "last 16 terms missing": lambda: answer(changed(X, np.s_[:, -16:], lambda v: 0 * v)),
    "bias left out": lambda: answer(b=0 * BIAS),
    "bias twice": lambda: answer(b=2 * BIAS),
    "bias rolled": lambda: answer(b=np.roll(BIAS, 1)),
    "one weight negated": lambda: answer(w=changed(WEIGHTS, (5, 6), lambda v: -v)),
    "a row of weights swapped": lambda: answer(w=WEIGHTS[[1, 0, *range(2, HIDDEN)]]),
    "weights of half precision": lambda: answer(w=WEIGHTS.astype(np.float16).astype(np.float32)),
    "inputs of bfloat16": lambda: answer((X.view(np.uint32) & 0xFFFF0000).view(np.float32)),
    "softmax of the wrong axis": lambda: run(
        graph([*NODES[:2], node("Softmax", ["u"], ["p"], axis=0), *NODES[3:]], X, 2, w=WEIGHTS, b=BIAS), X
    ),
    "softmax left out": lambda: run(graph([*NODES[:2], node("Identity", ["u"], ["y"])], X, 2, w=WEIGHTS, b=BIAS), X),
    "constant": lambda: np.full_like(BASE, BASE.mean()),
    "noise of 1e-3": lambda: BASE * (1 + np.float32(1e-3) * floats(*BASE.shape)),
}


@pytest.fixture(scope="module")
def noise() -> Array:
    def runs(units: int, count: int) -> list[dict[str, Array]]:
        model = graph(NODES, X, 2, w=WEIGHTS, b=BIAS)
        moved = [perturb_inputs({"x": X}, seed, units)["x"] for seed in range(count)]
        models = [add_rounding(model, {"x": X.shape}, seed, units) for seed in range(count)]
        return [{"y": run(one, x)} for one, x in zip(models, moved, strict=True) if one is not None]

    return compute_noise({"y": BASE}, runs(1, RUNS), runs(FAR, FAR_RUNS))["y"]


@pytest.mark.parametrize("fault", PLANTED)
def test_rounding_does_not_explain_planted_fault(fault: str, noise: Array) -> None:
    found = compare_output("y", np.ascontiguousarray(PLANTED[fault]()), BASE, noise=noise)
    assert not found.passed and not found.blind, fault


def test_rounding_explains_other_summation_order(noise: Array) -> None:
    order = RNG.permutation(HIDDEN)
    sequential = np.cumsum(X[:, order, None] * WEIGHTS[None, order], axis=1, dtype=np.float32)[:, -1]
    rest = graph(NODES[1:], sequential, 2, b=BIAS)
    rest.graph.node[0].input[0] = "x"
    right = run(rest, sequential)
    assert right.tobytes() != BASE.tobytes() and not compare_output("y", right, BASE).passed
    assert compare_output("y", right, BASE, noise=noise).passed
