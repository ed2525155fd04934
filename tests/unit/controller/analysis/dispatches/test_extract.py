"""Extraction of dispatches from models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.profiles import HOST

from hil.controller.analysis.dispatches.extract import Dispatch, extract_dispatches
from hil.controller.analysis.profile.sites import find_sites
from hil.controller.models.importers import import_model
from hil.core.results import Model
from hil.errors import UsageError

FLOAT = TensorProto.FLOAT
# The compiler includes smaller weights in the code of the dispatch.
WEIGHTS = np.linspace(-1, 2, 256, dtype=np.float32).reshape(16, 16)


def extract(path: Path, settings: dict[str, Any], **more: Any) -> tuple[Model, tuple[Dispatch, ...]]:
    model = import_model(path, dims={}, isolated=settings["isolated"])
    return model, extract_dispatches(model, HOST, **{**settings, **more})


@pytest.fixture
def twice(save_onnx: Callable[..., Path]) -> Path:
    """y = relu(relu(x w) w): the same dispatch, called two times, with weights as an operand."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "first_relu"),
        helper.make_node("MatMul", ["b", "w"], ["c"], "second"),
        helper.make_node("Relu", ["c"], ["y"], "second_relu"),
    ]
    value = (FLOAT, (2, 16))
    return save_onnx(nodes, [("x", *value)], [("y", *value)], [numpy_helper.from_array(WEIGHTS, "w")])


def test_equal_dispatches_are_extracted_once(twice: Path, settings: dict[str, Any]) -> None:
    model, (found,) = extract(twice, settings)
    assert found.calls == 2 and found.reason == "" and found.not_evaluated == ""
    assert found.nodes == ("first", "first_relu", "second", "second_relu") and found.op_types == ("MatMul", "Relu")
    inputs, expected = found.load_inputs(), found.load_expected()
    assert any(np.array_equal(value, WEIGHTS) for value in inputs.values())
    (x,) = (value for value in inputs.values() if value.shape == (2, 16))
    np.testing.assert_allclose(expected["output0"], np.maximum(x.astype(float) @ WEIGHTS, 0), rtol=1e-5)
    # The key joins with profiles, and the standalone program has the same key in its profile.
    how = {name: settings[name] for name in ("cache", "isolated", "timeout", "log")}
    assert {site.key for region in find_sites(model, HOST, **how).regions for site in region.sites} == {found.key}
    assert found.path is not None
    alone = import_model(found.path, dims={}, isolated=settings["isolated"])
    assert [spec.shape for spec in alone.inputs or ()] == [spec.shape for spec in found.inputs]
    (region,) = find_sites(alone, HOST, **how).regions
    assert region.keys == (found.key,)


@pytest.mark.ci
def test_seed_changes_inputs_but_not_weights(twice: Path, settings: dict[str, Any]) -> None:
    values = [extract(twice, settings, seed=seed)[1][0].load_inputs() for seed in (0, 1)]
    same = {name for name in values[0] if np.array_equal(values[0][name], values[1][name])}
    assert [values[0][name].shape for name in same] == [(16, 16)]


def test_dispatch_with_dynamic_shape_has_reason(save_onnx: Callable[..., Path], settings: dict[str, Any]) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], "relu")
    path = save_onnx([node], [("x", FLOAT, ("N", 4))], [("y", FLOAT, ("N", 4))])
    _, (found,) = extract(path, settings)
    assert "dynamic" in found.reason and found.path is None and found.nodes == ("relu",)


def test_compiled_program_has_no_dispatches(settings: dict[str, Any], tmp_path: Path) -> None:
    model = Model("m", "vmfb", tmp_path / "m.vmfb", {}, "blake3:0")
    with pytest.raises(UsageError, match="compiled program"):
        extract_dispatches(model, HOST, **settings)
