"""Cut part of a model between two tensors, nodes or layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from support.layer_models import branches_and_loops, dynamic_batch, folded, residual_cnn, sequences
from support.models import DIGITS

from hil.controller.analysis.layers import (
    Layer,
    compute_activations,
    cut,
    extract_layers,
    get_layer_specs,
    select_layer_inputs,
    select_layer_outputs,
)
from hil.controller.backends.references import run_reference
from hil.controller.models.importers import import_model
from hil.core.results import Model
from hil.core.tensors import Array
from hil.errors import UsageError

Cut = Callable[..., Layer]


@pytest.fixture
def cut_out(imported: Any, context: dict[str, Any]) -> Cut:
    """cut_out(proto, start, end) -> the part."""

    def call(proto: onnx.ModelProto, start: str, end: str, **options: Any) -> Layer:
        return cut(imported(proto), start, end, **context, **options)

    return call


@pytest.mark.parametrize(
    ("start", "end", "nodes"),
    [
        ("r1", "r2", ["block/conv1", "block/relu1"]),
        ("stem", "stem_relu", ["stem", "stem_norm", "stem_relu"]),
        ("c1", "stem_relu", ["stem_norm", "stem_relu"]),
        ("flatten", "product", ["flatten", "head"]),
        ("Flatten_flatten", "MatMul_head", ["flatten", "head"]),
        ("", "n1", ["stem", "stem_norm"]),
        ("biased", "", ["head_act"]),
        ("pool", "pool", ["pool"]),
        ("block/conv2", "block/add", ["block/conv2", "block/add"]),
        ("r1", "sum", ["block/conv1", "block/relu1", "block/conv2", "block/add"]),
    ],
)
def test_cut_accepts_tensors_nodes_and_layers(cut_out: Cut, start: str, end: str, nodes: list[str]) -> None:
    assert cut_out(residual_cnn(), start, end).nodes == tuple(nodes)


def test_cut_accepts_fused_layers(cut_out: Cut) -> None:
    part = cut_out(residual_cnn(), "Conv+Relu_block_conv1", "Conv+Add+Relu_block_conv2", group="fused")
    assert part.nodes[0] == "block/conv1" and part.nodes[-1] == "block/relu2"


def test_cut_includes_dequantizing_nodes_of_layer(isolated: Any, context: dict[str, Any]) -> None:
    model = import_model(DIGITS / "digits_cnn_int8.onnx", isolated=isolated)
    layers = {layer.name: layer for layer in extract_layers(model, **context)}
    conv, pool = "DequantizeLinear+Conv+QuantizeLinear_conv2", "DequantizeLinear+MaxPool+QuantizeLinear_pool2"
    alone, both = cut(model, conv, conv, **context), cut(model, conv, pool, **context)
    for one in (alone, both):
        assert one.inputs == layers[conv].inputs
    assert (alone.nodes, alone.outputs) == (layers[conv].nodes, layers[conv].outputs)
    assert sorted(both.nodes) == sorted((*layers[conv].nodes, *layers[pool].nodes))
    assert both.outputs == layers[pool].outputs


def test_cut_adds_side_inputs(cut_out: Cut) -> None:
    part = cut_out(residual_cnn(), "r2", "r3")
    assert part.inputs == ("r2", "r1") and part.outputs == ("r3",)
    assert part.name == "cut_r2_to_r3" and part.op == "Conv+Add+Relu"
    assert [str(spec) for side in get_layer_specs(part) for spec in side] == [
        "r2: 1x8x8x8 float32", "r1: 1x8x8x8 float32", "r3: 1x8x8x8 float32",
    ]  # fmt: skip


def test_cut_computes_same_values_as_whole_model(
    imported: Any, inputs_of: Callable[[Model], dict[str, Array]], context: dict[str, Any], settings: dict[str, Any]
) -> None:
    model = imported(branches_and_loops())
    values = compute_activations(model, inputs_of(model), **settings)
    part = cut(model, "h", "repeat", **context)
    assert part.inputs == ("positive", "h") and part.outputs == ("last", "every")
    own = import_model(part.path, isolated=settings["isolated"])
    made = run_reference("onnxruntime", own, select_layer_inputs(part, values), **settings).outputs
    for name, value in select_layer_outputs(part, values).items():
        np.testing.assert_allclose(made[name], value, rtol=1e-6)


def test_cut_fixes_dimensions_from_inputs(cut_out: Cut) -> None:
    part = cut_out(dynamic_batch(), "r", "flat", inputs={"x": np.zeros((6, 3, 4), np.float32)})
    assert [str(spec) for side in get_layer_specs(part) for spec in side] == ["r: 6x3x4 float32", "flat: 6x12 float32"]


@pytest.mark.parametrize(
    ("start", "end", "message", "hint"),
    [
        ("block/conv3", "", "tensor, node or layer 'block/conv3' not found", "did you mean 'block/conv"),
        ("", "scoers", "tensor, node or layer 'scoers' not found", "did you mean 'scores'"),
        ("r3", "c1", "'c1' does not depend on 'r3'", "--from must precede --to"),
        ("r1", "r1", "'r1' does not depend on 'r1'", "--from must precede --to"),
        ("", "image", "'image' does not depend on any node", "--from must precede --to"),
        ("w1", "", "tensor, node or layer 'w1' not found, or it does not depend", "`hil layers MODEL` lists"),
    ],
)
def test_cut_rejects_unknown_or_reversed_ends(cut_out: Cut, start: str, end: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        cut_out(residual_cnn(), start, end)
    assert message in refused.value.message and hint in refused.value.hint


def test_cut_rejects_non_tensor_edge_and_dead_end(cut_out: Cut) -> None:
    with pytest.raises(UsageError, match="cannot cut at 'list': it is not a tensor, or its shape is unknown"):
        cut_out(sequences(), "x", "list")
    with pytest.raises(UsageError, match="no output of the model depends on 'nothing'"):
        cut_out(folded(), "nothing", "")


def test_cut_without_ends_returns_whole_model(cut_out: Cut, imported: Any, context: dict[str, Any]) -> None:
    whole = cut_out(residual_cnn(), "", "")
    assert whole.nodes == tuple(
        name for layer in extract_layers(imported(residual_cnn()), **context) for name in layer.nodes
    )
