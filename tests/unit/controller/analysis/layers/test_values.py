"""Reference activations inside a model, and layer inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support.layer_models import (
    BOOL,
    FLOAT,
    INT64,
    MODELS,
    branches_and_loops,
    dynamic_batch,
    folded,
    model_of,
    node,
    of_bfloat16,
    residual_cnn,
    sequences,
    shared_weight,
)
from support.models import DIGITS

from hil.controller.analysis.layers import (
    GROUPS,
    compute_activations,
    extract_layers,
    select_layer_inputs,
    select_layer_outputs,
)
from hil.controller.backends.references import run_reference_with_fallback
from hil.controller.models.importers import import_model
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.results import Model
from hil.core.tensors import Array, get_dtype_name
from hil.errors import ReferenceFailed, StageTimeout, UsageError

InputsOf = Callable[[Model], dict[str, Array]]


def close(actual: Array, wanted: Array) -> None:
    """Assert equality up to summation order; the absolute tolerance scales with the largest value."""
    assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
    if wanted.dtype.kind in "fcV":
        exact = wanted.astype(np.float64)
        largest = np.abs(exact[np.isfinite(exact)]).max(initial=1.0)
        np.testing.assert_allclose(actual.astype(np.float64), exact, rtol=1e-5, atol=1e-6 * largest)
    else:
        np.testing.assert_array_equal(actual, wanted)


def check_that_layers_make_the_model(model: Model, inputs: dict[str, Array], settings: dict[str, Any]) -> None:
    """Assert that layers reproduce their activations, alone and chained."""
    context = {name: settings[name] for name in ("cache", "isolated", "log")}
    whole = compute_activations(model, inputs, **settings)
    wanted = run_reference_with_fallback(model, inputs, **settings)[0].outputs
    for name, value in wanted.items():
        close(whole[name], value)
    for group in GROUPS:
        made = dict(inputs)
        for layer in extract_layers(model, group=group, inputs=inputs, **context):
            own = import_model(layer.path, isolated=settings["isolated"], cache=settings["cache"])
            assert [spec.name for spec in own.inputs or ()] == list(layer.inputs)
            real = select_layer_inputs(layer, whole)
            assert all(
                spec.accepts(get_dtype_name(x.dtype), x.shape)
                for spec, x in zip(own.inputs or (), real.values(), strict=True)
            )
            alone = run_reference_with_fallback(own, real, **settings)[0].outputs
            for name, value in select_layer_outputs(layer, whole).items():
                close(alone[name], value)
            made |= run_reference_with_fallback(own, {name: made[name] for name in layer.inputs}, **settings)[0].outputs
        for name, value in wanted.items():
            # An output that no layer computes is a constant and equal in every run.
            close(made.get(name, whole[name]), value)
        assert made.keys() & wanted.keys()


@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_same_values_as_model(
    name: str, imported: Any, inputs_of: InputsOf, settings: dict[str, Any]
) -> None:
    model = imported(MODELS[name]())
    check_that_layers_make_the_model(model, inputs_of(model), settings)


@pytest.mark.parametrize("name", ["digits_cnn", "digits_cnn_int8"])
def test_layers_compute_same_values_as_digits_models(name: str, isolated: Isolated, settings: dict[str, Any]) -> None:
    image = np.load(DIGITS / "digits_test.npz")["image"][:1]
    model = import_model(DIGITS / f"{name}.onnx", isolated=isolated)
    check_that_layers_make_the_model(model, {"image": image}, settings)


@pytest.mark.parametrize("dims", [{}, {"N": 4}])
def test_layers_compute_same_values_for_open_or_fixed_batch(dims: dict[str, int], imported: Any, settings: Any) -> None:
    x = np.random.default_rng(0).standard_normal((4, 3, 4)).astype(np.float32)
    check_that_layers_make_the_model(imported(dynamic_batch(), **dims), {"x": x}, settings)


def test_layers_compute_same_values_as_quantized_model(
    tmp_path: Path, isolated: Isolated, settings: dict[str, Any]
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    image = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)

    class Once(CalibrationDataReader):
        def __init__(self) -> None:
            self.samples = iter([{"image": image}])

        def get_next(self) -> Any:
            return next(self.samples, None)

    plain, quantised = tmp_path / "plain.onnx", tmp_path / "quantised.onnx"
    onnx.save(residual_cnn(), tmp_path / "float.onnx")
    quant_pre_process(tmp_path / "float.onnx", plain)
    quantize_static(plain, quantised, Once(), quant_format=QuantFormat.QDQ, per_channel=True)
    model = import_model(quantised, isolated=isolated)
    check_that_layers_make_the_model(model, {"image": image}, settings)
    layers = extract_layers(model, **{name: settings[name] for name in ("cache", "isolated", "log")})
    assert any(layer.op == "DequantizeLinear+Conv+QuantizeLinear" for layer in layers)
    assert not any(layer.op in ("Conv", "Add", "MatMul", "DequantizeLinear") for layer in layers)


def test_activations_contain_every_intermediate_value(
    imported: Any, inputs_of: InputsOf, settings: dict[str, Any]
) -> None:
    model = imported(residual_cnn())
    found = compute_activations(model, inputs_of(model), **settings)
    inner = {name for one in residual_cnn().graph.node for name in one.output}
    assert set(found) == {"image", *inner} and len(found) == 14
    np.testing.assert_array_equal(found["r2"], np.maximum(found["c2"], 0))
    np.testing.assert_array_equal(found["image"], inputs_of(model)["image"])
    assert found.source.startswith("onnxruntime ") and found.refused == []
    assert {spec.name: spec.shape for spec in found.iter_specs()}["c1"] == (1, 8, 8, 8)


def test_activations_are_cached_by_model_and_inputs(
    imported: Any, inputs_of: InputsOf, settings: dict[str, Any]
) -> None:
    model = imported(residual_cnn())
    inputs = inputs_of(model)
    first = compute_activations(model, inputs, **settings)
    closed = Isolated(1)
    closed.close()
    again = compute_activations(model, inputs, **{**settings, "isolated": closed})
    np.testing.assert_array_equal(again["scores"], first["scores"])
    for other in ({"recompute": True}, {"inputs": {"image": inputs["image"] + 1}}):
        arguments = {"inputs": inputs, **settings, "isolated": closed, **other}
        with pytest.raises(ReferenceFailed, match="were stopped"):
            compute_activations(model, **arguments)


def test_activations_fall_back_to_onnx_reference(imported: Any, inputs_of: InputsOf, settings: dict[str, Any]) -> None:
    model = imported(of_bfloat16())
    found = compute_activations(model, inputs_of(model), **settings)
    assert found.source.startswith("onnx-reference ")
    ((name, reason),) = found.refused
    assert name == "onnxruntime" and "MatMul" in reason
    assert get_dtype_name(found["m"].dtype) == "bfloat16"


def test_activations_use_named_reference(imported: Any, inputs_of: InputsOf, settings: dict[str, Any]) -> None:
    model = imported(residual_cnn())
    found = compute_activations(model, inputs_of(model), references=["onnx-reference"], **settings)
    assert found.source.startswith("onnx-reference") and not found.refused
    with pytest.raises(UsageError, match="reference iree-llvm-cpu does not provide intermediate values") as caught:
        compute_activations(model, inputs_of(model), references=["iree-llvm-cpu"], **settings)
    assert caught.value.hint == "expected one of onnxruntime, onnx-reference"


def test_activations_list_model_outputs(imported: Any, inputs_of: InputsOf, settings: dict[str, Any]) -> None:
    model = imported(folded())
    found = compute_activations(model, inputs_of(model), **settings)
    assert found.outputs == ("y", "count", "same")
    assert found.get_spec("y").shape == (2, 4) and "nothing" in found


def test_activations_omit_tensor_sequences(imported: Any, inputs_of: InputsOf, settings: dict[str, Any]) -> None:
    model = imported(sequences())
    assert set(compute_activations(model, inputs_of(model), **settings)) == {"x", "r", "n", "joined", "y"}


def test_activations_fail_when_every_reference_fails(imported: Any, settings: dict[str, Any]) -> None:
    nodes = [node("Reshape", ["x", "shape"], ["y"], "reshape")]
    model = imported(model_of(nodes, [("x", FLOAT, (4,)), ("shape", INT64, (1,))], [("y", FLOAT, ("M",))]))
    wrong = {"x": np.ones(4, np.float32), "shape": np.array([3], np.int64)}
    with pytest.raises(ReferenceFailed, match=r"onnxruntime: .*; onnx-reference: ") as failed:
        compute_activations(model, wrong, **settings)
    assert failed.value.stage == "refer"


@pytest.mark.ci
def test_activations_time_out(imported: Any, settings: dict[str, Any]) -> None:
    body = helper.make_graph(
        [node("Identity", ["on"], ["still"]), node("Sin", ["state"], ["next"])],
        "body",
        [helper.make_tensor_value_info(*one) for one in (("turn", INT64, ()), ("on", BOOL, ()), ("state", FLOAT, ()))],
        [helper.make_tensor_value_info(*one) for one in (("still", BOOL, ()), ("next", FLOAT, ()))],
    )
    nodes = [node("Loop", ["turns", "", "x"], ["y"], "repeat", body=body)]
    model = imported(model_of(nodes, [("x", FLOAT, ()), ("turns", INT64, ())], [("y", FLOAT, ())]))
    inputs = {"x": np.array(1, np.float32), "turns": np.array(10**12)}
    with pytest.raises(StageTimeout, match=r"intermediate values of model\.onnx timed out after 1 s") as late:
        compute_activations(model, inputs, **{**settings, "timeout": 1.0})
    assert late.value.stage == "refer"


@pytest.mark.ci
def test_layer_inputs_reject_missing_values_and_unknown_mode(
    imported: Any, inputs_of: InputsOf, settings: dict[str, Any]
) -> None:
    context = {name: settings[name] for name in ("cache", "isolated", "log")}
    (*_, last) = extract_layers(imported(residual_cnn()), **context)
    other = imported(branches_and_loops())
    with pytest.raises(ReferenceFailed, match="layer Sigmoid_head_act: the reference has no value for tensor"):
        select_layer_inputs(last, compute_activations(other, inputs_of(other), **settings))
    with pytest.raises(UsageError, match="invalid mode 'zero'"):
        select_layer_inputs(last, {}, mode="zero")


def test_random_inputs_stay_in_observed_range(imported: Any, inputs_of: InputsOf, settings: dict[str, Any]) -> None:
    context = {name: settings[name] for name in ("cache", "isolated", "log")}
    for proto in (residual_cnn(), branches_and_loops(), shared_weight(), of_bfloat16()):
        model = imported(proto)
        observed = compute_activations(model, inputs_of(model), **settings)
        for layer in extract_layers(model, **context):
            drawn, same, others = (select_layer_inputs(layer, observed, mode="random", seed=seed) for seed in (1, 1, 2))
            for name, value in drawn.items():
                real = observed[name]
                assert (value.dtype, value.shape) == (real.dtype, real.shape)
                assert real.dtype.kind == "b" or (real.min() <= value.min() and value.max() <= real.max())
                np.testing.assert_array_equal(value, same[name])
                assert value.size < 8 or not np.array_equal(value, others[name])


@pytest.mark.parametrize(
    "value",
    [
        np.full((2, 3), np.nan, np.float32),
        np.array([np.inf, -1, 2, -np.inf], np.float16),
        np.zeros((0, 3), np.float32),
        np.array(3.5),
        np.array([1 + 2j, -3j], np.complex64),
        np.array([np.iinfo(np.int64).min, np.iinfo(np.int64).max]),
        np.array([2**64 - 1, 2**63], np.uint64),
        np.array([True, True]),
        np.array(["a", "b"], object),
        np.full(1000, np.float32(0.1)),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_random_inputs_match_any_dtype_and_shape(value: Array, imported: Any, context: dict[str, Any]) -> None:
    nodes = [node("Identity", ["x"], ["y"], "same")]
    (layer,) = extract_layers(imported(model_of(nodes, [("x", FLOAT, (2,))], [("y", FLOAT, (2,))])), **context)
    drawn = select_layer_inputs(layer, {"x": value}, mode="random")["x"]
    assert (drawn.dtype, drawn.shape) == (value.dtype, value.shape)
    if value.dtype.kind in "fiu" and np.isfinite(value).any():
        finite = value[np.isfinite(value)]
        assert np.isfinite(drawn).all() and drawn.min() >= finite.min() and drawn.max() <= finite.max()


def test_activations_reject_models_other_than_onnx(
    tmp_path: Path, isolated: Isolated, settings: dict[str, Any]
) -> None:
    path = tmp_path / "same.mlir"
    path.write_text("func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }")
    with pytest.raises(UsageError, match="expected ONNX or a format that converts to ONNX"):
        compute_activations(import_model(path, isolated=isolated), {}, **settings)
