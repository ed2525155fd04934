"""Check that two models have the same layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hil.controller.analysis.bisect.subject import check_layers, check_signatures
from hil.controller.analysis.layers import Layer
from hil.core.results import Model
from hil.core.tensors import TensorSpec
from hil.errors import UsageError

X, Y = TensorSpec("x", "float32", (4,)), TensorSpec("y", "float32", (4,))
MODEL = Model("net", "onnx", Path("net.onnx"), {}, "blake3:0", inputs=(X,), outputs=(Y,))
OTHER = replace(MODEL, name="received", path=Path("received.onnx"))
LAYERS = (
    Layer("Neg_a", "Neg", ("a",), Path("a.onnx"), ("x",), ("t",), 0),
    Layer("Relu_b", "Relu", ("b",), Path("b.onnx"), ("t",), ("y",), 1),
)


def test_pair_accepts_same_network_in_other_files():
    check_signatures(MODEL, OTHER)
    check_layers(MODEL, LAYERS, OTHER, [replace(layer, path=Path("other.onnx"), same_as="") for layer in LAYERS])


@pytest.mark.parametrize("part", ["inputs", "outputs"])
def test_pair_rejects_different_signature(part):
    other = replace(OTHER, **{part: (TensorSpec("x", "float32", (5,)),)})
    with pytest.raises(UsageError, match=rf"received\.onnx is not the same network as net\.onnx: expected the {part} "):
        check_signatures(MODEL, other)


@pytest.mark.parametrize(
    "change",
    [{"op": "Elu"}, {"nodes": ("c",)}, {"inputs": ("x",)}, {"outputs": ("z",)}],
    ids=lambda change: str(change),
)
def test_pair_names_first_different_layer(change):
    with pytest.raises(UsageError, match=r"expected the layer Relu_b \(t to y\), got Relu_b \(.*\)"):
        check_layers(MODEL, LAYERS, OTHER, [LAYERS[0], replace(LAYERS[1], **change)])


def test_pair_rejects_missing_layer():
    with pytest.raises(UsageError, match="expected 2 layers, got 1"):
        check_layers(MODEL, LAYERS, OTHER, LAYERS[:1])
