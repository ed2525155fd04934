"""Simulated boards with a declared arithmetic: right models pass, and programs with a planted fault fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from onnx import helper
from support.operator_classes import model_of, run_onnx

from hil.compare.verdict import compare_output
from hil.controller.backends.references.control import run_controls
from hil.core.tensors import Array
from hil.formats.onnx_arithmetic import rewrite

ARITHMETICS = ["float16", "bfloat16", "int8"]
RNG = np.random.default_rng(11)
WEIGHTS: dict[str, Array] = {
    "w1": RNG.normal(size=(8, 3, 3, 3)).astype(np.float32),
    "b1": (2 + RNG.normal(size=8)).astype(np.float32),
    "w2": RNG.normal(size=(8, 8, 3, 3)).astype(np.float32) / 4,
    "w3": RNG.normal(size=(8, 12)).astype(np.float32),
    "b3": (5 * RNG.normal(size=12)).astype(np.float32),
}
INPUTS = {"x": RNG.normal(size=(4, 3, 8, 8)).astype(np.float32)}
# Place of the largest weight of the last layer.
LARGEST = np.unravel_index(np.abs(WEIGHTS["w3"]).argmax(), WEIGHTS["w3"].shape)
NODES = (
    helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], "conv1", pads=[1, 1, 1, 1]),
    helper.make_node("Relu", ["c1"], ["r1"], "relu1"),
    helper.make_node("Conv", ["r1", "w2"], ["c2"], "conv2", pads=[1, 1, 1, 1]),
    helper.make_node("Relu", ["c2"], ["r2"], "relu2"),
    helper.make_node("GlobalAveragePool", ["r2"], ["p"], "pool"),
    helper.make_node("Flatten", ["p"], ["f"], "flatten"),
    helper.make_node("Gemm", ["f", "w3", "b3"], ["y"], "fc"),
)


def answer(arithmetic: str, weights: dict[str, Array], nodes=NODES, inputs=INPUTS) -> Array:
    """Return the output of a simulated board with this arithmetic."""
    return run_onnx(rewrite(model_of(nodes, inputs, weights), arithmetic), inputs)


def with_weight(name: str, change: Callable[[Array], Array], arithmetic: str) -> Array:
    return answer(arithmetic, {**WEIGHTS, name: np.ascontiguousarray(change(WEIGHTS[name].copy()))})


def with_node(number: int, node, arithmetic: str) -> Array:
    return answer(arithmetic, WEIGHTS, (*NODES[:number], node, *NODES[number + 1 :]))


def set_part(index, value, array: Array) -> Array:
    array[index] = value(array[index])
    return array


def of_weight(name: str, change: Callable[[Array], Array]) -> Callable[[str], Array]:
    return partial(with_weight, name, change)


def of_node(number: int, kind: str, inputs, output: str, **attributes) -> Callable[[str], Array]:
    return partial(with_node, number, helper.make_node(kind, inputs, [output], "fault", **attributes))


FAULTS: dict[str, Callable[[str], Array]] = {
    "one weight negated": of_weight("w3", partial(set_part, LARGEST, np.negative)),
    "one filter negated": of_weight("w1", partial(set_part, 2, np.negative)),
    "filters swapped": of_weight("w1", lambda w: w[[1, 0, *range(2, 8)]]),
    "input channels swapped": of_weight("w1", lambda w: w[:, [1, 0, 2]]),
    "kernel flipped": of_weight("w1", lambda w: w[:, :, ::-1, ::-1]),
    "kernel transposed": of_weight("w2", lambda w: w.transpose(0, 1, 3, 2)),
    "weights transposed": of_weight("w2", lambda w: w.transpose(1, 0, 2, 3)),
    "bias of a convolution dropped": of_weight("b1", np.zeros_like),
    "bias of the last layer dropped": of_weight("b3", np.zeros_like),
    "one bias dropped": of_weight("b3", partial(set_part, int(np.abs(WEIGHTS["b3"]).argmax()), np.zeros_like)),
    "scale doubled": of_weight("w2", lambda w: 2 * w),
    "scale halved": of_weight("w3", lambda w: w / 2),
    "weights zeroed": of_weight("w2", np.zeros_like),
    "output channels rotated": of_weight("w3", lambda w: np.roll(w, 1, axis=1)),
    "input channels rotated": of_weight("w3", lambda w: np.roll(w, 1, axis=0)),
    "relu missing": of_node(3, "Identity", ["c2"], "r2"),
    "first relu missing": of_node(1, "Identity", ["c1"], "r1"),
    "other activation": of_node(3, "Sigmoid", ["c2"], "r2"),
    "sum instead of mean": of_node(4, "ReduceSum", ["r2", "axes"], "p"),
    "maximum instead of mean": of_node(4, "GlobalMaxPool", ["r2"], "p"),
    "padding off by one": of_node(2, "Conv", ["r1", "w2"], "c2", pads=[0, 0, 2, 2]),
    "stride ignored padding": of_node(0, "Conv", ["x", "w1", "b1"], "c1", pads=[0, 0, 0, 0]),
    "stale buffer": lambda arithmetic: answer(arithmetic, WEIGHTS, inputs={"x": INPUTS["x"][::-1].copy()}),
    "first row repeated": lambda arithmetic: np.repeat(answer(arithmetic, WEIGHTS)[:1], 4, axis=0),
    "softmax too many": lambda arithmetic: _softmax(answer(arithmetic, WEIGHTS)),
}
WEIGHTS["axes"] = np.array([2, 3])


def _softmax(array: Array) -> Array:
    powers = np.exp(array - array.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module", params=ARITHMETICS)
def judged(request):
    """Return a function that compares an output in this arithmetic."""
    model = model_of(NODES, INPUTS, WEIGHTS)
    reference = run_onnx(model, INPUTS, optimized=False)
    control = run_controls(model, INPUTS, request.param)["y"]
    return request.param, lambda given: compare_output("y", given, reference, control=control)


def test_right_program_passes(judged):
    arithmetic, judge = judged
    output = judge(answer(arithmetic, WEIGHTS))
    assert output.passed, output.reason
    assert output.control is not None, "the arithmetic makes a difference"


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_fails(judged, name):
    arithmetic, judge = judged
    output = judge(FAULTS[name](arithmetic))
    assert (output.passed, output.blind) == (False, False), f"{name} in {arithmetic}: {output.reason}"
