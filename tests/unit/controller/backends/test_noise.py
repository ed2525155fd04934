"""How far rounding alone moves a reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model

from hil.controller.backends.references import expected_result, measure_noise, run_reference
from hil.controller.backends.references.noise import (
    largest_noise,
    noise_between,
    perturbed,
    telling_noise,
)
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.core.results import Noise


def test_every_float_moves_by_a_unit_of_its_eps_and_nothing_else_does():
    inputs = {
        "x": np.array([1, -2, 0, np.inf, np.nan], np.float32),
        "half": np.array([1000], np.float16),
        "z": np.array([1 + 1j]),
        "index": np.array([1, 2]),
        "text": np.array(["a"], object),
        "zeros": np.zeros(4, np.float32),
    }
    moved = perturbed(inputs, 0)
    assert set(moved) == set(inputs)
    assert all(moved[name] is inputs[name] for name in ("index", "text", "zeros"))
    ulps = np.abs(moved["x"][:2].view(np.int32) - inputs["x"][:2].view(np.int32))
    assert ulps.min() >= 1 and ulps.max() <= 2
    assert np.isinf(moved["x"][3]) and np.isnan(moved["x"][4])
    assert moved["half"].dtype == np.float16 and 0 < abs(float(moved["half"][0]) - 1000) <= 1
    assert moved["z"][0] != 1 + 1j
    again = perturbed(inputs, 0)
    assert all(again[name].tobytes() == moved[name].tobytes() for name in ("x", "half", "z"))
    assert perturbed(inputs, 3)["x"].tobytes() != perturbed(inputs, 4)["x"].tobytes()


def test_noise_is_the_largest_move_of_any_run():
    outputs = {"y": np.array([1e-3, 100], np.float32), "n": np.array([1, 2])}
    runs = [
        {"y": np.array([1e-3, 100 + 1e-4], np.float32), "n": np.array([1, 2])},
        {"y": np.array([2e-3, np.nan], np.float32), "n": np.array([1, 2])},
        {"y": np.array([5], np.float32)},
    ]
    found = noise_between(outputs, runs)
    assert set(found) == {"y"}
    assert found["y"].absolute == pytest.approx(1e-3)
    assert found["y"].beyond_rtol == pytest.approx(1e-3 - 1.3e-9)
    assert noise_between(outputs, []) == {}
    assert largest_noise([{"y": Noise(1, 2, 1)}, {}, {"y": Noise(2, 1, 2), "z": Noise(0, 0, 0)}]) == {
        "y": Noise(2, 2, 2),
        "z": Noise(0, 0, 0),
    }
    assert telling_noise(outputs, {"y": Noise(1e-9, 0.0, 1e-9)}) == {}
    assert telling_noise(outputs, found) == found


@pytest.fixture
def settings(tmp_path):
    with Isolated() as isolated:
        yield {
            "cache": Cache(tmp_path / "cache"),
            "isolated": isolated,
            "recompute": False,
            "timeout": 60.0,
            "log": tmp_path / "log.txt",
        }


def cancelling(path, operator="Sub"):
    """y = x - (x - tiny ...): what is left of a sum that cancels."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["rest"]),
        helper.make_node("ReduceSum", ["rest"], ["zero"], keepdims=0),
        helper.make_node("Relu", ["x"], ["same"]),
    ]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 1000]),
        helper.make_tensor_value_info("zero", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("same", TensorProto.FLOAT, [4, 1000]),
    ]
    graph = helper.make_graph(nodes, "cancelling", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9), path)
    return path


def test_what_cancels_is_noise_and_what_is_only_passed_on_is_not(tmp_path, settings):
    model = import_model(cancelling(tmp_path / "m.onnx"), isolated=settings["isolated"], cache=settings["cache"])
    inputs = {"x": np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)}
    result = run_reference("onnxruntime", model, inputs, **settings)
    found = measure_noise(model, inputs, result, **settings)
    assert found["zero"].absolute > abs(float(result.outputs["zero"])) / 8
    assert found["same"].beyond_rtol == 0 < found["same"].absolute < 1e-6
    assert set(telling_noise(result.outputs, found)) == {"zero"}
    # What a user expects has no noise of its own: the model's does.
    given = expected_result({"zero": np.zeros((), np.float32), "same": inputs["x"]}, model.outputs)
    assert measure_noise(model, inputs, given, **settings) == found
    assert measure_noise(model, {"x": np.zeros((4, 1000), np.float32)}, result, **settings) == {}, "no weights either"


def test_where_only_integers_go_in_the_weights_are_moved(tmp_path, settings):
    table = np.random.default_rng(1).standard_normal((50, 64)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["rows"], axis=0),
        helper.make_node("ReduceSum", ["rows"], ["y"], keepdims=0),
    ]
    values = [("x", TensorProto.INT64, [8])], [("y", TensorProto.FLOAT, [])]
    weights = [numpy_helper.from_array(table, "table")]
    path = save_model(tmp_path / "embedding.onnx", nodes, *values, weights)
    model = import_model(path, isolated=settings["isolated"], cache=settings["cache"])
    inputs = {"x": np.arange(8)}
    result = run_reference("onnxruntime", model, inputs, **settings)
    found = measure_noise(model, inputs, result, **settings)["y"]
    assert 0 < found.absolute < 1e-4
