"""Compare layers with folded constants with the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from support.layer_models import FLOAT, model_of, node

from hil.controller.analysis.layers import Layer, compute_activations, extract_layers, find_changed_layers
from hil.controller.models.importers import import_model
from hil.controller.storage.isolation.isolated import Isolated

X = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}


def computed_weight(folder: Path) -> Path:
    """Save a model whose second node adds a constant computed from another constant."""
    nodes = [node("Neg", ["x"], ["h"]), node("Sqrt", ["w"], ["root"]), node("Add", ["h", "root"], ["y"])]
    weight = {"w": np.array([1, 4, 9, 16], np.float32)}
    onnx.save(model_of(nodes, [("x", FLOAT, (2, 4))], [("y", FLOAT, (2, 4))], weight), folder / "model.onnx")
    return folder / "model.onnx"


def with_other_constant(layer: Layer, folder: Path) -> Layer:
    model = onnx.load(layer.path)
    tensor = model.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.5), tensor.name))
    onnx.save(model, folder / "other.onnx")
    return replace(layer, path=folder / "other.onnx")


def test_changed_layers_names_layer_with_wrong_constant(
    tmp_path: Path, settings: dict[str, Any], isolated: Isolated
) -> None:
    model = import_model(computed_weight(tmp_path), isolated=isolated)
    context = {name: settings[name] for name in ("cache", "isolated", "log")}
    plain, computed = extract_layers(model, inputs=X, **context)
    assert (plain.folded, computed.folded) == (False, True)
    values = compute_activations(model, X, **settings)
    assert find_changed_layers([plain, computed], values, **settings) == {}
    found = find_changed_layers([plain, with_other_constant(computed, tmp_path)], values, **settings)
    assert list(found) == [computed.name]
    assert "computed for the layer changed output y: 8 of 8 values differ" in found[computed.name]


def test_changed_layers_runs_only_layers_with_computed_constants(
    tmp_path: Path, settings: dict[str, Any], isolated: Isolated
) -> None:
    model = import_model(computed_weight(tmp_path), isolated=isolated)
    context = {name: settings[name] for name in ("cache", "isolated", "log")}
    plain, _ = extract_layers(model, inputs=X, **context)
    values = compute_activations(model, X, **settings)
    closed = Isolated(1)
    closed.close()
    assert find_changed_layers([plain], values, **{**settings, "isolated": closed}) == {}
