"""Suites from models: cases, layers and inputs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import DIGITS, save_model

from hil.controller.models.flows.flow import Flow
from hil.controller.models.flows.flow_registry import load_flow
from hil.controller.models.importers import import_model
from hil.controller.records.suite import SuiteModelFile
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.controller.storage.run_context import RunContext
from hil.controller.workloads.suites.cases.sources import choose_common_flow, choose_flow, open_suite
from hil.controller.workloads.suites.cases.spec import CaseData, Suite, list_model_files
from hil.controller.workloads.suites.request import Settings, SuiteRequest
from hil.errors import ImportFailed, UsageError

PLAIN = Flow("onnxruntime", "onnxruntime")


@pytest.fixture(scope="module")
def context(isolated: Isolated, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    return RunContext(Cache(tmp_path_factory.mktemp("cache")), isolated)


@pytest.fixture
def data_of(context: RunContext, tmp_path: Path) -> Callable[[Suite, str], CaseData]:
    def make(suite: Suite, case_id: str) -> CaseData:
        folder = tmp_path / "case" / case_id
        folder.mkdir(parents=True)
        (spec,) = [one for one in suite.cases if one.id == case_id]
        return spec.make(folder)

    return make


def two_layers(path: Path, batch: int | str = 2) -> Path:
    """y = relu(x W) over [batch, 3]."""
    weight = numpy_helper.from_array(np.array([[1, -1], [2, 0], [0, 3]], np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], "mix"), helper.make_node("Relu", ["h"], ["y"], "clamp")]
    value = TensorProto.FLOAT
    return save_model(path, nodes, [("x", value, [batch, 3])], [("y", value, [batch, 2])], [weight])


def ids(suite: Suite) -> list[str]:
    return [case.id for case in suite.cases]


def test_suite_has_cases_for_model_and_layers(tmp_path, context):
    two_layers(tmp_path / "net.onnx")
    suite = open_suite(SuiteRequest(str(tmp_path)), PLAIN, context)
    assert ids(suite) == ["net_full_model", "net_layer_MatMul_mix", "net_layer_Relu_clamp"]
    assert [case.op for case in suite.cases] == ["", "MatMul", "Relu"]
    assert [case.layer for case in suite.cases] == ["", "MatMul_mix", "Relu_clamp"]
    assert (suite.name, suite.expected) == (tmp_path.name, tmp_path / "expected.toml")
    digest = import_model(tmp_path / "net.onnx", cache=context.cache, isolated=context.isolated).digest
    assert list_model_files(suite.cases) == {"net": SuiteModelFile(path=str(tmp_path / "net.onnx"), digest=digest)}


@pytest.mark.parametrize(
    ("options", "runtimes"),
    [
        ({"is_default_flow": True}, ["tflite", "iree"]),
        ({}, ["iree", "iree"]),
        ({"is_default_flow": True, "runtime": "iree"}, ["iree", "iree"]),
    ],
)
def test_default_flow_yields_to_only_runtime_of_format(tmp_path, context, options, runtimes):
    shutil.copyfile(DIGITS.parent / "tflite/digits.tflite", tmp_path / "digits.tflite")
    two_layers(tmp_path / "net.onnx")
    request = SuiteRequest(str(tmp_path), layers=False, **options)
    suite = open_suite(request, choose_flow(request), context)
    assert [case.flow.runtime for case in suite.cases] == runtimes
    assert choose_common_flow(suite.cases, choose_flow(request)).runtime == "iree"
    assert choose_common_flow(suite.cases[:1], choose_flow(request)).runtime == runtimes[0]


def test_suite_options_omit_or_fuse_layers(tmp_path, context):
    path = str(two_layers(tmp_path / "net.onnx"))
    assert ids(open_suite(SuiteRequest(path, layers=False), PLAIN, context)) == ["net_full_model"]
    assert ids(open_suite(SuiteRequest(path, group="fused"), PLAIN, context)) == [
        "net_full_model",
        "net_layer_MatMul+Relu_mix",
    ]


@pytest.mark.parametrize(
    ("merge", "left"), [("content", ["first", "second"]), ("shape", ["first"]), ("none", ["first", "again", "second"])]
)
def test_merge_option_removes_repeated_layers(tmp_path, context, merge, left):
    tensors = [numpy_helper.from_array(np.eye(3, dtype=np.float32) * size, f"w{size}") for size in (1, 2)]
    nodes = [
        helper.make_node("MatMul", ["x", f"w{size}"], [name], name)
        for name, size in {"first": 1, "again": 1, "second": 2}.items()
    ]
    outputs = [(name, TensorProto.FLOAT, [2, 3]) for name in ("first", "again", "second")]
    path = save_model(tmp_path / "net.onnx", nodes, [("x", TensorProto.FLOAT, [2, 3])], outputs, tensors)
    suite = open_suite(SuiteRequest(str(path), merge=merge), PLAIN, context)
    assert ids(suite) == ["net_full_model", *(f"net_layer_MatMul_{name}" for name in left)]


def test_suite_rejects_unknown_merge_option(tmp_path, context):
    with pytest.raises(UsageError, match="invalid merge mode 'size'"):
        open_suite(SuiteRequest(str(two_layers(tmp_path / "net.onnx")), merge="size"), PLAIN, context)


def test_layer_case_uses_reference_activations(tmp_path, context, data_of):
    suite = open_suite(SuiteRequest(str(two_layers(tmp_path / "net.onnx"))), PLAIN, context)
    whole, clamp = data_of(suite, "net_full_model"), data_of(suite, "net_layer_Relu_clamp")
    (hidden,) = clamp.inputs.values()
    np.testing.assert_allclose(hidden, whole.inputs["x"] @ np.array([[1, -1], [2, 0], [0, 3]]), rtol=1e-5)
    assert [node.op_type for node in onnx.load(clamp.path).graph.node] == ["Relu"]


def test_random_layer_inputs_stay_in_reference_range(tmp_path, context, data_of):
    suite = open_suite(SuiteRequest(str(two_layers(tmp_path / "net.onnx")), layer_inputs="random"), PLAIN, context)
    whole, clamp = data_of(suite, "net_full_model"), data_of(suite, "net_layer_Relu_clamp")
    (hidden,) = clamp.inputs.values()
    real = whole.inputs["x"] @ np.array([[1, -1], [2, 0], [0, 3]], np.float32)
    assert real.min() <= hidden.min() and hidden.max() <= real.max()
    assert not np.array_equal(hidden, real)


def test_files_beside_model_give_inputs_and_outputs(tmp_path, context, data_of):
    two_layers(tmp_path / "net.onnx", batch="N")
    np.savez(tmp_path / "net.inputs.npz", x=np.ones((5, 3), np.float32))
    np.savez(tmp_path / "net.expected.npz", y=np.zeros((5, 2), np.float32))
    suite = open_suite(SuiteRequest(str(tmp_path)), PLAIN, context)
    whole, clamp = data_of(suite, "net_full_model"), data_of(suite, "net_layer_Relu_clamp")
    assert whole.inputs["x"].shape == (5, 3)
    assert whole.expected["y"].shape == (5, 2)
    assert next(iter(clamp.inputs.values())).shape == (5, 2)


def test_open_dimension_raises_error_until_set(tmp_path, context, data_of):
    path = str(two_layers(tmp_path / "net.onnx", batch="N"))
    with pytest.raises(ImportFailed, match="N"):
        data_of(open_suite(SuiteRequest(path), PLAIN, context), "net_full_model")
    suite = open_suite(SuiteRequest(path, dims={"N": 7}), PLAIN, context)
    assert len(suite.cases) == 3
    assert data_of(suite, "net_layer_MatMul_mix").inputs["x"].shape == (7, 3)


def test_range_of_sizes_makes_case_of_every_edge(tmp_path, context, data_of):
    two_layers(tmp_path / "net.onnx", batch="N")
    two_layers(tmp_path / "fixed.onnx")
    np.savez(tmp_path / "net.inputs.npz", x=np.ones((5, 3), np.float32))
    suite = open_suite(SuiteRequest(str(tmp_path), dims={"N": "1..3"}), PLAIN, context)
    fixed, sized = [[one for one in ids(suite) if one.startswith(name)] for name in ("fixed", "net")]
    assert len(fixed) == 3
    # The layers are those of the largest size alone.
    assert sized == [
        *(f"net_N-{size}_full_model" for size in (1, 2, 3)),
        "net_N-3_layer_MatMul_mix",
        "net_N-3_layer_Relu_clamp",
    ]
    assert [data_of(suite, f"net_N-{size}_full_model").inputs["x"].shape for size in (1, 2)] == [(1, 3), (2, 3)]


def test_project_file_sets_inputs_of_models(tmp_path, context, data_of):
    for name in ("net", "other"):
        two_layers(tmp_path / f"{name}.onnx", batch="N")
    per_model = {"net.*": {"dims": {"N": 4}, "seed": 5, "input_range": (10.0, 11.0)}}
    request = SuiteRequest(str(tmp_path), dims={"N": 2}, settings=Settings(per_model=per_model))
    suite = open_suite(request, PLAIN, context)
    x, other = (data_of(suite, f"{name}_full_model").inputs["x"] for name in ("net", "other"))
    assert (x.shape, other.shape) == ((4, 3), (2, 3))
    assert x.min() >= 10 and other.max() < 10
    del per_model["net.*"]["seed"]
    again = open_suite(request, PLAIN, context)
    shutil.rmtree(tmp_path / "case")
    assert not np.array_equal(data_of(again, "net_full_model").inputs["x"], x)


def test_input_range_sets_inputs_of_whole_model_and_layers(tmp_path, context, data_of):
    two_layers(tmp_path / "net.onnx", batch=2)
    request = SuiteRequest(str(tmp_path), settings=Settings(input_range=(10.0, 11.0)))
    suite = open_suite(request, PLAIN, context)
    whole = data_of(suite, "net_full_model").inputs["x"]
    assert whole.min() >= 10 and whole.max() <= 11
    shutil.rmtree(tmp_path / "case")
    # The layer's input is the activation that the reference computes from the model's input.
    assert np.array_equal(data_of(suite, "net_layer_MatMul_mix").inputs["x"], whole)


def test_project_file_sets_size_range_of_models(tmp_path, context):
    for name in ("net", "other"):
        two_layers(tmp_path / f"{name}.onnx", batch="N")
    settings = Settings(per_model={"net.*": {"dims": {"N": "1..2"}}})
    request = SuiteRequest(str(tmp_path), dims={"N": 2}, layers=False, settings=settings)
    suite = open_suite(request, PLAIN, context)
    assert ids(suite) == ["net_N-1_full_model", "net_N-2_full_model", "other_full_model"]
    settings = Settings(per_model={"net.*": {"dims": {"N": 2}}})
    request = SuiteRequest(str(tmp_path / "net.onnx"), dims={"N": "1..3"}, layers=False, settings=settings)
    assert ids(open_suite(request, PLAIN, context)) == ["net_full_model"]


@pytest.mark.parametrize("is_default", [True, False])
def test_project_file_sets_runtime_of_model(tmp_path, context, is_default):
    for name in ("net", "other"):
        two_layers(tmp_path / f"{name}.onnx", batch=2)
    settings = Settings(per_model={"net.*": {"runtime": "onnxruntime"}})
    request = SuiteRequest(str(tmp_path), layers=False, settings=settings, is_default_flow=is_default)
    suite = open_suite(request, load_flow("iree-O3"), context)
    flows = {case.id: case.flow and (case.flow.name, case.flow.runtime) for case in suite.cases}
    assert flows == {"net_full_model": ("iree-O3-onnxruntime", "onnxruntime"), "other_full_model": ("iree-O3", "iree")}


def test_suite_rejects_unknown_runtime_of_model(tmp_path, context):
    two_layers(tmp_path / "net.onnx", batch=2)
    settings = Settings(per_model={"net.*": {"runtime": "onnxrt"}})
    with pytest.raises(UsageError, match=r"runtime of net\.onnx in the project file: runtime 'onnxrt' not found"):
        open_suite(SuiteRequest(str(tmp_path), settings=settings), load_flow("iree"), context)


def test_suite_rejects_unknown_dimension(tmp_path, context):
    path = str(two_layers(tmp_path / "net.onnx", batch="N"))
    with pytest.raises(UsageError, match="dimension not found in ") as caught:
        open_suite(SuiteRequest(path, dims={"M": 7}), PLAIN, context)
    assert "N" in caught.value.hint


def test_unreadable_model_becomes_failing_case(tmp_path, context, data_of):
    two_layers(tmp_path / "net.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07nonsense")
    suite = open_suite(SuiteRequest(str(tmp_path)), PLAIN, context)
    assert ids(suite)[:2] == ["broken_full_model", "net_full_model"]
    assert len(suite.cases) == 4
    with pytest.raises(ImportFailed, match=r"broken\.onnx"):
        data_of(suite, "broken_full_model")


def test_content_digest_covers_model_flow_and_inputs(tmp_path, context):
    two_layers(tmp_path / "net.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07nonsense")

    def content(flow: Flow = PLAIN) -> str:
        broken, *net = open_suite(SuiteRequest(str(tmp_path)), flow, context).cases
        assert broken.content == "" and len(net) == 3
        (digest,) = {case.content for case in net}
        return digest

    seen = [content(), content(replace(PLAIN, rtol=0.5))]
    np.savez(tmp_path / "net.inputs.npz", x=np.ones((2, 3), np.float32))
    seen.append(content())
    np.savez(tmp_path / "net.calibration.npz", x=np.ones((1, 2, 3), np.float32))
    seen.append(content())
    two_layers(tmp_path / "net.onnx", batch="N")
    seen.append(content())
    assert len(set(seen)) == 5 and content() == seen[-1]


def test_mismatched_inputs_file_raises_import_error(tmp_path, context, data_of):
    two_layers(tmp_path / "net.onnx")
    np.savez(tmp_path / "net.inputs.npz", x=np.ones((9, 9), np.float32))
    suite = open_suite(SuiteRequest(str(tmp_path)), PLAIN, context)
    assert ids(suite) == ["net_full_model"]
    with pytest.raises(ImportFailed, match="expected 2x3 float32"):
        data_of(suite, "net_full_model")


def test_recipe_applies_before_layer_split(tmp_path, context, data_of):
    suite = open_suite(
        SuiteRequest(str(DIGITS / "digits_cnn.onnx")), load_flow("onnxruntime-static-int8-per-channel"), context
    )
    assert any("QuantizeLinear" in case.op for case in suite.cases)
    whole = data_of(suite, "digits_cnn_full_model")
    assert whole.plain_path == DIGITS / "digits_cnn.onnx"
    assert "QuantizeLinear" in {node.op_type for node in onnx.load(whole.path).graph.node}


def test_directory_without_models_gives_empty_suite(tmp_path, context):
    assert open_suite(SuiteRequest(str(tmp_path)), PLAIN, context).cases == ()


@pytest.mark.parametrize(
    ("source", "meant"), [("models", "'@models'"), ("operator", "'@operators'"), ("@model", "'@models'")]
)
def test_missing_source_error_suggests_name(context, source, meant):
    with pytest.raises(UsageError, match=r"suite, model or directory .* not found") as caught:
        open_suite(SuiteRequest(source), PLAIN, context)
    assert f"did you mean {meant}" in caught.value.hint


def test_local_directory_never_selects_built_in_suite(tmp_path, context, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("models", "operators"):
        (tmp_path / name).mkdir()
        two_layers(tmp_path / name / "net.onnx")
        suite = open_suite(SuiteRequest(name, layers=False), PLAIN, context)
        assert ids(suite) == ["net_full_model"] and suite.expected == Path(name, "expected.toml")


@pytest.mark.ci
def test_built_in_models_have_whole_and_layer_cases(context, data_of):
    suite = open_suite(SuiteRequest("@models"), PLAIN, context)
    found = ids(suite)
    assert len(found) == len(set(found)) > 200
    assert all(re.fullmatch(r"[A-Za-z0-9._+-]+", name) for name in found)
    models = [case.model for case in suite.cases]
    assert {name for name in models if f"{name}_full_model" not in found} == set()
    assert suite.name == "models" and suite.source == "@models"
    assert suite.expected is not None and suite.expected.name == "models.toml" and suite.expected.is_file()
    dynamic = data_of(suite, "dynamic_attention_full_model")
    assert dynamic.dims == {"batch": 2, "time": 7}
    # The bodies of control flow stay with their node.
    assert [one for one in found if one.startswith("loop_layer_Loop")] != []
