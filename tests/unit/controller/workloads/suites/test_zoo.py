"""Built-in models: contents, reproducible builds, and reference runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from hil.controller.backends.references import run_reference_with_fallback
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.spec import SuiteModel
from hil.controller.workloads.suites.zoo import BUILDERS, build, build_zoo_models


@pytest.fixture(scope="module")
def context(isolated: Isolated, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    return RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture(scope="module")
def models(context: RunContext) -> dict[str, SuiteModel]:
    return {model.name: model for model in build_zoo_models(context)}


def operators(model: SuiteModel) -> set[str]:
    return {node.op_type for node in onnx.load(model.path).graph.node}


def test_zoo_contains_about_twenty_models(models):
    assert len(models) >= 23
    assert {"digits_cnn", "digits_cnn_int8", "digits_cnn_batch"} <= set(models)


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("resnet", {"Conv", "BatchNormalization", "Add", "GlobalAveragePool"}),
        ("mobilenet", {"Conv", "Clip", "Add"}),
        ("squeeze_excite", {"HardSwish", "HardSigmoid", "GlobalAveragePool"}),
        ("unet", {"ConvTranspose", "Resize", "Concat", "MaxPool"}),
        ("quantised_cnn", {"QuantizeLinear", "DequantizeLinear", "Conv"}),
        ("transformer", {"Softmax", "LayerNormalization", "MatMul"}),
        ("decoder", {"Gather", "Where", "Softmax"}),
        ("mixer", {"Gelu", "LayerNormalization"}),
        ("lstm", {"LSTM"}),
        ("gru", {"GRU"}),
        ("branches", {"If"}),
        ("loop", {"Loop"}),
        ("scan", {"Scan"}),
        ("beam_step", {"TopK", "ArgMax"}),
    ],
)
def test_zoo_architectures_use_typical_operators(models, name, has):
    assert has <= operators(models[name])


def test_depthwise_convolutions_have_group_per_channel(models):
    groups = [
        attribute.i
        for node in onnx.load(models["mobilenet"].path).graph.node
        for attribute in node.attribute
        if attribute.name == "group"
    ]
    assert max(groups) == 36


def test_zoo_build_writes_same_bytes(models, tmp_path):
    build(str(tmp_path))
    assert [
        name for name in BUILDERS if (tmp_path / f"{name}.onnx").read_bytes() != models[name].path.read_bytes()
    ] == []


def test_zoo_models_are_small(models):
    assert max(model.path.stat().st_size for model in models.values()) < 200_000


def test_digits_models_have_inputs_and_calibration_samples(models):
    given = models["digits_cnn_batch"].given()["image"]
    samples = models["digits_cnn_batch"].calibration()
    assert given.shape == (4, 1, 8, 8)
    assert len(samples) > 10
    assert all(sample["image"].shape == given.shape for sample in samples)
    assert not any(np.array_equal(sample["image"], given) for sample in samples)


def test_reference_runs_every_zoo_model(models, context, tmp_path):
    sources = {}
    for model in models.values():
        read = import_model(model.path, dims=model.dims, isolated=context.isolated, cache=context.cache)
        inputs = make_inputs(read.inputs, model.given(), ranges=read.ranges, dims=read.dims)
        result, _ = run_reference_with_fallback(
            read,
            inputs,
            cache=context.cache,
            isolated=context.isolated,
            recompute=False,
            timeout=120.0,
            log=Path(tmp_path) / "reference.log",
        )
        sources[model.name] = result.source
        for name, value in result.outputs.items():
            numbers = value.astype(np.float64)
            assert np.isfinite(numbers).all(), (model.name, name)
            assert numbers.size == 1 or np.ptp(numbers) > 0, (model.name, name)
    # The only model without ONNX Runtime kernels uses another reference.
    assert [name for name, source in sources.items() if not source.startswith("onnxruntime")] == ["bfloat16"]
