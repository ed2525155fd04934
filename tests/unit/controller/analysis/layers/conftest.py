"""Fixtures for splitting models into layers and computing reference activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from hil.controller.analysis.layers import Layer, extract_layers
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.results import Model
from hil.core.tensors import Array

Imported = Callable[..., Model]


@pytest.fixture
def imported(tmp_path: Path, isolated: Isolated) -> Imported:
    """imported(proto, **dims) writes a model and reads it."""

    def read(proto: onnx.ModelProto, **dims: int) -> Model:
        path = tmp_path / "model.onnx"
        onnx.save(proto, path)
        return import_model(path, dims=dims, isolated=isolated)

    return read


@pytest.fixture
def context(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for ``extract_layers``."""
    return {name: settings[name] for name in ("cache", "isolated", "log")}


@pytest.fixture
def taken_apart(imported: Imported, context: dict[str, Any]) -> Callable[..., dict[str, Layer]]:
    """taken_apart(proto, group) -> the layers by name."""

    def layers(proto: onnx.ModelProto, group: str = "node") -> dict[str, Layer]:
        return {layer.name: layer for layer in extract_layers(imported(proto), group=group, **context)}

    return layers


@pytest.fixture
def inputs_of() -> Callable[[Model], dict[str, Array]]:
    """Seeded random inputs of a model."""

    def make(model: Model) -> dict[str, Array]:
        assert model.inputs is not None
        return make_inputs(model.inputs, {}, seed=7, ranges=model.ranges, dims=model.dims)

    return make
