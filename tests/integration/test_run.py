"""`hil run` on the simulator: outcome, exit code and record of passing and failing runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.models import DIGITS, save_model
from support.slow import slow_except

FLOAT, BFLOAT16 = TensorProto.FLOAT, TensorProto.BFLOAT16


@pytest.mark.daily
@pytest.mark.parametrize("model", ["digits_cnn", "digits_cnn_int8"])
@pytest.mark.parametrize("runtime", ["iree", "onnxruntime"])
def test_digits_pass_on_both_runtimes(hil, simulator, model, runtime):
    ended = hil("run", DIGITS / f"{model}.onnx", "--board", simulator, "--runtime", runtime, "--json")
    assert ended.code == 0
    assert ended.case["outcome"] == "PASS"
    assert ended.case["verdicts"][0]["outputs"][0]["mismatches"] == 0
    assert ended.case["device"]["p50_ns"] > 0


def test_board_recognizes_digits(hil, simulator, tmp_path):
    digits = np.load(DIGITS / "digits_test.npz")
    np.save(tmp_path / "images.npy", digits["image"])
    ended = hil(
        "run", DIGITS / "digits_cnn_batch.onnx", "--dim", "N=64", "--input", "image=images.npy",
        "--board", simulator, "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    logits = np.load(Path(tmp_path, ended.document["folder"], ended.case["outputs"][0]["file"]))
    assert (logits.argmax(1) == digits["label"]).mean() > 0.95


@pytest.mark.daily
def test_run_stores_record_for_runs_show(hil, simulator, doubling, tmp_path):
    ended = hil("run", doubling, "--board", simulator, "--iterations", 5, "--warmup", 2, "--json")
    folder = tmp_path / ended.document["folder"]
    assert json.loads((folder / "run.json").read_text())["outcome"] == "PASS"
    x = np.load(folder / ended.case["inputs"][0]["file"])
    y = np.load(folder / ended.case["outputs"][0]["file"])
    np.testing.assert_array_equal(y, x + x)
    assert len(ended.case["device"]["samples_ns"]) == 5
    assert (folder / "doubling" / "logs" / "compile.log").exists()
    shown = hil("runs", "show", "latest", "--json")
    assert shown.document["id"] == ended.document["id"]
    assert [row["id"] for row in hil("runs", "list", "--json").document["runs"]] == [ended.document["id"]]


@pytest.mark.daily
def test_second_run_uses_cached_program_and_reference(hil, simulator, doubling):
    hil("run", doubling, "--board", simulator)
    case = hil("run", doubling, "--board", simulator, "--json").case
    assert case["artifact"]["cached"]
    assert case["references"][0]["provenance"]["cached"]
    assert case["pushed_bytes"] == 0
    again = hil("run", doubling, "--board", simulator, "--recompute-cache", "--json").case
    assert not again["artifact"]["cached"]
    assert not again["references"][0]["provenance"]["cached"]


def test_run_compiles_identical_model_once(hil, simulator, doubling, tmp_path):
    (tmp_path / "copy.onnx").write_bytes(doubling.read_bytes())
    hil("run", doubling, "--board", simulator)
    for options in ([], ["--recompute-cache"]):
        cases = hil("run", doubling, "copy.onnx", "--board", simulator, *options, "--json").document["cases"]
        made = [case["artifact"]["cached"] for case in cases] + [
            case["references"][0]["provenance"]["cached"] for case in cases
        ]
        assert made.count(False) == (2 if options else 0)


def test_pass_with_empty_outputs_reports_zero_elements(hil, simulator, tmp_path):
    node, values = helper.make_node("Add", ["e", "e"], ["f"]), [("e", FLOAT, [0, 3])]
    save_model(tmp_path / "empty.onnx", [node], values, [("f", FLOAT, [0, 3])])
    ended = hil("run", "empty.onnx", "--board", simulator)
    assert ended.code == 0
    assert "0 elements compared" in ended.out
    assert "0 elements compared" in hil("run", "empty.onnx", "--board", simulator, "--json").case["reason"]


def test_reference_fallback_prints_reason(hil, simulator, tmp_path):
    # ONNX Runtime has no CPU kernel for a bfloat16 product. The ONNX evaluator has one.
    node, values = helper.make_node("MatMul", ["a", "b"], ["y"]), [("a", BFLOAT16, [2, 3]), ("b", BFLOAT16, [3, 2])]
    save_model(tmp_path / "product.onnx", [node], values, [("y", BFLOAT16, [2, 2])])
    shown = " ".join(hil("run", "product.onnx", "--board", simulator).out.split())
    assert "against onnx reference evaluator" in shown
    assert "note reference onnxruntime failed: ONNX Runtime cannot load the model:" in shown


@pytest.mark.daily
def test_wrong_expected_output_fails_with_statistics(hil, simulator, doubling, tmp_path):
    np.save(tmp_path / "x.npy", np.array([1, 2, 3, 4], np.float32))
    np.save(tmp_path / "y.npy", np.array([2, 4, 6.5, 8], np.float32))
    ended = hil("run", doubling, "--board", simulator, "--input", "x=x.npy", "--expected", "y.npy", "--json")
    assert ended.code == 1
    (output,) = ended.case["verdicts"][0]["outputs"]
    assert (output["mismatches"], output["worst_index"], output["worst_values"]) == (1, [2], [6.0, 6.5])
    assert output["max_abs"] == 0.5


@pytest.mark.parametrize("wrong", [np.zeros(3, np.float32), np.zeros(4, np.float64), np.full(4, np.nan, np.float32)])
def test_expected_output_mismatch_or_nan_fails(hil, simulator, doubling, tmp_path, wrong):
    np.save(tmp_path / "y.npy", wrong)
    ended = hil("run", doubling, "--board", simulator, "--expected", "y.npy", "--json")
    assert (ended.code, ended.case["outcome"]) == (1, "FAIL")


@pytest.mark.parametrize(
    ("fault", "outcome", "code", "stage"),
    [
        pytest.param("crash", "RUN_CRASH", 3, "run", marks=pytest.mark.daily),
        ("crash:at=load", "RUN_CRASH", 3, "load"),
        ("hang", "TIMEOUT", 3, "run"),
        pytest.param("corrupt", "FAIL", 1, "compare", marks=pytest.mark.daily),
        ("drop", "PASS", 0, "compare"),
        ("slow", "PASS", 0, "compare"),
        ("kill-agent", "BOARD_LOST", 4, "run"),
    ],
)
def test_simulator_fault_gives_expected_outcome(hil, doubling, fault, outcome, code, stage):
    ended = hil("run", doubling, "--fault", fault, "--timeout", 5 if fault == "hang" else 60, "--json")
    assert (ended.case["outcome"], ended.code, ended.case["stage"]) == (outcome, code, stage)
    if fault == "crash":
        assert "SIGSEGV" in ended.case["reason"]
        assert "Segmentation fault" in ended.case["error"]["detail"]


@pytest.mark.parametrize("runtime", slow_except(["iree", "onnxruntime"], 1))
def test_declared_half_precision_uses_control_tolerance(hil, runtime):
    run = ("run", DIGITS / "digits_cnn.onnx", "--runtime-hw-type", "sim-f16", "--runtime", runtime, "--json")
    declared = hil(*run)
    assert (declared.code, declared.case["outcome"]) == (0, "PASS")
    assert declared.case["provenance"]["arithmetic"] == "float16"
    (output,) = declared.case["verdicts"][0]["outputs"]
    assert output["control"]["arithmetic"] == "float16" and "node evaluator" in output["control"]["source"]
    assert 1e-5 < output["max_abs"] < output["control"]["max_abs"] < 0.1
    undeclared = hil(*run, "--arithmetic", "float32")
    assert (undeclared.code, undeclared.case["outcome"]) == (1, "FAIL")
    assert "out of tolerance" in undeclared.case["reason"]
    assert hil(*run, "--rtol", 1e-4, "--atol", 1e-4).code == 1, "a tolerance of the user's goes before the control"
    assert hil(*run, "--rtol", 0.02, "--atol", 0.02).code == 0


@pytest.mark.slow
def test_oversized_program_gives_load_error(hil, tmp_path):
    weights = helper.make_tensor(
        "w", FLOAT, [1024, 512], np.random.default_rng(0).random(1024 * 512, np.float32).tobytes(), raw=True
    )
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = save_model(tmp_path / "big.onnx", [node], [("x", FLOAT, [1, 1024])], [("y", FLOAT, [1, 512])], [weights])
    for runtime in ("iree", "onnxruntime"):
        ended = hil("run", model, "--runtime-hw-type", "sim-small", "--runtime", runtime, "--json")
        assert (ended.code, ended.case["outcome"]) == (3, "LOAD_ERROR")
        assert "1048576" in ended.case["reason"]


@pytest.mark.slow
def test_run_reports_disagreeing_references(hil, simulator, tmp_path):
    # A sum of large values that cancel: rounding depends on the order, which differs between references.
    node = helper.make_node("ReduceSum", ["x"], ["y"], keepdims=1)
    model = save_model(tmp_path / "sum.onnx", [node], [("x", FLOAT, [200_000])], [("y", FLOAT, [1])])
    np.save(tmp_path / "x.npy", (np.random.default_rng(3).standard_normal(200_000) * 1e4).astype(np.float32))
    ended = hil(
        "run", model, "--board", simulator, "--input", "x.npy", "--atol", "1e-5", "--json",
        "--reference", "onnxruntime", "--reference", "iree-llvm-cpu", "--reference", "onnx-reference",
    )  # fmt: skip
    verdicts = ended.case["verdicts"]
    assert len(verdicts) == 3
    assert {verdict["outcome"] for verdict in verdicts} == {"PASS", "FAIL"}
    assert "disagree" in ended.case["reason"]


@pytest.mark.parametrize("order", [("onnxruntime", "onnx-reference"), ("onnx-reference", "onnxruntime")])
def test_failing_reference_does_not_hide_other_verdict(hil, simulator, tmp_path, order):
    # ONNX Runtime has no CPU kernel for a bfloat16 product. The ONNX evaluator has one.
    node, values = helper.make_node("MatMul", ["a", "b"], ["y"]), [("a", BFLOAT16, [2, 3]), ("b", BFLOAT16, [3, 2])]
    save_model(tmp_path / "product.onnx", [node], values, [("y", BFLOAT16, [2, 2])])
    named = [word for name in order for word in ("--reference", name)]
    ended = hil("run", "product.onnx", "--board", simulator, *named, "--json")
    case = ended.case
    assert (ended.code, case["outcome"]) == (0, "PASS")
    (verdict,) = case["verdicts"]
    assert verdict["outcome"] == "PASS" and verdict["against"].startswith("onnx reference evaluator")
    (silent,) = case["unanswered"]
    assert (silent["reference"], silent["outcome"]) == ("onnxruntime", "REFERENCE_ERROR") and silent["reason"]
    assert f"reference onnxruntime failed: {silent['reason']}" in case["reason"]
    shown = " ".join(hil("run", "product.onnx", "--board", simulator, *named).out.split())
    assert shown.count("reference onnxruntime failed: ONNX Runtime cannot load the model:") == 1


@pytest.mark.slow
def test_wrong_output_fails_despite_failing_reference(hil, tmp_path):
    node, values = helper.make_node("MatMul", ["a", "b"], ["y"]), [("a", BFLOAT16, [2, 3]), ("b", BFLOAT16, [3, 2])]
    save_model(tmp_path / "product.onnx", [node], values, [("y", BFLOAT16, [2, 2])])
    named = ["--reference", "onnxruntime", "--reference", "onnx-reference"]
    ended = hil("run", "product.onnx", "--board", "sim", "--fault", "corrupt", *named, "--json")
    assert (ended.code, ended.case["outcome"]) == (1, "FAIL")
    assert f"reference {ended.case['unanswered'][0]['reference']} failed: " in ended.case["reason"]


@pytest.mark.daily
def test_run_of_many_models_returns_most_severe_code(hil, simulator, doubling, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07broken")
    ended = hil("run", doubling, tmp_path / "broken.onnx", DIGITS / "digits_cnn.onnx", "--board", simulator, "--json")
    assert ended.code == 3
    assert [case["outcome"] for case in ended.document["cases"]] == ["PASS", "IMPORT_ERROR", "PASS"]


def test_concurrent_runs_share_simulator_in_turn(hil, simulator, doubling):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(hil, "run", doubling, "--board", simulator, "--iterations", 200, "--seed", seed, "--json")
            for seed in range(3)
        ]
        assert [call.result().code for call in calls] == [0, 0, 0]


def test_busy_board_exits_with_4_after_wait(hil, simulator, doubling, open_client):
    open_client(simulator)
    ended = hil("run", doubling, "--board", simulator, "--wait", 0.5, "--json")
    assert (ended.code, ended.case["outcome"]) == (4, "BOARD_BUSY")
    assert "is using the board" in ended.case["reason"]


def test_run_reads_iree_run_module_flagfile(hil, simulator, doubling, tmp_path):
    assert hil("compile", doubling, "-o", "doubling.vmfb").code == 0
    np.array([1, 2, 3, 4], np.float32).tofile(tmp_path / "in.bin")
    np.save(tmp_path / "out.npy", np.array([2, 4, 6, 8], np.float32))
    lines = ["--module=doubling.vmfb", "--device=local-task", "--input=4xf32=@in.bin"]
    (tmp_path / "flags.txt").write_text("\n".join([*lines, "--expected_output=@out.npy"]))
    ended = hil("run", "--flagfile", "flags.txt", "--board", simulator)
    assert ended.code == 0 and "compiling for" not in ended.err
    assert "compiling for" in hil("run", doubling, "--board", simulator).err
    (tmp_path / "flags.txt").write_text("\n".join([*lines, "--expected_output=4xf32=2 4 6 9"]))
    assert hil("run", "--flagfile", "flags.txt", "--board", simulator).code == 1
    (tmp_path / "flags.txt").write_text("--surprise=1")
    assert hil("run", "--flagfile", "flags.txt", "--board", simulator).code == 2


@pytest.mark.daily
def test_resume_preserves_finished_cases_and_runs_rest(hil, simulator, doubling, tmp_path):
    ended = hil("run", doubling, DIGITS / "digits_cnn.onnx", "--board", simulator, "--json")
    path = tmp_path / ended.document["folder"] / "run.json"
    record = json.loads(path.read_text())
    record["cases"][1]["outcome"] = None
    record["finished"] = False
    path.write_text(json.dumps(record))
    kept = record["cases"][0]["provenance"]["finished_at"]
    again = hil("run", "--resume", record["id"], "--json")
    assert again.code == 0
    assert [case["outcome"] for case in again.document["cases"]] == ["PASS", "PASS"]
    assert again.document["cases"][0]["provenance"]["finished_at"] == kept
    assert again.document["cases"][1]["provenance"]["finished_at"] > kept


def test_resume_reruns_case_with_changed_model(hil, simulator, doubling):
    first = hil("run", doubling, "--board", simulator, "--json")
    value = (FLOAT, [4])
    negated = helper.make_node("Neg", ["x"], ["y"])
    save_model(doubling, [negated], [("x", *value)], [("y", *value)])
    again = hil("run", "--resume", first.document["id"], "--json")
    assert (again.code, again.case["outcome"]) == (0, "PASS")
    assert again.case["model"]["digest"] != first.case["model"]["digest"]
    assert "rerunning doubling: the model changed" in again.err
    doubling.unlink()
    gone = hil("run", "--resume", first.document["id"], "--json")
    assert (gone.code, gone.case) == (0, again.case)


@pytest.mark.daily
def test_library_run_matches_command(simulator, doubling, monkeypatch, shared_cache):
    import hil as library

    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    x = np.array([1, 2, 3, 4], np.float32)
    with library.connect(simulator) as board:
        case = library.run(doubling, board, {"x": x}, iterations=3)
        assert case
        np.testing.assert_array_equal(case.result.outputs["y"], x + x)
        assert len(case.result.device_ns) == 3
        assert not library.run(doubling, board, {"x": x}, expected={"y": x})


def test_compare_reports_and_plots_run_differences(hil, doubling, tmp_path):
    good = hil("run", doubling, "--json").document["id"]
    bad = hil("run", doubling, "--fault", "corrupt", "--json").document["id"]
    assert hil("compare", good, good).code == 0
    ended = hil("compare", bad, good, "--plot", "diff.png", "--json")
    assert ended.code == 1
    assert ended.document["verdicts"]["doubling"]["outputs"][0]["mismatches"] == 1
    assert (tmp_path / "diff.png").read_bytes().startswith(b"\x89PNG")


def test_run_loads_external_model_data(hil, simulator, tmp_path):
    weights = onnx.numpy_helper.from_array(np.arange(40_000, dtype=np.float32).reshape(200, 200), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = save_model(tmp_path / "m.onnx", [node], [("x", FLOAT, [2, 200])], [("y", FLOAT, [2, 200])], [weights])
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    for runtime in ("iree", "onnxruntime"):
        ended = hil("run", path, "--board", simulator, "--runtime", runtime, "--rtol", 1e-4, "--json")
        assert ended.code == 0, ended.out
    (tmp_path / "m.data").unlink()
    ended = hil("run", path, "--board", simulator, "--json")
    assert (ended.code, ended.case["outcome"]) == (3, "IMPORT_ERROR")
    assert "m.data" in ended.case["reason"]


def test_verbose_prints_tool_and_worker_output(hil):
    ended = hil("run", DIGITS / "digits_cnn.onnx", "--recompute-cache", "-v", "--json", "--fault", "crash")
    assert ended.code == 3 and ended.case["outcome"] == "RUN_CRASH"
    assert "digits_cnn: compile | $ " in ended.err and "sim | simulated SIGSEGV" in ended.err
