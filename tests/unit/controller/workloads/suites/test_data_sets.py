"""ONNX test data: pair tensors by name if they have names; an invalid set fails only its case."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model

from hil.controller.models.flows.flow import Flow
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.bundles.onnx import read_onnx
from hil.controller.workloads.suites.cases.sources import open_suite
from hil.controller.workloads.suites.cases.spec import CaseData
from hil.controller.workloads.suites.request import SuiteRequest
from hil.core.tensors import Array
from hil.errors import HilError, UsageError

FLOAT = TensorProto.FLOAT
A, B = np.array([1, 2, 3], np.float32), np.array([5, 7, 11], np.float32)


@pytest.fixture(scope="module")
def context(isolated: Isolated, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    return RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Save a model that returns d = a - b and s = a + b."""
    nodes = [helper.make_node("Sub", ["a", "b"], ["d"]), helper.make_node("Add", ["a", "b"], ["s"])]
    sides = [[(name, FLOAT, [3]) for name in names] for names in ("ab", "ds")]
    return save_model(tmp_path / "model.onnx", nodes, *sides)


def save_set(model: Path, number: int, inputs: list[tuple[str, Array]], outputs: list[tuple[str, Array]]) -> None:
    folder = model.parent / f"test_data_set_{number}"
    folder.mkdir()
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for place, (name, array) in enumerate(tensors):
            tensor = numpy_helper.from_array(array, name)
            (folder / f"{kind}_{place}.pb").write_bytes(tensor.SerializeToString())


def data_of(model: Path, case_id: str, context: RunContext, folder: Path, layers: bool = False) -> CaseData:
    suite = open_suite(SuiteRequest(str(model), layers=layers), Flow("onnxruntime", "onnxruntime"), context)
    (spec,) = [one for one in suite.cases if one.id == case_id]
    folder.mkdir(parents=True, exist_ok=True)
    return spec.make(folder)


def swapped(model: Path) -> None:
    save_set(model, 0, [("b", B), ("a", A)], [("s", A + B), ("d", A - B)])


@pytest.mark.ci
def test_named_tensors_are_paired_by_name(model, context, tmp_path):
    swapped(model)
    data = data_of(model, "model_test_data_set_0", context, tmp_path / "case")
    assert {name: array.tolist() for name, array in data.inputs.items()} == {"a": A.tolist(), "b": B.tolist()}
    assert data.expected["d"].tolist() == (A - B).tolist()


def test_bundle_pairs_named_tensors_by_name(model, context):
    swapped(model)
    (case,) = read_onnx(model.parent, context=context).methods[0].cases
    assert case.inputs["a"].tolist() == A.tolist() and case.expected_outputs["s"].tolist() == (A + B).tolist()


@pytest.mark.parametrize("names", [("", ""), ("input_0", "input_1"), ("a", ""), ("a", "a"), ("b", "other")])
def test_other_names_are_paired_by_position(model, context, tmp_path, names):
    save_set(model, 0, [(names[0], A), (names[1], B)], [("", A - B), ("", A + B)])
    data = data_of(model, "model_test_data_set_0", context, tmp_path / "case")
    assert data.inputs["a"].tolist() == A.tolist() and data.inputs["b"].tolist() == B.tolist()


def invalid_then_valid(model: Path) -> None:
    save_set(model, 0, [("a", A.astype(np.float64)), ("b", B)], [("d", A), ("s", A)])
    save_set(model, 1, [("a", A), ("b", B)], [("d", A - B), ("s", A + B)])


def test_invalid_data_set_does_not_affect_other_cases(model, context, tmp_path):
    invalid_then_valid(model)
    with pytest.raises(HilError, match="input 'a' is 3 float64"):
        data_of(model, "model_test_data_set_0", context, tmp_path / "bad")
    for name in ("model_test_data_set_1", "model_full_model"):
        assert data_of(model, name, context, tmp_path / name).inputs["a"].tolist() == A.tolist()
    suite = open_suite(SuiteRequest(str(model)), Flow("onnxruntime", "onnxruntime"), context)
    (layer, _) = [one for one in suite.cases if one.layer]
    (tmp_path / "layer").mkdir()
    assert [array.tolist() for array in layer.make(tmp_path / "layer").inputs.values()] == [A.tolist(), B.tolist()]


def test_model_without_valid_data_set_gets_random_inputs(model, context, tmp_path):
    save_set(model, 0, [("a", A)], [("d", A), ("s", A)])
    assert data_of(model, "model_full_model", context, tmp_path / "case").inputs.keys() == {"a", "b"}


def test_bundle_omits_invalid_data_set(model, context):
    invalid_then_valid(model)
    bundle = read_onnx(model.parent, context=context)
    assert [case.name for case in bundle.methods[0].cases] == ["test_data_set_1"]
    (line,) = bundle.made["left_out"]
    assert "test_data_set_0" in line and "input 'a' is 3 float64" in line


def test_bundle_rejects_invalid_data_sets(model, context):
    save_set(model, 0, [("a", A)], [("d", A), ("s", A)])
    with pytest.raises(UsageError, match="input 'b' is missing"):
        read_onnx(model.parent, context=context)


@pytest.fixture
def with_default(tmp_path: Path) -> Path:
    """Save a model that returns y = x + bias, where the input bias defaults to 0."""
    inputs = [(name, FLOAT, [3]) for name in ("x", "bias")]
    bias = numpy_helper.from_array(np.zeros(3, np.float32), "bias")
    nodes = [helper.make_node("Add", ["x", "bias"], ["y"])]
    return save_model(tmp_path / "model.onnx", nodes, inputs, [("y", FLOAT, [3])], [bias])


def bias_of(path: Path) -> list[float]:
    (bias,) = onnx.load(path).graph.initializer
    return numpy_helper.to_array(bias).tolist()


@pytest.mark.parametrize("names", [("x", "bias"), ("", "")])
def test_data_set_overrides_default_value(with_default, context, tmp_path, names):
    save_set(with_default, 0, [(names[0], A), (names[1], B)], [("y", A + B)])
    save_set(with_default, 1, [("x", A)], [("y", A)])
    first, second, whole = (
        data_of(with_default, f"model_{name}", context, tmp_path / name)
        for name in ("test_data_set_0", "test_data_set_1", "full_model")
    )
    assert bias_of(first.path) == B.tolist() and first.inputs.keys() == {"x"}
    assert bias_of(second.path) == bias_of(whole.path) == [0, 0, 0]
    assert second.inputs["x"].tolist() == whole.inputs["x"].tolist() == A.tolist()


def test_inputs_file_overrides_default_value(with_default, context, tmp_path):
    np.savez(with_default.with_name("model.inputs.npz"), x=A, bias=B)
    data = data_of(with_default, "model_full_model", context, tmp_path / "case")
    assert bias_of(data.path) == B.tolist() and data.inputs["x"].tolist() == A.tolist()
