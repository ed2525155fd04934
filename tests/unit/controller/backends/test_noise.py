"""How far rounding alone moves a reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model

from hil.controller.backends import references
from hil.controller.backends.references import measure_noise, read_expected, run_reference
from hil.controller.backends.references.noise import (
    compute_noise,
    encode_noise,
    merge_noise,
    perturb_inputs,
    select_relevant_noise,
)
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, IsolatedTimeout


def test_perturbed_moves_floats_by_eps_and_preserves_the_rest():
    inputs = {
        "x": np.array([1.5, -2.25, 0, np.inf, np.nan], np.float32),
        "half": np.array([1000.5], np.float16),
        "z": np.array([1.5 + 1j]),
        "index": np.array([1, 2]),
        "text": np.array(["a"], object),
        "pixels": np.array([0, 17, 255], np.float32),
        "large": np.array([2.0**30], np.float32),
    }
    moved = perturb_inputs(inputs, 0)
    assert set(moved) == set(inputs)
    assert all(moved[name] is inputs[name] for name in ("index", "text", "pixels"))
    ulps = np.abs(moved["x"][:2].view(np.int32) - inputs["x"][:2].view(np.int32))
    assert ulps.min() >= 1 and ulps.max() <= 2
    assert np.isinf(moved["x"][3]) and np.isnan(moved["x"][4])
    assert moved["half"].dtype == np.float16 and 0 < abs(float(moved["half"][0]) - 1000.5) <= 1
    assert moved["z"][0] != 1.5 + 1j and moved["large"][0] != 2.0**30
    far = perturb_inputs(inputs, 0, 16)
    assert np.abs(far["x"][:2].view(np.int32) - inputs["x"][:2].view(np.int32)).min() >= 15
    again = perturb_inputs(inputs, 0)
    assert all(again[name].tobytes() == moved[name].tobytes() for name in ("x", "half", "z"))
    assert len({perturb_inputs(inputs, seed)["x"].tobytes() for seed in range(9)}) > 1


def sizes(found):
    return found["y"].astype(np.float64)


def test_noise_between_scales_largest_move():
    base = {"y": np.array([1, 100], np.float32), "n": np.array([1, 2])}
    near = [{"y": base["y"] + np.float32([1e-5, 0]), "n": base["n"]}, {"y": base["y"] + np.float32([0, 1e-4])}]
    far = [{"y": base["y"] + np.float32([16e-5, 16e-4])}]
    found = compute_noise(base, near, far)
    assert set(found) == {"y"}
    assert 8e-5 <= sizes(found)[0] <= 16e-5 * 1.1 and 8e-4 <= sizes(found)[1] <= 16e-4 * 1.1, "rounded up by at most 2"
    assert compute_noise(base, [], []) == {}
    assert compute_noise(base, [{"y": np.ones(3, np.float32)}], far) == {}, "of another shape"


def test_noise_of_jump_widens_single_element():
    y = np.linspace(10, 20, 64, dtype=np.float32)
    jump = np.zeros(64, np.float32)
    jump[5] = 1
    steady = np.full(64, 1e-6, np.float32)
    found = sizes(compute_noise({"y": y}, [{"y": y + steady}], [{"y": y + 16 * steady + jump}]))
    assert found[5] == 1 or found[5] == 2
    assert np.delete(found, 5).max() < 1e-4


def test_noise_of_still_element_follows_similar_elements():
    rng = np.random.default_rng(0)
    y = rng.standard_normal((32, 6)) * [1e3, 1e3, 1e3, 1e3, 1e-3, 1e-3]
    moves = np.abs(y) * 1e-7
    moves[3, 2] = moves[3, 5] = 0
    found = sizes(compute_noise({"y": y}, [{"y": y + moves}], [{"y": y + 16 * moves}]))
    assert found[3, 2] > 1e-7 * abs(y[3, 2]) and found[3, 5] > 1e-7 * abs(y[3, 5])
    assert found[:, 4:].max() < 1e-8, "the noise of large columns is not that of small ones"


def test_noise_growing_with_values_becomes_relative():
    y = np.exp(-np.arange(40.0))[None]
    moves = 1e-7 * y * np.where(np.arange(40) % 7, 1, 0)
    found = sizes(compute_noise({"y": y}, [{"y": y + moves}], [{"y": y + 16 * moves}]))
    assert found[0, 35] > 1e-7 * y[0, 35] and (found < 1e-5 * y).all()


def test_largest_noise_takes_maximum_per_element():
    one, other = ({"y": encode_noise([1, 4]), "a": encode_noise(2)}, {"y": encode_noise([2, 1]), "b": encode_noise(1)})
    found = merge_noise([one, {}, other])
    assert set(found) == {"y", "a", "b"} and sizes(found).tolist() == [2, 4]


def test_telling_noise_selects_noise_affecting_verdict():
    wide, narrow = (encode_noise(np.full(2, size)) for size in (1e-3, 1e-9))
    outputs = {"y": np.array([1, 2], np.float32)}
    assert select_relevant_noise(outputs, {"y": narrow}) == {} and set(select_relevant_noise(outputs, {"y": wide})) == {
        "y"
    }
    small = {"y": np.array([1, 1e-9], np.float32)}
    assert set(select_relevant_noise(small, {"y": narrow})) == {"y"}, "small values are compared within their noise"


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
    """Save a model whose output is the rounding error of a sum that cancels."""
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


def test_measure_noise_finds_cancellation(tmp_path, settings):
    model = import_model(cancelling(tmp_path / "m.onnx"), isolated=settings["isolated"], cache=settings["cache"])
    inputs = {"x": np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)}
    result = run_reference("onnxruntime", model, inputs, **settings)
    found = {name: one.astype(np.float64) for name, one in measure_noise(model, inputs, result, **settings).items()}
    assert found["zero"] > abs(float(result.outputs["zero"])) / 8
    assert 0 < found["same"].max() < 1e-5
    # Expected outputs of the user have no noise; the noise of the model is used.
    given = read_expected({"zero": np.zeros((), np.float32), "same": inputs["x"]}, model.outputs)
    again = measure_noise(model, inputs, given, **settings)
    assert all(again[name].astype(np.float64).tolist() == found[name].tolist() for name in found)


def test_measure_noise_covers_operators_with_integer_inputs(tmp_path, settings):
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
    found = float(measure_noise(model, inputs, result, **settings)["y"])
    assert 1e-7 < found < 1e-2


@pytest.mark.ci
def test_measure_noise_ignores_floor_of_whole_numbers(tmp_path, settings):
    nodes = [helper.make_node("Floor", ["x"], ["y"])]
    path = save_model(tmp_path / "floor.onnx", nodes, [("x", TensorProto.FLOAT, [8])], [("y", TensorProto.FLOAT, [8])])
    model = import_model(path, isolated=settings["isolated"], cache=settings["cache"])
    inputs = {"x": np.arange(8, dtype=np.float32)}
    result = run_reference("onnxruntime", model, inputs, **settings)
    assert measure_noise(model, inputs, result, **settings) == {}


@pytest.mark.ci
def test_measure_noise_skips_outputs_of_random_numbers(tmp_path, settings):
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["chance"]),
        helper.make_node("Add", ["x", "chance"], ["y"]),
        helper.make_node("Sqrt", ["x"], ["z"]),
    ]
    values = [("x", TensorProto.FLOAT, [8])], [("y", TensorProto.FLOAT, [8]), ("z", TensorProto.FLOAT, [8])]
    path = save_model(tmp_path / "random.onnx", nodes, *values)
    model = import_model(path, isolated=settings["isolated"], cache=settings["cache"])
    inputs = {"x": np.linspace(0.1, 0.9, 8, dtype=np.float32)}
    result = run_reference("onnxruntime", model, inputs, **settings)
    assert set(measure_noise(model, inputs, result, **settings)) == {"z"}


def test_measure_noise_caches_noise(tmp_path, settings):
    cancelling(tmp_path / "m.onnx")
    model = import_model(tmp_path / "m.onnx", isolated=settings["isolated"])
    inputs = {"x": np.random.default_rng(0).random((4, 1000), np.float32)}
    result = run_reference("onnx-reference", model, inputs, **settings)
    found = measure_noise(model, inputs, result, **settings)
    settings["isolated"].close()  # no further run is possible
    again = measure_noise(model, inputs, result, **settings)
    assert {name: one.tobytes() for name, one in again.items()} == {name: one.tobytes() for name, one in found.items()}
    assert set(found) == {"zero", "same"}
    moved = {"x": inputs["x"] + np.float32(1)}
    assert measure_noise(model, moved, result, **settings) == {}


@pytest.mark.ci
def test_measure_noise_does_not_cache_disturbed_measurement(tmp_path, settings, monkeypatch):
    cancelling(tmp_path / "m.onnx")
    model = import_model(tmp_path / "m.onnx", isolated=settings["isolated"])
    inputs = {"x": np.random.default_rng(0).integers(0, 9, (4, 1000)).astype(np.float32)}
    result = run_reference("onnx-reference", model, inputs, **settings)

    def late(*_: object) -> None:
        raise IsolatedTimeout("timed out after 1 s")

    with monkeypatch.context() as patch:
        patch.setattr(references, "call_isolated", late)
        assert measure_noise(model, inputs, result, **settings) == {}, "whole numbers are not moved"
    assert "zero" in measure_noise(model, inputs, result, **settings)
