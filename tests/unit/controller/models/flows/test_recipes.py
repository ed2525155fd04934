"""Models produced by recipes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.flow_models import residual_cnn, weights
from support.models import DIGITS, save_model

from hil.controller.backends.references.runners.onnx import open_exact_session
from hil.controller.models.flows import onnx_recipes
from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.recipe import apply_recipe
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.errors import ImportFailed, UsageError

FLOAT = TensorProto.FLOAT
CNN = DIGITS / "digits_cnn.onnx"
STATIC = Flow("static", "onnxruntime", recipe="static-int8")
DYNAMIC = Flow("dynamic", "onnxruntime", recipe="dynamic-int8")
HALF = Flow("half", "onnxruntime", recipe="float16")


@pytest.fixture
def context(cache: Cache, isolated: Isolated) -> RunContext:
    return RunContext(cache, isolated)


@pytest.fixture
def apply(context: RunContext, tmp_path: Path):
    def call(flow: Flow, path: Path, inputs: Any = (), **settings: Any) -> Path:
        return apply_recipe(flow, path, inputs, context, tmp_path / "recipe.log", **settings)

    return call


@pytest.fixture(scope="module")
def images() -> list[dict[str, np.ndarray]]:
    with np.load(DIGITS / "digits_test.npz") as held_out:
        return [{"image": image[None]} for image in held_out["image"]]


def static(**settings: Any) -> Flow:
    return Flow("static", "onnxruntime", recipe="static-int8", settings=settings)


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {one.name: numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


def run(path: Path, sample: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return open_exact_session(path).run(None, dict(sample))


def sqnr(path: Path, plain: Path, samples: list[dict[str, np.ndarray]]) -> float:
    exact = np.concatenate([run(plain, sample)[0] for sample in samples])
    error = np.concatenate([run(path, sample)[0] for sample in samples]) - exact
    return float(10 * np.log10((exact**2).sum() / (error**2).sum()))


def signature(path: Path) -> list[tuple[str, str, list[Any]]]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [(node.name, node.type, node.shape) for node in (*session.get_inputs(), *session.get_outputs())]


def test_flow_without_recipe_returns_model_unchanged(apply):
    assert apply(Flow("plain", "iree"), CNN) == CNN


@pytest.mark.parametrize("flow", [STATIC, DYNAMIC, HALF], ids=lambda flow: flow.name)
def test_recipe_preserves_signature_and_accuracy(apply, images, flow: Flow):
    made = apply(flow, CNN, images[:8])
    assert made.name == CNN.name
    assert signature(made) == signature(CNN)
    assert 30 < sqnr(made, CNN, images[20:28]) < 90


def test_recipe_preserves_symbolic_dimensions(apply):
    path = DIGITS / "digits_cnn_batch.onnx"
    made = apply(STATIC, path, dims={"N": 2})
    assert signature(made) == signature(path)
    # Shapes that repeat the symbol would contradict a size given later.
    graph = onnx.load(made).graph
    stated = {value.name for value in graph.value_info}
    assert stated
    assert stated <= {name for node in graph.node for name in node.output} - {"logits"}
    with pytest.raises(UsageError, match="dimension"):
        apply(STATIC, path)


def test_float16_recipe_converts_every_weight(apply):
    kinds = {name: array.dtype for name, array in tensors(apply(HALF, CNN)).items()}
    assert set(kinds.values()) == {np.dtype(np.float16)}


@pytest.mark.parametrize("flow", [HALF, DYNAMIC], ids=["float16", "dynamic"])
def test_recipe_reads_linked_external_data(apply, tmp_path: Path, flow: Flow):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.mkdir()
    onnx.save(onnx.load(CNN), real / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    for file in real.iterdir():
        (link / file.name).symlink_to(file)
    made = {folder: tensors(apply(flow, folder / "m.onnx")) for folder in (real, link)}
    assert made[real].keys() == made[link].keys()
    assert all(np.array_equal(made[real][name], made[link][name]) for name in made[real])


def test_check_prepared_rejects_changed_model(tmp_path: Path):
    x, y = (helper.make_tensor_value_info(name, FLOAT, (4,)) for name in "xy")
    for name, op in (("plain", "Relu"), ("same", "Relu"), ("other", "Neg")):
        graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", [x], [y])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, tmp_path / name)
    onnx_recipes.check_prepared(tmp_path / "plain", tmp_path / "same", [])
    with pytest.raises(ImportFailed, match="quant_pre_process changed output y"):
        onnx_recipes.check_prepared(tmp_path / "plain", tmp_path / "other", [])


def test_static_recipe_sets_scale_per_channel_or_tensor(apply, images):
    per_channel = tensors(apply(static(per_channel=True), CNN, images[:4]))
    per_tensor = tensors(apply(static(per_channel=False), CNN, images[:4]))
    scales = {name for name in per_channel if name.endswith("weight_scale")}
    assert len(scales) == 3
    for name in scales:
        weight = per_channel[name.replace("_scale", "_quantized")]
        assert weight.dtype == np.int8
        assert per_channel[name].shape == (weight.shape[0],)
        assert len(set(per_channel[name].tolist())) > 1
        assert per_tensor[name].shape == ()


def test_per_channel_scales_improve_uneven_channels(apply, tmp_path: Path):
    path = residual_cnn(tmp_path / "cnn.onnx", spread=30)
    test = [{"image": np.random.default_rng(5).standard_normal((1, 3, 16, 16), np.float32)}]
    per_channel, per_tensor = (apply(static(per_channel=flag), path) for flag in (True, False))
    assert sqnr(per_channel, path, test) > sqnr(per_tensor, path, test) + 6


def test_static_recipe_takes_ranges_from_samples(apply, images):
    calibrated = apply(STATIC, CNN, images[:8])
    shifted = apply(STATIC, CNN, [{"image": sample["image"] * 50 + 100} for sample in images[:8]])
    assert tensors(calibrated)["image_scale"] == pytest.approx(1 / 255, rel=1e-3)
    assert tensors(shifted)["image_scale"] == pytest.approx(150 / 255, rel=1e-3)
    assert sqnr(shifted, CNN, images[20:28]) < sqnr(calibrated, CNN, images[20:28]) - 20


def test_static_recipe_reads_calibration_file(apply, images, tmp_path: Path):
    path = Path(shutil.copy(CNN, tmp_path / "cnn.onnx"))
    np.savez(tmp_path / "cnn.calibration.npz", image=np.stack([sample["image"] for sample in images[:8]]))
    from_file = apply(STATIC, path)
    assert tensors(from_file)["image_scale"] == pytest.approx(1 / 255, rel=1e-3)
    assert apply(STATIC, path, images[:8]) == from_file  # the same samples: the same model
    assert apply(STATIC, path, images[8:16]) != from_file  # given samples take precedence over the file


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"image": np.zeros((3, 1, 1, 8, 9), np.float32)}, "expected 1x1x8x8 float32"),
        ({"image": np.zeros((3, 1, 1, 8, 8), np.float64)}, "float64"),
        ({"picture": np.zeros((3, 1, 1, 8, 8), np.float32)}, "no input 'picture'"),
        ({"image": np.zeros((0, 1, 1, 8, 8), np.float32)}, "expected an array per input"),
        ({"image": np.zeros((2, 1), np.float32), "b": np.zeros((3, 1), np.float32)}, "expected an array per input"),
        ({}, "invalid arrays in "),
    ],
)
def test_static_recipe_rejects_invalid_calibration_file(apply, tmp_path: Path, arrays, message: str):
    path = Path(shutil.copy(CNN, tmp_path / "cnn.onnx"))
    np.savez(tmp_path / "cnn.calibration.npz", **arrays)
    with pytest.raises(UsageError, match=r"cnn\.calibration\.npz") as caught:
        apply(STATIC, path)
    assert message in caught.value.message


def test_static_recipe_draws_reproducible_random_samples(apply, isolated, tmp_path: Path):
    made = apply(static(samples=4), CNN)
    elsewhere = RunContext(Cache(tmp_path / "other"), isolated)
    again = apply_recipe(static(samples=4), CNN, [], elsewhere, tmp_path / "other.log")
    assert again != made
    assert again.read_bytes() == made.read_bytes()
    assert apply(static(samples=5), CNN) != made


def test_recipe_caches_result(apply, cache: Cache, tmp_path: Path):
    made = apply(STATIC, CNN)
    pool = Isolated(1)
    pool.close()  # the closed pool cannot run anything
    stopped = RunContext(cache, pool)
    assert apply_recipe(STATIC, CNN, [], stopped, tmp_path / "log") == made
    with pytest.raises(ImportFailed):
        apply_recipe(static(per_channel=True), CNN, [], stopped, tmp_path / "log")


@pytest.mark.parametrize(
    "settings",
    [{"activations": "uint8"}, {"method": "percentile"}, {"reduce_range": True}],
    ids=str,
)
def test_recipe_settings_change_model_slightly(apply, images, settings: dict[str, Any]):
    usual, other = apply(STATIC, CNN, images[:8]), apply(static(**settings), CNN, images[:8])
    assert other.read_bytes() != usual.read_bytes()
    assert sqnr(other, CNN, images[20:28]) > 20


def test_reduce_range_narrows_weights(apply, images):
    weight = tensors(apply(static(reduce_range=True), CNN, images[:4]))["conv2.weight_quantized"]
    assert np.abs(weight.astype(int)).max() == 64


def test_recipe_preserves_external_weights_external(apply, images, tmp_path: Path):
    path = tmp_path / "big.onnx"
    onnx.save(onnx.load(CNN), path, save_as_external_data=True, location="big.bin", size_threshold=64)
    for flow in (STATIC, DYNAMIC, HALF):
        made = apply(flow, path, images[:4])
        assert len([file for file in made.parent.iterdir() if file.name.startswith("big.onnx")]) == 2
        assert sqnr(made, path, images[20:24]) > 25


def test_float16_recipe_converts_subgraphs(apply, tmp_path: Path):
    value = [("one", FLOAT, [4])]
    branch = [helper.make_node("Mul", ["scaled", "two"], ["one"], "times")]
    other = [helper.make_node("Add", ["scaled", "two"], ["one"], "plus")]
    graphs = [
        helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(*value[0])])
        for name, nodes in (("then", branch), ("else", other))
    ]
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["scaled"], "scale"),
        helper.make_node("If", ["which"], ["chosen"], "if", then_branch=graphs[0], else_branch=graphs[1]),
        helper.make_node("Max", ["chosen", "scaled"], ["above"], "max"),  # two of these share an input
        helper.make_node("Min", ["chosen", "scaled"], ["below"], "min"),
        helper.make_node("Sub", ["above", "below"], ["y"], "difference"),
    ]
    path = save_model(
        tmp_path / "branches.onnx",
        nodes,
        [("x", FLOAT, [4]), ("which", TensorProto.BOOL, [])],
        [("y", FLOAT, [4])],
        [numpy_helper.from_array(np.array([2, 2, 2, 2], np.float32), "two")],
    )
    made = apply(HALF, path)
    x = np.array([-1.5, 0.25, 1, 3], np.float32)
    for which in (True, False):
        sample = {"x": x, "which": np.array(which)}
        np.testing.assert_allclose(run(made, sample)[0], run(path, sample)[0], rtol=1e-3)


def test_recipe_reports_unsupported_model(apply, tmp_path: Path):
    integers = save_model(
        tmp_path / "integers.onnx",
        [helper.make_node("Add", ["x", "x"], ["y"], "twice")],
        [("x", TensorProto.INT64, [4])],
        [("y", TensorProto.INT64, [4])],
    )
    for flow in (STATIC, DYNAMIC):
        with pytest.raises(ImportFailed, match="no operators to quantize; operators: Add"):
            apply(flow, integers)
        with pytest.raises(ImportFailed, match="already quantized: found DequantizeLinear"):
            apply(flow, DIGITS / "digits_cnn_int8.onnx")
    with pytest.raises(ImportFailed, match="no float32 values to convert"):
        apply(HALF, integers)
    mlir = tmp_path / "m.mlir"
    mlir.write_text("func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {\n  return %x : tensor<4xf32>\n}\n")
    with pytest.raises(ImportFailed, match=r"the recipe float16 supports only onnx models: m\.mlir is mlir"):
        apply(HALF, mlir)


def test_recipe_reports_tool_error(apply, tmp_path: Path):
    # The ONNX checker accepts the model; ONNX Runtime rejects the mismatched types during calibration.
    weight = numpy_helper.from_array(weights(4, 4, seed=1, fan_in=4).astype(np.float64), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    path = save_model(tmp_path / "odd.onnx", [node], [("x", FLOAT, [1, 4])], [("y", FLOAT, [1, 4])], [weight])
    with pytest.raises(ImportFailed, match=r"cannot apply the recipe static-int8 to odd\.onnx.*Type") as caught:
        apply(STATIC, path)
    assert caught.value.stage == "import"
    assert "Traceback" in caught.value.detail


def test_recipe_rejects_invalid_setting(apply):
    with pytest.raises(ImportFailed, match="invalid value 'mean' for setting method") as caught:
        apply(static(method="mean"), CNN)
    assert caught.value.hint == "expected one of minmax, percentile"
    with pytest.raises(UsageError, match="unknown setting 'per_chanel'"):
        apply(static(per_chanel=True), CNN)


def test_package_recipe_receives_settings_and_may_crash(tmp_path: Path, monkeypatch, cache: Cache):
    site = tmp_path / "site"
    info = site / "cutter-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cutter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hil.recipes]\nround = cutter_recipe:ROUND\n")
    (site / "cutter_recipe.py").write_text(
        """
import os
import onnx
from onnx import numpy_helper
from hil.controller.models.flows.recipe import Recipe

ROUND = Recipe("cutter_recipe:apply", settings={"digits": 2})

def apply(model, output, external, samples, digits):
    assert not samples and not external
    if digits < 0:
        os.abort()
    read = onnx.load(model)
    for tensor in read.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == "float32":
            tensor.CopyFrom(numpy_helper.from_array(array.round(digits), tensor.name))
    onnx.save(read, output)
"""
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    with Isolated(1) as pool:
        context = RunContext(cache, pool)
        made = apply_recipe(
            Flow("f", "iree", recipe="round", settings={"digits": 1}), CNN, [], context, tmp_path / "log"
        )
        exact = tensors(CNN)["conv1.weight"]
        np.testing.assert_array_equal(tensors(made)["conv1.weight"], exact.round(1))
        dying = Flow("f", "iree", recipe="round", settings={"digits": -1})
        with pytest.raises(ImportFailed, match=r"cannot apply the recipe round to .*SIGABRT"):
            apply_recipe(dying, CNN, [], context, tmp_path / "log")
