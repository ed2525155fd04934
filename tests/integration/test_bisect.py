"""`hil bisect`: find the wrong layer, isolated and cumulative."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.layer_models import local_function, model_of, node, noisy, weights, with_wrong_weight
from support.models import DIGITS, save_model
from support.waiting import eventually

from hil.controller.models.description import digest_of_files
from hil.core.files import digest_file

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
DIGITS_CNN = DIGITS / "digits_cnn.onnx"
# For tests that do not depend on a compiler.
ORT = ("--runtime", "onnxruntime")


def outcomes(document, way):
    return {layer["name"]: layer[way]["outcome"] for layer in document["layers"]}


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    """Save a CNN with a residual branch: conv_in, relu_in, conv_middle, add, relu_out, conv_out."""
    rng = np.random.default_rng(4)
    weights = [
        numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name)
        for name, shape in {"w_in": (4, 3, 3, 3), "w_middle": (4, 4, 3, 3), "w_out": (2, 4, 3, 3)}.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w_in"], ["a"], "conv_in", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], "relu_in"),
        helper.make_node("Conv", ["b", "w_middle"], ["c"], "conv_middle", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["b", "c"], ["d"], "add"),
        helper.make_node("Relu", ["d"], ["e"], "relu_out"),
        helper.make_node("Conv", ["e", "w_out"], ["y"], "conv_out", pads=[1, 1, 1, 1]),
    ]
    inputs, outputs = [("x", FLOAT, [1, 3, 8, 8])], [("y", FLOAT, [1, 2, 8, 8])]
    return save_model(tmp_path / "branched.onnx", nodes, inputs, outputs, weights)


@pytest.mark.slow
def test_bisect_passes_all_layers_of_correct_model(hil, simulator):
    ended = hil("bisect", DIGITS_CNN, "--board", simulator, "--json")
    assert ended.code == 0, ended.err
    document = ended.document
    assert document["verdict"] == "no layer is wrong, isolated and cumulative"
    assert (document["exit_code"], document["first_isolated"], document["first_cumulative"]) == (0, None, None)
    assert [layer["depth"] for layer in document["layers"]] == list(range(8))
    for way in ("isolated", "cumulative"):
        assert set(outcomes(document, way).values()) == {"PASS"}


@pytest.mark.parametrize(
    ("runtime", "group"),
    [
        pytest.param("iree", "node", marks=pytest.mark.slow),
        pytest.param("onnxruntime", "fused", marks=pytest.mark.daily),
    ],
)
def test_bisect_finds_layer_with_wrong_weight(hil, simulator, branched, tmp_path, runtime, group):
    wrong = with_wrong_weight(branched, tmp_path / "received.onnx", "w_middle")
    options = ["--board", simulator, "--runtime", runtime, "--group", group, "--artifact-model", wrong]
    ended = hil("bisect", branched, *options, "--json")
    assert ended.code == 1, ended.err
    document = ended.document
    assert document["first_isolated"] == document["first_cumulative"]
    assert "conv_middle" in document["first_isolated"]
    assert document["verdict"].endswith("isolated and cumulative")
    isolated, cumulative = outcomes(document, "isolated"), outcomes(document, "cumulative")
    assert [name for name, outcome in isolated.items() if outcome == "FAIL"] == [document["first_isolated"]]
    # In a run of the whole model, all later layers are wrong as well.
    names = list(cumulative)
    after = names[names.index(document["first_isolated"]) :]
    assert [name for name, outcome in cumulative.items() if outcome == "FAIL"] == after
    assert document["whole"]["outcome"] == "FAIL"


def test_bisect_runs_on_device_of_flow(hil, tmp_path):
    model = save_model(
        tmp_path / "relu.onnx",
        [helper.make_node("Relu", ["x"], ["y"], "relu")],
        [("x", FLOAT, [4])],
        [("y", FLOAT, [4])],
    )
    (tmp_path / "flows.toml").write_text('[sync]\nruntime = "iree"\ndevice = "local-sync"\n')
    flow = f"{tmp_path / 'flows.toml'}:sync"
    ended = hil("bisect", model, "--flow", flow, "--isolated", "--json")
    assert ended.code == 0, ended.err
    (layer,) = ended.document["layers"]
    assert [part["device"] for part in layer["isolated"]["placement"]] == ["local-sync"]


@pytest.mark.slow
def test_bisect_stores_files_to_reproduce_wrong_layer(hil, simulator, tmp_path):
    wrong = with_wrong_weight(DIGITS_CNN, tmp_path / "received.onnx", "conv2.weight")
    ended = hil("bisect", DIGITS_CNN, "--artifact-model", wrong, "--board", simulator, "--out", "kept")
    assert ended.code == 1, ended.err
    verdict = "first wrong layer: Conv_conv2 (Conv, node conv2), isolated and cumulative"
    assert verdict in ended.out
    for name in ("conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten", "fc1"):
        assert name in ended.out
    (again,) = (
        line.removeprefix("repeat with: hil ") for line in ended.out.splitlines() if line.startswith("repeat with: ")
    )
    repeated = hil(*again.split(), "--json")
    assert repeated.code == 1, repeated.err
    assert repeated.case["verdicts"][0]["outputs"][0]["name"] == "conv2.out"
    assert not (tmp_path / "kept" / "Conv_conv1" / "inputs").exists()
    document = json.loads((tmp_path / "kept" / "bisect.json").read_text())
    assert verdict == document["verdict"]
    assert document["model_digest"] == digest_of_files({"": digest_file(DIGITS_CNN)})


@pytest.mark.slow
def test_bisect_leaves_masked_values_out_of_error_measures(hil, tmp_path):
    mask = np.where(np.tri(4, dtype=bool), 0, np.finfo(np.float32).min).astype(np.float32)
    rng = np.random.default_rng(6)
    tensors = [
        numpy_helper.from_array(rng.normal(0, 1, (8, 4)).astype(np.float32), "keys"),
        numpy_helper.from_array(mask, "mask"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "keys"], ["scores"], "scores"),
        helper.make_node("Add", ["scores", "mask"], ["masked"], "mask"),
    ]
    inputs, outputs = [("x", FLOAT, [4, 8])], [("masked", FLOAT, [4, 4])]
    model = save_model(tmp_path / "masked.onnx", nodes, inputs, outputs, tensors)
    wrong = with_wrong_weight(model, tmp_path / "received.onnx", "keys")
    ended = hil("bisect", model, "--artifact-model", wrong, *ORT, "--json")
    assert ended.code == 1, ended.err
    scores, masked = (layer["cumulative"] for layer in ended.document["layers"])
    assert (scores["outcome"], masked["outcome"]) == ("FAIL", "FAIL")
    assert masked["sqnr_db"] == pytest.approx(scores["sqnr_db"], abs=10)
    assert masked["outputs"][0]["masked"] == 6
    assert "SQNR, cosine and RMSE exclude 6 masked values" in masked["reason"]


def test_bisect_finds_layer_with_corrupted_tensor(hil):
    fault = "corrupt:output=conv2.out,others=spare"
    ended = hil("bisect", DIGITS_CNN, "--fault", fault, "--json")
    assert ended.code == 1, ended.err
    assert ended.document["first_isolated"] == ended.document["first_cumulative"] == "Conv_conv2"
    # The fault corrupts only returned outputs, not values used by later layers.
    assert list(outcomes(ended.document, "cumulative").values()).count("FAIL") == 1


@pytest.mark.slow
def test_bisect_reproduces_fault_from_stored_files(hil, doubling):
    ended = hil("bisect", doubling, *ORT, "--isolated", "--fault", "corrupt:output=y", "--out", "kept")
    assert ended.code == 1, ended.err
    (again,) = (
        line.removeprefix("repeat with: hil ") for line in ended.out.splitlines() if line.startswith("repeat with: ")
    )
    assert hil(*again.split(), "--json").case["outcome"] == "FAIL"


@pytest.mark.slow
def test_bisect_skips_layers_with_random_inputs(hil, simulator, tmp_path):
    onnx.save(noisy(), tmp_path / "noisy.onnx")
    document = hil("bisect", "noisy.onnx", "--board", simulator, *ORT, "--json").document
    assert (document["verdict"], document["exit_code"]) == (
        "no judged layer is wrong, isolated and cumulative",
        0,
    )
    drawn = {"RandomNormalLike_noise", "If_choose", "Dropout_drop"}
    skipped = {
        way: {name for name, outcome in outcomes(document, way).items() if outcome != "PASS"}
        for way in ("isolated", "cumulative")
    }
    assert skipped == {"isolated": drawn, "cumulative": drawn | {"Add_add", "Sum_sum"}}
    assert list(document["whole"]["unjudged"]) == ["y"] and document["whole"]["outcome"] == "PASS"


def test_bisect_descends_into_model_functions(hil, simulator, tmp_path):
    onnx.save(local_function(), tmp_path / "function.onnx")
    document = hil("bisect", "function.onnx", "--board", simulator, *ORT, "--json").document
    assert document["exit_code"] == 0
    assert list(outcomes(document, "cumulative").values()) == ["PASS"] * 4


@pytest.mark.slow
def test_bisect_handles_shapes_known_only_at_run_time(hil, simulator, tmp_path):
    nodes = [
        node("FusedMatMul", ["x", "w"], ["y"], "fused", domain="com.microsoft"),
        node("Constant", [], ["c"], "constant", value_floats=[1.0]),
    ]
    outputs, constants = [("y", FLOAT, None), ("c", FLOAT, [1])], {"w": weights(3, 4)}
    onnx.save(
        model_of(nodes, [("x", FLOAT, [2, 3])], outputs, constants, domains=["com.microsoft"]), tmp_path / "own.onnx"
    )
    document = hil("bisect", "own.onnx", "--board", simulator, *ORT, "--json").document
    assert document["exit_code"] == 0
    assert [output["shape"] for output in document["exposed"]["outputs"]] == [[2, 4], [1]]
    assert outcomes(document, "cumulative") == {"FusedMatMul_fused": "PASS"}


def test_bisect_rejects_output_fault_without_others_spare(hil):
    ended = hil("bisect", DIGITS_CNN, "--fault", "corrupt:output=conv2.out")
    assert ended.code == 2
    assert "others=spare" in ended.err


@pytest.mark.slow
def test_bisect_reports_accumulated_error(hil, tmp_path):
    # Half precision rounds 1.0003 to 1. The error of 3e-4 is in tolerance until subtraction and scaling amplify it.
    nodes = [
        helper.make_node("MatMul", ["x", "eye"], ["a"], "product"),
        helper.make_node("Sub", ["a", "one"], ["b"], "less_one"),
        helper.make_node("Mul", ["b", "hundred"], ["y"], "times"),
    ]
    constants = [
        numpy_helper.from_array(np.eye(8, dtype=np.float32), "eye"),
        numpy_helper.from_array(np.float32(1), "one"),
        numpy_helper.from_array(np.float32(100), "hundred"),
    ]
    save_model(tmp_path / "growing.onnx", nodes, [("x", FLOAT, [8, 8])], [("y", FLOAT, [8, 8])], constants)
    np.save(tmp_path / "x.npy", np.where(np.eye(8), 1.3125, 1.0003).astype(np.float32))
    options = ["--input", "x.npy", "--runtime-hw-type", "sim-undeclared", "--rtol", 1e-3, "--atol", 1e-3]
    ended = hil("bisect", "growing.onnx", *options, "--plot", "growth.svg")
    assert ended.code == 1, ended.err
    verdict = ended.out.splitlines()[-2]
    assert verdict.startswith("every isolated layer is correct; in the whole model the first layer out of tolerance")
    assert "Mul_times (Mul, node times): errors accumulate across layers, " in verdict
    assert "<svg" in (tmp_path / "growth.svg").read_text()


@pytest.fixture
def uncompilable(tmp_path: Path) -> Path:
    """Save double -> pool -> minus and double -> relu: IREE cannot compile LpPool."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["a"], "double"),
        helper.make_node("LpPool", ["a"], ["p"], "pool", kernel_shape=[2, 2]),
        helper.make_node("Neg", ["p"], ["y"], "minus"),
        helper.make_node("Relu", ["a"], ["z"], "relu"),
    ]
    outputs = [("y", FLOAT, [1, 2, 3, 3]), ("z", FLOAT, [1, 2, 4, 4])]
    return save_model(tmp_path / "pooled.onnx", nodes, [("x", FLOAT, [1, 2, 4, 4])], outputs)


@pytest.mark.slow
def test_bisect_skips_layers_after_compile_error(hil, simulator, uncompilable, tmp_path):
    ended = hil("bisect", uncompilable, "--board", simulator, "--json")
    assert ended.code == 3, ended.err
    document = ended.document
    isolated, cumulative = outcomes(document, "isolated"), outcomes(document, "cumulative")
    assert isolated == {"Add_double": "PASS", "LpPool_pool": "COMPILE_ERROR", "Neg_minus": "PASS", "Relu_relu": "PASS"}
    assert cumulative == {"Add_double": "PASS", "LpPool_pool": "SKIP", "Neg_minus": "SKIP", "Relu_relu": "PASS"}
    assert document["exposed"]["outcome"] == document["whole"]["outcome"] == "COMPILE_ERROR"
    assert "LpPool_pool (LpPool, node pool) ended in COMPILE_ERROR" in document["verdict"]
    assert "the cumulative results exclude the failed layers" in document["notes"][0]


@pytest.mark.slow
def test_bisect_allows_quantization_steps_of_quantized_flow(hil, simulator):
    flow = ["--flow", "iree-static-int8-per-tensor"]  # exact on every CPU, unlike ONNX Runtime
    ended = hil("bisect", DIGITS_CNN, "--board", simulator, *flow, "--json")
    assert ended.code == 0, ended.err
    document = ended.document
    tolerances = [
        output["tolerance"]["atol"]
        for layer in document["layers"]
        for way in ("isolated", "cumulative")
        for output in layer[way]["outputs"]
        if output["dtype"] == "int8"
    ]
    assert tolerances and all(1 <= atol <= 4 for atol in tolerances)
    assert any("Conv" in layer["op"] for layer in document["layers"])
    assert document["flow"] == flow[1]


@pytest.mark.slow
def test_bisect_runs_only_requested_mode(hil, simulator, doubling):
    for way, other in (("isolated", "cumulative"), ("cumulative", "isolated")):
        document = hil("bisect", doubling, "--board", simulator, *ORT, f"--{way}", "--json").document
        (layer,) = document["layers"]
        assert layer[way]["outcome"] == "PASS"
        assert layer[other] is None
        assert (document["whole"] is None) == (way == "isolated")


@pytest.mark.slow
def test_bisect_skips_layer_below_atol(hil, simulator, tmp_path):
    nodes = [
        helper.make_node("Mul", ["x", "small"], ["a"], "shrink"),
        helper.make_node("Div", ["a", "small"], ["y"], "grow"),
    ]
    constant = numpy_helper.from_array(np.float32(1e-4), "small")
    save_model(tmp_path / "narrow.onnx", nodes, [("x", FLOAT, [4])], [("y", FLOAT, [4])], [constant])
    ended = hil("bisect", "narrow.onnx", "--board", simulator, *ORT, "--atol", 1e-2, "--json")
    assert ended.code == 0, ended.err
    for way in ("isolated", "cumulative"):
        assert outcomes(ended.document, way) == {"Mul_shrink": "SKIP", "Div_grow": "PASS"}
    assert "atol is 0.01" in ended.document["layers"][0]["isolated"]["reason"]


@pytest.mark.slow
def test_bisect_preserves_dynamic_dimension(hil, simulator, tmp_path):
    digits = np.load(DIGITS / "digits_test.npz")["image"][:3]
    np.save(tmp_path / "images.npy", digits)
    model = DIGITS / "digits_cnn_batch.onnx"
    ended = hil("bisect", model, "--board", simulator, "--input", "images.npy", "--json")
    assert ended.code == 0, ended.err
    assert ended.document["layers"][0]["cumulative"]["outputs"][0]["shape"][0] == 3


def test_bisect_reports_failed_reference(hil, simulator, tmp_path):
    node = helper.make_node("Gather", ["x", "at"], ["y"], "pick")
    save_model(tmp_path / "pick.onnx", [node], [("x", FLOAT, [4]), ("at", INT64, [1])], [("y", FLOAT, [1])])
    ended = hil("bisect", "pick.onnx", "--board", simulator, "--input", "at=1xi64=99", "--json")
    assert ended.code == 3
    assert ended.document["error"]["kind"] == "ReferenceFailed"


def test_bisect_reports_lost_board(hil, doubling):
    ended = hil("bisect", doubling, *ORT, "--isolated", "--fault", "kill-agent", "--json")
    assert ended.code == 4
    assert outcomes(ended.document, "isolated") == {"Add_twice": "BOARD_LOST"}


def test_bisect_stops_all_processes_on_interrupt(doubling, environment, tmp_path):
    command = [sys.executable, "-m", "hil.controller.cli.main", "bisect", doubling, *ORT, "--fault", "hang"]
    process = subprocess.Popen(
        [*command, "--out", "kept", "--json"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # The first program is compiled and hangs soon.
    eventually((tmp_path / "kept" / "whole" / "logs" / "compile.log").exists, process=process)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "Interrupted"
    # Child processes end after they receive the signal.
    eventually(lambda: not group_lives(process.pid))


def group_lives(group: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def test_bisect_rejects_conflicting_options(hil, simulator, branched, doubling):
    board = ["--board", simulator]
    other = hil("bisect", branched, *board, "--artifact-model", doubling)
    assert other.code == 2
    assert "doubling.onnx is not the same network as branched.onnx: expected the inputs " in other.err
    both = hil("bisect", doubling, *board, "--flow", "iree", "--runtime", "iree")
    assert both.code == 2
    assert "mutually exclusive" in both.err
    picture = hil("bisect", doubling, *board, "--plot", "growth.nonsense")
    assert picture.code == 2
    assert ".png" in picture.err
