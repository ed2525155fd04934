from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from hil.controller.backends.references import (
    Reference,
    choose_default_references,
    load_references,
    measure_noise,
    read_expected,
    refer_each,
    run_reference,
    run_reference_with_fallback,
    table,
)
from hil.controller.models.importers import import_model
from hil.controller.models.inputs import make_inputs
from hil.controller.storage.isolation.isolated import Isolated
from hil.core.npy import save_npy
from hil.core.results import Model, Relation, RunResult
from hil.core.tensors import TensorSpec, get_dtype_name, parse_dtype
from hil.errors import ReferenceFailed, ReferenceTooSlow, StageTimeout, StorageError, UsageError
from hil.formats.ort_values import ONNX_TYPES

Save = Callable[..., Path]
FLOAT, BFLOAT16 = TensorProto.FLOAT, TensorProto.BFLOAT16
ALL = ["onnxruntime", "onnx-reference", "iree-llvm-cpu"]


@pytest.fixture
def linear(save_onnx: Save, isolated: Isolated) -> Model:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="fc"), helper.make_node("Relu", ["h"], ["y"], name="r")]
    weight = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(4, 3) - 6, "w")
    path = save_onnx(nodes, [("x", FLOAT, (2, 4))], [("y", FLOAT, (2, 3)), ("h", FLOAT, (2, 3))], [weight])
    return import_model(path, isolated=isolated)


@pytest.mark.parametrize("name", ALL)
def test_every_reference_computes_same_outputs(linear: Model, settings: dict[str, Any], name: str) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    result = run_reference(name, linear, {"x": x}, **settings)
    h = x @ (np.arange(12, dtype=np.float32).reshape(4, 3) - 6)
    assert list(result.outputs) == ["y", "h"]
    np.testing.assert_allclose(result.outputs["h"], h, rtol=1e-6)
    np.testing.assert_allclose(result.outputs["y"], np.maximum(h, 0), rtol=1e-6)
    assert any(char.isdigit() for char in result.source)
    assert result.provenance["reference"] == name and result.provenance["cached"] is False


@pytest.mark.ci
@pytest.mark.parametrize("name", ALL)
def test_results_are_cached_by_model_inputs_and_version(
    linear: Model, settings: dict[str, Any], name: str, save_onnx: Save
) -> None:
    x = np.ones((2, 4), np.float32)
    run_reference(name, linear, {"x": x}, **settings)
    closed = Isolated(1)
    closed.close()
    again = run_reference(name, linear, {"x": x}, **{**settings, "isolated": closed})
    assert again.provenance["cached"] and again.outputs["y"].dtype == np.float32
    with pytest.raises(ReferenceFailed):
        run_reference(name, linear, {"x": x + 1}, **{**settings, "isolated": closed})
    assert not run_reference(name, linear, {"x": x}, **{**settings, "recompute": True}).provenance["cached"]


@pytest.mark.ci
@pytest.mark.parametrize("name", ALL)
def test_references_propagate_nan_and_infinity(save_onnx: Save, settings: dict[str, Any], name: str) -> None:
    path = save_onnx([helper.make_node("Neg", ["x"], ["y"])], [("x", FLOAT, (3,))], [("y", FLOAT, (3,))])
    model = import_model(path, isolated=settings["isolated"])
    y = run_reference(name, model, {"x": np.array([np.nan, np.inf, 1], np.float32)}, **settings).outputs["y"]
    assert np.isnan(y[0]) and y[1] == -np.inf and y[2] == -1


@pytest.mark.ci
@pytest.mark.parametrize("name", ALL)
def test_references_accept_scalars_and_empty_tensors(save_onnx: Save, settings: dict[str, Any], name: str) -> None:
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.float32(3))),
        helper.make_node("Neg", ["c"], ["y"]),
    ]
    path = save_onnx(nodes, [], [("y", FLOAT, ())])
    model = import_model(path, isolated=settings["isolated"])
    y = run_reference(name, model, {}, **settings).outputs["y"]
    assert y.shape == () and y == -3
    path = save_onnx(
        [helper.make_node("Concat", ["x", "x"], ["y"], axis=1)], [("x", FLOAT, (0, 2))], [("y", FLOAT, (0, 4))]
    )
    model = import_model(path, isolated=settings["isolated"])
    assert run_reference(name, model, {"x": np.zeros((0, 2), np.float32)}, **settings).outputs["y"].shape == (0, 4)


# --- dtypes ---


def identity(save: Save, dtype: str, isolated: Isolated) -> Model:
    number = ONNX_TYPES[dtype]
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    shape = numpy_helper.from_array(np.array([6]), "shape")
    return import_model(
        save([node], [("x", number, (2, 3))], [("y", number, (6,))], [shape], opset=21), isolated=isolated
    )


@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *"float16 float32 float64 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz string".split(),
    ],
)
def test_onnxruntime_passes_every_dtype(save_onnx: Save, settings: dict[str, Any], dtype: str) -> None:
    model = identity(save_onnx, dtype, settings["isolated"])
    inputs = make_inputs(model.inputs or (), [])
    result = run_reference("onnxruntime", model, inputs, **settings).outputs["y"]
    assert get_dtype_name(result.dtype) == dtype and result.tolist() == inputs["x"].ravel().tolist()


@pytest.mark.ci
@pytest.mark.parametrize(
    "dtype",
    [
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (4, 8, 16, 32, 64)),
        *"float16 float32 float64 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split(),
    ],
)
def test_iree_passes_every_dtype(save_onnx: Save, settings: dict[str, Any], dtype: str) -> None:
    model = identity(save_onnx, dtype, settings["isolated"])
    inputs = make_inputs(model.inputs or (), [])
    result = run_reference("iree-llvm-cpu", model, inputs, **settings).outputs["y"]
    assert get_dtype_name(result.dtype) == dtype and result.tolist() == inputs["x"].ravel().tolist()


# --- MLIR ---


@pytest.mark.ci
def test_iree_runs_mlir_with_scalars_and_multiple_results(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "m.mlir").write_text(
        """
        func.func @main(%a: tensor<2x?xf32>, %n: i32, %f: f32) -> (tensor<2x?xf32>, i32, f32) {
          %0 = arith.addf %a, %a : tensor<2x?xf32>
          return %0, %n, %f : tensor<2x?xf32>, i32, f32
        }
        """
    )
    model = import_model(tmp_path / "m.mlir", isolated=settings["isolated"])
    assert choose_default_references(model) == ["iree-llvm-cpu"]
    given = {"arg0": np.ones((2, 5), np.float32), "arg1": np.array(-7, np.int32), "arg2": np.float32(0.5)}
    result, refused = run_reference_with_fallback(model, given, **settings)
    assert not refused
    assert list(result.outputs) == ["output0", "output1", "output2"]
    assert (
        (result.outputs["output0"] == 2).all() and result.outputs["output1"] == -7 and result.outputs["output2"] == 0.5
    )
    assert result.outputs["output1"].dtype == np.int32


# --- fallback ---


@pytest.fixture
def bf16_matmul(save_onnx: Save, isolated: Isolated) -> Model:
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    inputs = [("a", BFLOAT16, (2, 3)), ("b", BFLOAT16, (3, 2))]
    return import_model(save_onnx([node], inputs, [("y", BFLOAT16, (2, 2))]), isolated=isolated)


def test_fallback_reference_runs_after_default_fails(bf16_matmul: Model, settings: dict[str, Any]) -> None:
    assert choose_default_references(bf16_matmul) == ["onnxruntime"]
    inputs = make_inputs(bf16_matmul.inputs or (), [])
    result, failed = run_reference_with_fallback(bf16_matmul, inputs, **settings)
    assert result.outputs["y"].dtype == parse_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert result.provenance["reference"] == "onnx-reference" and "onnx reference evaluator" in result.source
    ((refused, why),) = failed.items()
    assert refused == "onnxruntime" and "MatMul" in why.message
    expected = inputs["a"].astype(np.float32) @ inputs["b"].astype(np.float32)
    np.testing.assert_allclose(result.outputs["y"].astype(np.float32), expected, rtol=0.05, atol=0.1)


def test_named_reference_never_falls_back(bf16_matmul: Model, settings: dict[str, Any]) -> None:
    with pytest.raises(ReferenceFailed, match="MatMul"):
        run_reference("onnxruntime", bf16_matmul, make_inputs(bf16_matmul.inputs or (), []), **settings)


def test_fallback_reports_failure_of_every_reference(save_onnx: Save, settings: dict[str, Any]) -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="com.acme")
    path = save_onnx([node], [("x", FLOAT, (2,))], [("y", FLOAT, (2,))], domains=("com.acme",))
    model = import_model(path, isolated=settings["isolated"])
    with pytest.raises(ReferenceFailed, match="no reference can run this model") as caught:
        run_reference_with_fallback(model, {"x": np.zeros(2, np.float32)}, **settings)
    assert all(name in caught.value.message for name in ALL) and "--expected" in caught.value.hint


def test_refer_each_returns_answers_despite_failures(bf16_matmul: Model, settings: dict[str, Any]) -> None:
    inputs = make_inputs(bf16_matmul.inputs or (), [])
    answers, failed = refer_each(["onnxruntime", "onnx-reference"], bf16_matmul, inputs, **settings)
    assert [answer.provenance["reference"] for answer in answers] == ["onnx-reference"]
    assert list(failed) == ["onnxruntime"] and "MatMul" in failed["onnxruntime"].message


@pytest.mark.ci
def test_refer_each_names_every_failed_reference(save_onnx: Save, settings: dict[str, Any]) -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="com.acme")
    path = save_onnx([node], [("x", FLOAT, (2,))], [("y", FLOAT, (2,))], domains=("com.acme",))
    model = import_model(path, isolated=settings["isolated"])
    with pytest.raises(ReferenceFailed) as caught:
        refer_each(ALL, model, {"x": np.zeros(2, np.float32)}, **settings)
    assert all(f"{name}: " in caught.value.message for name in ALL) and "--expected" in caught.value.hint
    with pytest.raises(ReferenceFailed, match="Frobnicate"):
        refer_each(["onnxruntime"], model, {"x": np.zeros(2, np.float32)}, **settings)


def test_foreign_reference_error_becomes_failure(
    linear: Model, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(*_: Any, **__: Any) -> None:
        raise RecursionError("too deep for me")

    odd = Reference(("onnx",), lambda: "odd 1", compute)
    known = {**load_references(), "odd": odd}
    monkeypatch.setattr("hil.controller.backends.references.load_references", lambda: known)
    answers, failed = refer_each(["odd", "onnxruntime"], linear, {"x": np.ones((2, 4), np.float32)}, **settings)
    assert len(answers) == 1 and "RecursionError: too deep for me" in failed["odd"].message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_full_disk_is_no_reference_failure(
    linear: Model, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def compute(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    full = Reference(("onnx",), lambda: "full 1", compute)
    known = dict.fromkeys(load_references(), full)
    monkeypatch.setattr("hil.controller.backends.references.load_references", lambda: known)
    monkeypatch.setattr("hil.controller.backends.references.QUICK_EVALUATOR", full)
    inputs = {"x": np.ones((2, 4), np.float32)}
    with pytest.raises(StorageError, match=os.strerror(number)):
        run_reference_with_fallback(linear, inputs, **settings)
    with pytest.raises(StorageError, match=os.strerror(number)):
        refer_each(ALL, linear, inputs, **settings)
    with pytest.raises(StorageError, match=os.strerror(number)):
        measure_noise(linear, inputs, RunResult("expected outputs", {}), **settings)


def test_onnxruntime_reports_index_out_of_range(save_onnx: Save, settings: dict[str, Any]) -> None:
    node = helper.make_node("Gather", ["t", "i"], ["y"])
    table = numpy_helper.from_array(np.zeros((3, 2), np.float32), "t")
    path = save_onnx([node], [("i", TensorProto.INT64, (1,))], [("y", FLOAT, (1, 2))], [table])
    model = import_model(path, isolated=settings["isolated"])
    with pytest.raises(ReferenceFailed, match="out of"):
        run_reference("onnxruntime", model, {"i": np.array([99])}, **settings)


def test_vmfb_model_lacks_references(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "m.vmfb").write_bytes(b"PK\x03\x04" + bytes(100))
    model = import_model(tmp_path / "m.vmfb", isolated=settings["isolated"])
    assert choose_default_references(model) == []
    with pytest.raises(UsageError, match="does not support vmfb models"):
        run_reference("onnxruntime", model, {}, **settings)
    with pytest.raises(ReferenceFailed, match="no reference supports vmfb models"):
        run_reference_with_fallback(model, {}, **settings)


def test_unknown_reference_error_lists_known_names(linear: Model, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="reference 'oracle' not found") as caught:
        run_reference("oracle", linear, {}, **settings)
    assert all(name in caught.value.hint for name in ALL) and set(load_references()) >= set(ALL)


def test_reference_times_out(linear: Model, settings: dict[str, Any]) -> None:
    with Isolated(1) as pool, pytest.raises(StageTimeout) as caught:
        run_reference(
            "onnxruntime",
            linear,
            {"x": np.ones((2, 4), np.float32)},
            **{**settings, "isolated": pool, "timeout": 0.001},
        )
    assert caught.value.stage == "refer"


# --- expected outputs ---

OUTPUTS = (TensorSpec("y", "float32", (2,)), TensorSpec("z", "bfloat16", (3,)))


def test_expected_outputs_match_by_name_or_order(tmp_path: Path) -> None:
    y, z = np.array([1, 2], np.float32), np.arange(3).astype(ml_dtypes.bfloat16)
    save_npy(tmp_path / "y.npy", y)
    save_npy(tmp_path / "z.npy", z)
    np.savez(tmp_path / "all.npz", z=z, y=y)
    (tmp_path / "y.pb").write_bytes(numpy_helper.from_array(y).SerializeToString())
    for given in (
        [tmp_path / "y.npy", tmp_path / "z.npy"],
        [f"z={tmp_path / 'z.npy'}", f"y={tmp_path / 'y.pb'}"],
        [tmp_path / "all.npz"],
        {"z": z, "y": y},
    ):
        result = read_expected(given, OUTPUTS)
        assert result.source.startswith("expected") and list(result.outputs) == ["y", "z"]
        assert result.outputs["z"].dtype == z.dtype and result.outputs["y"].tolist() == [1, 2]


def test_expected_outputs_accept_iree_run_module_text() -> None:
    assert read_expected(["2xf32=1 2"], OUTPUTS).outputs["y"].tolist() == [1, 2]
    assert list(read_expected(["2xf32=1 2", "3xi32=4"], None).outputs) == ["output0", "output1"]


def test_expected_outputs_accept_other_shape_or_dtype(tmp_path: Path) -> None:
    save_npy(tmp_path / "y.npy", np.zeros((5, 5), np.int64))
    assert read_expected([tmp_path / "y.npy"], OUTPUTS).outputs["y"].shape == (5, 5)


@pytest.mark.parametrize("text", ["nope.npy", "q=y.npy", "y=1 2 3x"])
def test_expected_outputs_reject_invalid_files_and_names(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        read_expected([text], OUTPUTS)
    with pytest.raises(UsageError, match="unknown output 'q'"):
        read_expected({"q": np.zeros(1)}, OUTPUTS)


def test_expected_outputs_reject_names_for_unknown_signature() -> None:
    with pytest.raises(UsageError) as caught:
        read_expected(["q=2xf32=1 2"], None)
    assert "without names" in caught.value.hint and "output0" not in caught.value.hint


def test_results_cache_depends_on_hil_code(
    linear: Model, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"x": np.ones((2, 4), np.float32)}
    run_reference("onnxruntime", linear, given, **settings)
    assert run_reference("onnxruntime", linear, given, **settings).provenance["cached"]
    monkeypatch.setattr("hil.controller.backends.references.own_code", lambda: "another digest")
    assert not run_reference("onnxruntime", linear, given, **settings).provenance["cached"]


def test_slow_evaluator_runs_once(linear: Model, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compute(*_: Any, **__: Any) -> None:
        asked.append("once")
        raise ReferenceTooSlow("requires more than 2 s of CPU time")

    slow = replace(table.QUICK_EVALUATOR, compute=compute)
    monkeypatch.setattr("hil.controller.backends.references.QUICK_EVALUATOR", slow)
    given = {"x": np.ones((2, 4), np.float32)}
    for _ in range(2):
        result, refused = run_reference_with_fallback(linear, given, runtime="onnxruntime", **settings)
        assert result.provenance["reference"] == "onnxruntime" and result.relation is Relation.SAME_LIBRARY
        assert refused["onnx-reference"].message == "requires more than 2 s of CPU time"
    assert asked == ["once"]
    run_reference_with_fallback(linear, given, runtime="onnxruntime", **{**settings, "recompute": True})
    assert asked == ["once", "once"]


def test_default_reference_excludes_self_check(tmp_path: Path, settings: dict[str, Any]) -> None:
    (tmp_path / "m.mlir").write_text("func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }")
    model = import_model(tmp_path / "m.mlir", isolated=settings["isolated"])
    given = {"arg0": np.ones(4, np.float32)}
    with pytest.raises(ReferenceFailed, match="iree-llvm-cpu and iree share importer, compiler") as caught:
        run_reference_with_fallback(model, given, runtime="iree", **settings)
    assert "--expected" in caught.value.hint and "--reference iree-llvm-cpu" in caught.value.hint
    assert run_reference("iree-llvm-cpu", model, given, runtime="iree", **settings).relation is Relation.SELF_CHECK
