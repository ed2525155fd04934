"""`hil reduce`: planted faults, resuming, and real failures of a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.models import DIGITS, save_model

FLOAT = TensorProto.FLOAT
DIGITS_CNN = DIGITS / "digits_cnn.onnx"
FAULTY_RUNTIME = Path(__file__).parents[2] / "benchmarks" / "faulty_runtime"
# For tests that do not depend on a compiler.
ORT = ("--runtime", "onnxruntime")


def reduced(ended, code, place):
    assert ended.code == code, ended.out + ended.err
    document = ended.document
    return document, onnx.load(place / document["folder"] / "model.onnx")


def chain(target: Path, length: int, middle: list[onnx.NodeProto], extra: dict[str, np.ndarray]) -> Path:
    """Save ``length`` pairs of MatMul and Tanh before and after nodes from ``start`` to ``end``."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(array, name) for name, array in extra.items()]
    nodes: list[onnx.NodeProto] = []
    for tag, (first, last) in {"a": ("x", "start"), "b": ("end", "y")}.items():
        value = first
        for number in range(length):
            weights.append(numpy_helper.from_array(rng.normal(0, 0.3, (6, 6)).astype(np.float32), f"{tag}w{number}"))
            nodes.append(helper.make_node("MatMul", [value, f"{tag}w{number}"], [f"{tag}m{number}"], f"{tag}m{number}"))
            value = last if number == length - 1 else f"{tag}t{number}"
            nodes.append(helper.make_node("Tanh", [f"{tag}m{number}"], [value], f"{tag}t{number}"))
        nodes += middle if tag == "a" else []
    return save_model(target, nodes, [("x", FLOAT, [3, 6])], [("y", FLOAT, [3, 6])], weights)


def test_wrong_node_is_found_with_report_and_bundle(hil, tmp_path):
    given = ("reduce", DIGITS_CNN, *ORT, "--fault", "corrupt:needs=conv2", "--out", tmp_path / "out", "--json")
    document, model = reduced(hil(*given), 1, tmp_path)
    assert [node.name for node in model.graph.node] == ["conv2"]
    assert document["nodes_before"] == 8 and document["nodes_after"] == 1 and document["stock"] == ""
    report = (Path(document["folder"]) / "report.md").read_text()
    assert report.startswith("# FAIL: Conv") and "| index | expected | actual |" in report
    assert "--fault corrupt:needs=conv2" in report
    again = hil("bundle", "run", Path(document["folder"]) / "failure.hilb", "--fault", "corrupt:needs=conv2")
    assert again.code == 1

    # A finished reduction is returned without runs.
    resumed, _ = reduced(hil("reduce", "--resume", document["id"], "--out", tmp_path / "out", "--json"), 1, tmp_path)
    assert resumed == document

    # Without a result, a resumed reduction continues after the runs in the journal.
    journal = Path(document["folder"]) / "reduce.json"
    stored = json.loads(journal.read_text())
    kept = stored["trials"][:3]
    journal.write_text(json.dumps({**stored, "trials": kept, "finished": False, "exit_code": None}))
    resumed, _ = reduced(hil("reduce", "--resume", stored["id"], "--out", tmp_path / "out", "--json"), 1, tmp_path)
    assert resumed["trials"][:3] == kept
    assert [one["key"] for one in resumed["trials"]] == [one["key"] for one in stored["trials"]]


def test_slow_node_is_found(hil, tmp_path):
    fault = ("--fault", "pace:seconds=0.05,needs=conv2")
    document, model = reduced(hil("reduce", DIGITS_CNN, *ORT, "--slow", *fault, "--json"), 0, tmp_path)
    assert [node.name for node in model.graph.node] == ["conv2"]
    assert document["slow"] == 0.5 and document["failure"]["time_ns"] >= 50e6 <= document["trials"][-1]["time_ns"]
    assert (tmp_path / document["folder"] / "report.md").read_text().startswith("# Slow: Conv (onnxruntime)")


def test_defect_of_runtime_is_reproduced_without_hil(hil, environment, tmp_path):
    """A defect of ONNX Runtime occurs in hil and in the script of the report."""
    sound = dict(environment)
    paths = [str(FAULTY_RUNTIME), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["HIL_FAULTY_RUNTIME"] = "weight:conv2.weight"
    document, model = reduced(hil("reduce", DIGITS_CNN, *ORT, "--json"), 1, tmp_path)
    assert [node.op_type for node in model.graph.node] == ["Conv"]
    script = [sys.executable, *document["stock"].split()[1:]]
    for variables, code in ((environment, 1), (sound, 0)):
        ended = subprocess.run(script, cwd=tmp_path / document["folder"], env=variables, capture_output=True, text=True)
        assert ended.returncode == code, ended.stdout + ended.stderr


@pytest.mark.slow
def test_failed_case_of_stored_run_is_reduced(hil, tmp_path):
    assert hil("run", DIGITS_CNN, *ORT, "--fault", "crash:needs=pool1", "--seed", "3").code == 3
    document, model = reduced(hil("reduce", "latest", "--json"), 3, tmp_path)
    assert [node.op_type for node in model.graph.node] == ["MaxPool"]
    assert document["failure"]["outcome"] == "RUN_CRASH" and document["request"]["seed"] == 3


@pytest.mark.slow
def test_hang_is_reduced_within_limit_of_runs(hil, tmp_path):
    given = ("--fault", "hang:needs=fc1", "--timeout", "2", "--max-runs", "4", "--json")
    document, _ = reduced(hil("reduce", DIGITS_CNN, *ORT, *given), 3, tmp_path)
    assert len(document["trials"]) == 4 and document["failure"]["outcome"] == "TIMEOUT"
    assert any("--max-runs" in note for note in document["notes"])


def test_passing_model_cannot_be_reduced(hil, tmp_path):
    passing = hil("reduce", DIGITS_CNN, *ORT)
    assert passing.code == 2 and "PASS" in passing.err


def test_mlir_that_cannot_be_compiled_is_reduced(hil, tmp_path):
    """IREE knows no such custom call."""
    body = "".join(f"%a{n} = stablehlo.tanh %{f'a{n - 1}' if n else 'x'} : tensor<4x6xf32>\n" for n in range(9))
    call = "%q = stablehlo.custom_call @missing(%a4) : (tensor<4x6xf32>) -> tensor<4x6xf32>\n"
    body = body.replace("%a5 = stablehlo.tanh %a4", f"{call}%a5 = stablehlo.tanh %q")
    text = f"func.func @f(%x: tensor<4x6xf32>) -> tensor<4x6xf32> {{\n{body}return %a8 : tensor<4x6xf32>\n}}\n"
    (tmp_path / "m.mlir").write_text(text)
    ended = hil("reduce", tmp_path / "m.mlir", "--json")
    document = ended.document
    assert (ended.code, document["failure"]["outcome"]) == (3, "COMPILE_ERROR"), ended.err
    assert (document["nodes_before"], document["operators"]) == (10, ["stablehlo.custom_call"])
    folder = tmp_path / document["folder"]
    tools = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(["sh", "reproduce.sh"], cwd=folder, env={"PATH": tools}, capture_output=True, text=True)
    assert done.returncode and "failed to legalize operation 'stablehlo.custom_call'" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiler_crash_is_reproduced_by_stock_tools(hil, tmp_path):
    middle = [
        helper.make_node("Slice", ["start", "zero", "zero"], ["empty"], "slice"),
        helper.make_node("Reshape", ["empty", "shape"], ["shaped"], "reshape", allowzero=1),
        helper.make_node("ReduceSum", ["shaped"], ["sum"], "sum", keepdims=0),
        helper.make_node("Add", ["start", "sum"], ["end"], "add"),
    ]
    extra = {"zero": np.array([0]), "shape": np.array([6, 3, 0])}
    document, model = reduced(hil("reduce", chain(tmp_path / "chain.onnx", 4, middle, extra), "--json"), 3, tmp_path)
    assert document["failure"]["outcome"] == "COMPILE_CRASH"
    assert [node.op_type for node in model.graph.node] == ["Reshape"]
    folder = tmp_path / document["folder"]
    tools = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(["sh", "reproduce.sh"], cwd=folder, env={"PATH": tools}, capture_output=True, text=True)
    assert done.returncode and "stack" in done.stderr.lower()
    assert "reproduce.sh" in document["stock"] and "the exit code is" in (folder / "report.md").read_text()
    assert hil("bundle", "run", folder / "failure.hilb").code == 0  # ONNX Runtime runs the model
