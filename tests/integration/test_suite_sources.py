"""The bundled suites: node tests compared with manual results, hil's models, and directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.commands import with_tools

from hil.controller.workloads.suites.cases import sources
from hil.controller.workloads.suites.expected import Expectations

# One of each kind: plain, every dtype class, zero-size, scalar, control flow, no inputs, many outputs, no tensors.
SAMPLE = [
    "add",
    "add_uint8",
    "and2d",
    "cast_FLOAT_to_BFLOAT16",
    "cast_FLOAT16_to_FLOAT",
    "cast_UINT4_to_FLOAT",
    "constant",
    "conv_with_strides_padding",
    "equal_string",
    "if",
    "lstm_defaults",
    "matmul_bcast",
    "nonmaxsuppression_two_classes",
    "qlinearmatmul_2D_uint8_float32",
    "reshape_allowzero_reordered",
    "sequence_insert_at_back",
    "split_equal_parts_1d_opset18",
    "split_zero_size_splits_opset18",
    "top_k",
    "training_dropout_default",
]


def check_operators(environment: dict[str, str], *args: object) -> tuple[int, dict]:
    command = [sys.executable, "-m", "tools.check_operators", "--json", *map(str, args)]
    done = subprocess.run(command, env=with_tools(environment), capture_output=True, text=True, timeout=3000)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flow", ["onnxruntime", "iree"])
def test_sampled_node_tests_match_list_and_manual_results(hil, environment, tmp_path, flow):
    filters = [part for name in SAMPLE for part in ("--filter", f"={name}")]
    ended = hil(
        "suite", "run", "@operators", "--flow", flow, *filters, "--keep-all", "--out", tmp_path / "run", "--json"
    )
    outcomes = {case["id"]: case["outcome"] for case in ended.document["cases"]}
    assert set(outcomes) == set(SAMPLE)
    assert outcomes["add"] == "PASS" and outcomes["sequence_insert_at_back"] == "XFAIL"
    if listed(flow):
        assert set(outcomes.values()) == {"PASS", "XFAIL"}
        assert ended.code == 0
    assert sum(outcome == "PASS" for outcome in outcomes.values()) >= len(SAMPLE) // 2

    tampered = [] if flow == "iree" else ["add"]
    for name in tampered:
        flip_a_bit(tmp_path / "run" / "cases" / name / "outputs" / "0-sum.npy")
    code, found = check_operators(environment, "--flow", flow, "--run", tmp_path / "run")
    kinds = {case["id"]: case["kind"] for case in found["cases"]}
    assert set(kinds) == set(SAMPLE)
    assert [case["id"] for case in found["cases"] if case["kind"] == "DIFFERENT"] == tampered, found
    assert code == (1 if tampered else 0)
    assert kinds["conv_with_strides_padding"] == "the same bits"
    if flow == "onnxruntime":
        assert kinds["sequence_insert_at_back"] == "hil passes only tensors, no sequences or optionals"


def listed(flow: str) -> bool:
    """Return whether the bundled list matches the installed versions: an older ONNX Runtime has fewer operators."""
    known = Expectations.load(Path(sources.__file__).parents[1] / "expected_lists" / "operators.toml").made_with
    compared = ("onnx", "onnxruntime" if flow == "onnxruntime" else "iree-base-compiler")
    return all(known[name] == version(name) for name in compared)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("flow", ["onnxruntime", "iree"])
def test_all_node_tests_match_manual_results(environment, tmp_path, flow):
    command = [sys.executable, "-m", "hil.controller.cli.main", "suite", "run", "@operators", "--flow", flow]
    command += ["--keep-all", "--out", str(tmp_path / "run"), "-j", str(os.cpu_count() or 1)]
    code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, timeout=3000).returncode
    assert code == 0 or not listed(flow)
    code, found = check_operators(environment, "--flow", flow, "--run", tmp_path / "run")
    assert len(found["cases"]) > 1000
    assert [case for case in found["cases"] if case["kind"] == "DIFFERENT"] == []
    assert code == 0


def test_bundled_models_run_whole_and_by_layer(hil, tmp_path):
    names = ["beam_step", "loop", "digits_cnn_batch", "bfloat16"]
    filters = [part for name in names for part in ("--filter", f"{name}_*")]
    ended = hil("suite", "run", "@models", "--flow", "onnxruntime", *filters, "--out", tmp_path / "run", "--json")
    cases = {case["id"]: case for case in ended.document["cases"]}
    assert ended.code == 0, ended.err
    assert {f"{name}_full_model" for name in names} < set(cases)
    assert {case["outcome"] for name, case in cases.items() if not name.startswith("bfloat16")} == {"PASS"}
    # ONNX Runtime has no bfloat16 CPU kernels, and the bundled list expects this.
    assert cases["bfloat16_full_model"]["outcome"] == "XFAIL"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("flow", ["onnxruntime", "iree"])
def test_all_bundled_models_match_expected_list(environment, tmp_path, flow):
    command = [sys.executable, "-m", "hil.controller.cli.main", "suite", "run", "@models", "--flow", flow]
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_broken_model_does_not_stop_suite(hil, doubling, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07nonsense")
    ended = hil("suite", "run", tmp_path, "--flow", "onnxruntime", "--out", tmp_path / "run", "--json")
    outcomes = {case["id"]: case["outcome"] for case in ended.document["cases"]}
    assert outcomes == {
        "broken_full_model": "IMPORT_ERROR",
        "doubling_full_model": "PASS",
        "doubling_layer_Add_twice": "PASS",
    }
    assert ended.code == 3


def test_empty_directory_exits_with_5_and_missing_with_2(hil, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    assert hil("suite", "list", tmp_path / "empty").code == 5
    ended = hil("suite", "run", tmp_path / "emtpy")
    assert ended.code == 2
    assert f"did you mean '{tmp_path / 'empty'}'" in ended.err
