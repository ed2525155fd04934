"""PyTorch programs and modules on the simulator: via torch-mlir or ONNX, and the names of their modules."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.torch_modules import Branching, Conjugate, Counting, Keeping, Net, Recurrent, save, save_net

import hil as library
from hil.controller.models.torch_module import export_module
from hil.core.results import Outcome
from hil.errors import UsageError


@pytest.fixture
def net(tmp_path: Path) -> Path:
    return save_net(tmp_path / "net.pt2")


def test_run_passes_via_torch_mlir_onnx_and_onnxruntime(hil, net):
    for arguments, compiler in (
        ([], "after torch-mlir"),
        (["--compile-flag=--via=onnx"], "after torch.onnx"),
        (["--runtime", "onnxruntime"], "torch.onnx"),
    ):
        ended = hil("run", net, "--dim", "x.dim0=3", *arguments, "--json")
        assert ended.code == 0, (ended.out, ended.err)
        assert compiler in ended.case["artifact"]["compiler"]
        [verdict] = ended.case["verdicts"]
        assert verdict["against"].startswith("torch-eager")
        assert verdict["outputs"][0]["name"] == "output" and verdict["outputs"][0]["elements"] == 6


def test_suite_includes_layers_of_torch_program(hil, net):
    ended = hil("suite", "run", net, "--dim", "x.dim0=3", "--json")
    assert ended.code == 0, (ended.out, ended.err)
    cases = {case["id"]: case["outcome"] for case in json.loads(ended.out)["cases"]}
    assert set(cases.values()) == {"PASS"}
    assert "net_full_model" in cases and any(name.startswith("net_layer_") for name in cases)
    listed = hil("suite", "list", net, "--dim", "x.dim0=3", "--flow", "xnnpack")
    assert listed.out.split() == ["net_full_model"]  # ExecuTorch takes no ONNX models, such as layers


def test_run_accepts_any_exported_size(hil, net, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((5, 3, 8, 8), np.float32))
    ended = hil("run", net, "--input", "x=x.npy")
    assert ended.code == 0 and "5x2 float32" in ended.out, ended.err


def test_run_suggests_onnx_for_unsupported_torch_mlir_program(hil, tmp_path):
    path = save(tmp_path / "branching.pt2", Branching(), torch.randn(3))
    ended = hil("run", path)
    said = " ".join(ended.out.split())
    assert ended.code == 3 and "COMPILE_ERROR" in said
    assert "'cond' not implemented" in said and "--via=onnx" in said
    assert hil("run", path, "--compile-flag=--via=onnx").code == 0
    complex_ = save(tmp_path / "complex.pt2", Conjugate(), torch.zeros(3, dtype=torch.complex64))
    ended = hil("run", complex_)
    assert ended.code == 3 and "iree-compile rejected" in ended.out and "--via=onnx" in ended.out
    ended = hil("run", path, "--compile-flag=--via=tflite")
    assert ended.code == 2 and "--via=mlir, --via=onnx" in ended.err


def test_run_resets_state_per_call(hil, tmp_path):
    path = save(tmp_path / "counting.pt2", Counting(), torch.zeros(3))
    for runtime in ("iree", "onnxruntime"):
        ended = hil("run", path, "--runtime", runtime, "--iterations", "3", "--warmup", "2")
        assert ended.code == 0, ended.out


@pytest.mark.parametrize("runtime", ["iree", "iree --compile-flag=--via=onnx", "onnxruntime", "executorch"])
def test_run_compares_changed_state(hil, tmp_path, runtime):
    counting = save(tmp_path / "counting.pt2", Counting(), torch.zeros(3))
    keeping = save(tmp_path / "keeping.pt2", Keeping(), torch.zeros(3), torch.zeros(3))
    torch.export.save(torch.export.export(Net().train(), (torch.randn(2, 3, 8, 8),)), tmp_path / "training.pt2")
    tracked = {"bn.num_batches_tracked_out", "bn.running_mean_out", "bn.running_var_out"}
    expected = {counting: {"output", "seen_out"}, keeping: {"inner.total_out", "kept_out"}}
    if runtime != "executorch":  # it has no batch norm for training
        expected[tmp_path / "training.pt2"] = {"output", *tracked}
    for path, names in expected.items():
        ended = hil("run", path, "--runtime", *runtime.split(), "--iterations", "3", "--warmup", "2", "--json")
        assert ended.code == 0, (path, ended.out, ended.err)
        assert {output["name"] for output in ended.case["verdicts"][0]["outputs"]} == names
    (tmp_path / "faulty.toml").write_text('[board]\nhw_type = "sim"\n[simulator]\nfaults = ["corrupt:output=1"]\n')
    ended = hil("run", counting, "--runtime", *runtime.split(), "--board", tmp_path / "faulty.toml", "--json")
    assert (ended.code, ended.case["outcome"]) == (1, "FAIL"), ended.out
    assert ended.case["reason"].startswith("output seen_out: ")


def test_profile_names_modules(hil, net, tmp_path):
    # PyTorch's ONNX exporter folds a batch norm into the preceding convolution, under the batch norm's name.
    for runtime, folded in (("iree", {"conv", "bn"}), ("onnxruntime", {"bn"})):
        ended = hil("run", net, "--dim", "x.dim0=1", "--runtime", runtime, "--profile", runtime)
        assert ended.code == 0, ended.err
        with (tmp_path / runtime / "ops.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["onnx_nodes"]]
        told = {node for row in rows for node in row["onnx_nodes"].split(";")}
        assert told == {*folded, "relu", "mean", "head.0", "head.1", "softmax"}
    # Types are ONNX operators for ONNX, and the user's modules for MLIR.
    with (tmp_path / "iree" / "ops.csv").open() as file:
        types = [row["op_types"] for row in csv.DictReader(file) if "head.1" in row["onnx_nodes"].split(";")]
    assert types and "Linear" in types[0].split(";")


def test_layers_and_bisect_name_modules(hil, net):
    listed = hil("layers", net, "--dim", "x.dim0=2")
    assert listed.code == 0, listed.err
    assert "Gemm_head.0" in listed.out and "Softmax_softmax" in listed.out
    found = hil("bisect", net, "--dim", "x.dim0=2", "--json")
    assert found.code == 0, found.err
    assert {"head.0", "head.1"} <= {node for layer in found.document["layers"] for node in layer["nodes"]}


def test_run_accepts_live_module(tmp_path, monkeypatch, shared_cache):
    monkeypatch.setenv("HIL_CACHE_DIR", str(shared_cache))
    torch.manual_seed(0)
    net, x = Net().eval(), np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    with library.connect("sim") as board:
        for model, inputs in (
            (net, (torch.from_numpy(x),)),
            (net, {"x": x}),
            (torch.export.export(net, (torch.from_numpy(x),)), {"x": x}),
        ):
            case = library.run(model, board, inputs)
            assert case.outcome is Outcome.PASS, case.reason
            np.testing.assert_array_equal(case.inputs["x"], x)
            expected = net(torch.from_numpy(x)).detach().numpy()
            np.testing.assert_allclose(case.result.outputs["output"], expected, 1e-5, 1e-5)
        case = library.run(net, board)
        assert case.outcome is Outcome.IMPORT_ERROR and "cannot export Net" in case.reason
        with pytest.raises(UsageError, match="a sequence or a mapping"):
            library.run(net, board, 3)
        case = library.run(export_module(net, (x,), tmp_path / "n.pt2"), board)
        assert case.name == "n" and case.outcome is Outcome.PASS


@pytest.mark.board
def test_board_without_torch_runs_program(hil, net, tmp_path, board_aarch64):
    recurrent = save(tmp_path / "recurrent.pt2", Recurrent(), torch.randn(3, 2, 4), (torch.zeros(1, 2, 5),) * 2)
    where = ["--board", f"root@{board_aarch64.ip}", "--identity", board_aarch64.identity]
    where += ["--known-hosts", board_aarch64.known_hosts]
    for path, dims in ((net, ["--dim", "x.dim0=2"]), (recurrent, [])):
        ended = hil("run", path, *dims, *where, "--json")
        assert ended.code == 0, (ended.out, ended.err)
        assert any("aarch64" in flag for flag in ended.case["artifact"]["flags"])
