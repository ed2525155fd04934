"""Quantization steps of outputs, and the resulting tolerance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.flow_models import attention, residual_cnn
from support.models import DIGITS, save_model

from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.quanta import _find_steps, _Node, compute_quantum_atol, find_onnx
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext

FLOAT, INT8 = TensorProto.FLOAT, TensorProto.INT8
STATIC = Flow("static", "iree", recipe="static-int8", quanta=4)


@pytest.fixture
def context(cache: Cache, isolated: Isolated) -> RunContext:
    return RunContext(cache, isolated)


def chain(path: Path, *nodes: tuple[str, list[str], str], out: tuple[str, int] = ("y", FLOAT)) -> Path:
    """A model of these operators on x [4], with scale s = 0.5, another t = 0.125, zero points z and int8 weights w."""
    constants = [
        numpy_helper.from_array(np.float32(0.5), "s"),
        numpy_helper.from_array(np.float32(0.125), "t"),
        numpy_helper.from_array(np.int8(0), "z"),
        numpy_helper.from_array(np.array([1, 2, 3, 4], np.int8), "w"),
    ]
    made = [helper.make_node(op, inputs, [output], output) for op, inputs, output in nodes]
    return save_model(path, made, [("x", FLOAT, [4])], [(*out, [4])], constants)


QUANTISED = (("QuantizeLinear", ["x", "s", "z"], "a"), ("DequantizeLinear", ["a", "s", "z"], "b"))
LAYER = (*QUANTISED, ("Relu", ["b"], "c"), ("QuantizeLinear", ["c", "t", "z"], "d"))


@pytest.mark.parametrize(
    ("nodes", "out", "step", "roundings", "integer"),
    [
        ((*LAYER, ("DequantizeLinear", ["d", "t", "z"], "y")), "y", 0.125, 1, False),
        # data movement keeps the step
        ((*LAYER, ("DequantizeLinear", ["d", "t", "z"], "e"), ("Identity", ["e"], "y")), "y", 0.125, 1, False),
        # a float output takes the largest step of its inputs
        ((*LAYER, ("DequantizeLinear", ["d", "t", "z"], "e"), ("Add", ["e", "b"], "y")), "y", 0.5, 1, False),
        (LAYER, "d", 1, 1, True),
        (QUANTISED, "b", 0.5, 1, False),
    ],
)
def test_find_onnx_returns_step_of_output(tmp_path: Path, nodes, out: str, step: float, roundings: int, integer: bool):
    path = chain(tmp_path / "m.onnx", *nodes, out=(out, INT8 if integer else FLOAT))
    assert find_onnx(str(path)) == [{"name": out, "step": step, "roundings": roundings, "integer": integer}]


def test_find_onnx_ignores_quantized_weights(tmp_path: Path):
    path = chain(tmp_path / "m.onnx", ("DequantizeLinear", ["w", "s", "z"], "f"), ("Mul", ["x", "f"], "y"))
    assert find_onnx(str(path)) == []


@pytest.mark.ci
def test_quantum_atol_multiplies_step_by_roundings(context: RunContext, tmp_path: Path):
    def atol(path: Path, quanta: float) -> float | None:
        return compute_quantum_atol(Flow("f", "iree", quanta=quanta), path, context, tmp_path / "log")

    layer = chain(tmp_path / "layer.onnx", *LAYER, ("DequantizeLinear", ["d", "t", "z"], "y"))
    assert atol(layer, 4) == 0.125
    assert atol(layer, 0.5) == 0.0625
    assert atol(layer, 0) == 0
    (found,) = find_onnx(str(DIGITS / "digits_cnn_int8.onnx"))
    assert found["roundings"] > 4
    assert atol(DIGITS / "digits_cnn_int8.onnx", 4) == 4 * found["step"]


def test_quantum_atol_of_unquantized_model_returns_none(context: RunContext, tmp_path: Path):
    assert compute_quantum_atol(STATIC, DIGITS / "digits_cnn.onnx", context, tmp_path / "log") is None
    plain = Flow("plain", "iree")
    assert compute_quantum_atol(plain, DIGITS / "digits_cnn_int8.onnx", context, tmp_path / "log") is None


@pytest.mark.ci
@pytest.mark.parametrize("make", [residual_cnn, attention])
def test_quantized_network_step_matches_output_range(context: RunContext, tmp_path: Path, make):
    path = apply_recipe(STATIC, make(tmp_path / "m.onnx"), [], context, tmp_path / "log")
    (found,) = find_onnx(str(path))
    assert 1 / 255 < found["step"] < 10 / 255
    assert compute_quantum_atol(STATIC, path, context, tmp_path / "log") == 4 * found["step"]


def test_integer_outputs_of_pt2_have_unit_step() -> None:
    makers = {"q": _Node(["x"], quantises=True, rounds=True)}
    assert _find_steps(makers, {"y": "q"}, integers=False) == []
    assert _find_steps(makers, {"y": "q"}, integers=True) == [
        {"name": "y", "step": 1.0, "roundings": 1, "integer": True}
    ]
