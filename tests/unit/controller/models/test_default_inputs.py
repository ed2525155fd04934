"""Given tensors take the place of inputs' default values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import save_model

from hil.controller.models.default_inputs import add_given_defaults, list_default_specs
from hil.controller.models.importers import import_model
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.core.results import Model
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

FLOAT = TensorProto.FLOAT
X, BIAS = np.ones(3, np.float32), np.full(3, 5, np.float32)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory):
    with Isolated(1) as isolated:
        yield RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture
def model(tmp_path: Path, context: RunContext) -> Model:
    return import_model(saved(tmp_path / "model.onnx"), isolated=context.isolated, cache=context.cache)


def saved(path: Path, ir_version: int = 9) -> Path:
    """Save y = x * w + bias: bias has a default value; w is external and not an input."""
    held = [numpy_helper.from_array(np.full(3, value, np.float32), name) for name, value in (("w", 2), ("bias", 0))]
    nodes = [helper.make_node("Mul", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "bias"], ["y"])]
    save_model(path, nodes, [("x", FLOAT, [3]), ("bias", FLOAT, [3])], [("y", FLOAT, [3])], held)
    proto = onnx.load(path)
    proto.ir_version = ir_version
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def weights_of(model: Model) -> dict[str, list[float]]:
    return {one.name: numpy_helper.to_array(one).tolist() for one in onnx.load(model.path).graph.initializer}


def test_default_specs_are_separate_from_inputs(model):
    assert list_default_specs(model) == (TensorSpec("bias", "float32", (3,)),)
    assert [spec.name for spec in model.inputs] == ["x"]


def test_old_ir_versions_lack_default_values(tmp_path, context):
    path = saved(tmp_path / "old.onnx", ir_version=3)
    assert list_default_specs(import_model(path, isolated=context.isolated)) == ()


@pytest.mark.parametrize(
    "given",
    [{"x": X, "bias": BIAS}, ["x=3xf32=1", "bias=3xf32=5"], ["bias=3xf32=5", "3xf32=1"], ["3xf32=1", "3xf32=5"]],
)
def test_given_tensor_replaces_default_value(model, context, given):
    other, rest = add_given_defaults(model, given, context)
    assert weights_of(other) == {"w": [2, 2, 2], "bias": [5, 5, 5]}
    assert other.name == model.name and other.digest != model.digest
    assert {name: array.tolist() for name, array in rest.items()} == {"x": [1, 1, 1]}


def test_equal_models_with_other_names_stay_separate(model, context, tmp_path):
    add_given_defaults(model, {"bias": BIAS}, context)
    model.path.rename(tmp_path / "other.onnx")
    renamed = import_model(tmp_path / "other.onnx", isolated=context.isolated, cache=context.cache)
    assert weights_of(add_given_defaults(renamed, {"bias": BIAS}, context)[0])["bias"] == [5, 5, 5]


def test_archive_replaces_default_value(model, context, tmp_path):
    np.savez(tmp_path / "given.npz", x=X, bias=BIAS)
    other, rest = add_given_defaults(model, [str(tmp_path / "given.npz")], context)
    assert weights_of(other)["bias"] == [5, 5, 5] and rest.keys() == {"x"}


@pytest.mark.parametrize("given", [{}, (), {"x": X}, ["x=3xf32=1"]])
def test_other_inputs_leave_model_unchanged(model, context, given):
    assert add_given_defaults(model, given, context) == (model, given)


@pytest.mark.parametrize("given", [{"bias": X[:2]}, ["bias=2xf32=1"], {"bias": X.astype(np.float64)}])
def test_default_input_rejects_other_type(model, context, given):
    with pytest.raises(UsageError, match="input 'bias': expected 3 float32"):
        add_given_defaults(model, given, context)
