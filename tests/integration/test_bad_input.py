"""Invalid user input: outcome, exit code and message, without tracebacks or lost data."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.models import DIGITS, save_model
from support.slow import slow_except
from support.sshd import free_port
from support.waiting import eventually

from hil.controller.storage.runs import seal

FLOAT = TensorProto.FLOAT
DIGITS_CNN = DIGITS / "digits_cnn.onnx"


def ends(ended, code: int, outcome: str, *words: str) -> None:
    """Check exit code, outcome and words of the reason."""
    assert (ended.code, ended.case["outcome"]) == (code, outcome), ended.out
    for word in words:
        assert word in ended.case["reason"], ended.case["reason"]


def refused(ended, *words: str) -> None:
    """Check that the command exited with a usage error before it stored anything."""
    assert ended.code == 2, (ended.out, ended.err)
    assert ended.document["exit_code"] == 2
    for word in words:
        assert word in ended.document["error"]["message"] + ended.document["error"]["hint"]
        assert word in ended.err


# ---- unreadable or uncompilable models: exit code 3


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_run_reports_truncated_onnx_as_import_error(hil, simulator, tmp_path, share):
    data = DIGITS_CNN.read_bytes()
    (tmp_path / "cut.onnx").write_bytes(data[: int(len(data) * share)])
    ends(hil("run", "cut.onnx", "--board", simulator, "--json"), 3, "IMPORT_ERROR", "cut.onnx")


def test_run_reports_random_onnx_bytes_as_import_error(hil, simulator, tmp_path):
    (tmp_path / "noise.onnx").write_bytes(np.random.default_rng(0).bytes(10_000))
    ends(hil("run", "noise.onnx", "--board", simulator, "--json"), 3, "IMPORT_ERROR", "noise.onnx")


def test_run_reports_onnx_without_outputs_as_import_error(hil, simulator, tmp_path):
    save_model(tmp_path / "empty.onnx", [], [], [])
    ends(hil("run", "empty.onnx", "--board", simulator, "--json"), 3, "IMPORT_ERROR", "no outputs")


def test_run_reports_mlir_without_outputs_as_import_error(hil, simulator, tmp_path):
    (tmp_path / "nothing.mlir").write_text("func.func @main(%x: tensor<4xf32>) { return }")
    ends(hil("run", "nothing.mlir", "--board", simulator, "--json"), 3, "IMPORT_ERROR", "no outputs")


TWINS_MLIR = """
func.func @main(%x: tensor<4xf32>) -> (tensor<4xf32> {iree.abi.name = "y"}, tensor<4xf32> {iree.abi.name = "y"}) {
  %0 = arith.addf %x, %x : tensor<4xf32>
  return %0, %x : tensor<4xf32>, tensor<4xf32>
}
"""


def test_run_rejects_model_with_duplicate_output_names(hil, simulator, tmp_path):
    value = (FLOAT, [4])
    save_model(tmp_path / "twins.onnx", [helper.make_node("Exp", ["x"], ["y"])], [("x", *value)], [("y", *value)] * 2)
    (tmp_path / "twins.mlir").write_text(TWINS_MLIR)
    for model in ("twins.onnx", "twins.mlir"):
        ended = hil("run", model, "--board", simulator, "--json")
        ends(ended, 3, "IMPORT_ERROR", model, "2 outputs have the same name 'y'")


def test_run_rejects_vmfb_with_duplicate_output_names(hil, simulator, tmp_path):
    import iree.compiler

    flags = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
    flags.append("--iree-llvmcpu-target-cpu=generic")
    (tmp_path / "twins.vmfb").write_bytes(iree.compiler.compile_str(TWINS_MLIR, extra_args=flags))
    expected = ["--input", "4xf32=1 2 3 4", "--expected", "y=4xf32=1 2 3 4"]
    ended = hil("run", "twins.vmfb", "--board", simulator, *expected, "--json")
    ends(ended, 3, "IMPORT_ERROR", "2 outputs have the same name 'y'")


def test_run_reports_unknown_operator_as_import_error(hil, simulator, tmp_path):
    node = helper.make_node("Frobnicate", ["x"], ["y"], "the_odd_one")
    save_model(tmp_path / "odd.onnx", [node], [("x", FLOAT, [4])], [("y", FLOAT, [4])])
    for runtime in ("iree", "onnxruntime"):
        ended = hil("run", "odd.onnx", "--board", simulator, "--runtime", runtime, "--json")
        ends(ended, 3, "IMPORT_ERROR", "Frobnicate", "the_odd_one")


@pytest.mark.slow
def test_run_reports_unknown_operator_domain_per_runtime(hil, simulator, tmp_path):
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="com.example")
    path = save_model(tmp_path / "custom.onnx", [node], [("x", FLOAT, [4])], [("y", FLOAT, [4])])
    import onnx

    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    onnx.save(model, path)
    ends(hil("run", path, "--board", simulator, "--json"), 3, "COMPILE_ERROR", "Frobnicate")
    ends(hil("run", path, "--board", simulator, "--runtime", "onnxruntime", "--json"), 3, "LOAD_ERROR", "Frobnicate")


def test_run_reports_truncated_vmfb_as_import_or_load_error(hil, simulator, doubling, tmp_path):
    assert hil("compile", doubling, "-o", "good.vmfb").code == 0
    data = (tmp_path / "good.vmfb").read_bytes()
    np.save(tmp_path / "y.npy", np.zeros(4, np.float32))
    for size in (len(data) // 2, 40):
        (tmp_path / "cut.vmfb").write_bytes(data[:size])
        ended = hil("run", "cut.vmfb", "--board", simulator, "--expected", "y.npy", "--json")
        assert ended.code == 3, ended.out
        assert ended.case["outcome"] in ("IMPORT_ERROR", "LOAD_ERROR")
    ended = hil("run", "good.vmfb", "--board", simulator, "--input", "4xf32=0", "--expected", "y.npy", "--json")
    ends(ended, 0, "PASS")


def test_run_rejects_vmfb_without_expected_values(hil, simulator, doubling):
    assert hil("compile", doubling, "-o", "good.vmfb").code == 0
    refused(hil("run", "good.vmfb", "--board", simulator, "--json"), "--expected")


def test_run_reports_invalid_mlir_as_import_error(hil, simulator, tmp_path):
    (tmp_path / "bad.mlir").write_text("func.func @main( {")
    ends(hil("run", "bad.mlir", "--board", simulator, "--json"), 3, "IMPORT_ERROR", "bad.mlir")


# ---- usage errors: exit code 2


def test_run_rejects_missing_file(hil, simulator):
    refused(hil("run", "nowhere.onnx", "--board", simulator, "--json"), "nowhere.onnx")


def test_run_rejects_directory_and_unknown_file_type(hil, simulator, tmp_path):
    (tmp_path / "model.xyz").write_text("?")
    refused(hil("run", tmp_path, "--board", simulator, "--json"))
    refused(hil("run", "model.xyz", "--board", simulator, "--json"), "model.xyz")


def test_cli_rejects_unknown_board_runtime_and_fault(hil, doubling):
    refused(hil("run", doubling, "--board", "nonesuch", "--json"), "nonesuch")
    refused(hil("board", "show", "root@somewhere", "--json"), "is an address", "hil board info root@somewhere")
    refused(hil("run", doubling, "--board", "sim-small1", "--json"), "did you mean 'sim-small'?")
    refused(hil("run", doubling, "--reference", "onnxruntme", "--json"), "did you mean 'onnxruntime'?")
    refused(hil("run", doubling, "--runtime-hw-type", "nonesuch", "--json"), "nonesuch")
    refused(hil("run", doubling, "--runtime", "nonesuch", "--json"), "nonesuch")
    refused(hil("run", doubling, "--fault", "nonesuch", "--json"), "nonesuch")


def test_run_rejects_fault_for_external_board(hil, doubling, simulator):
    refused(hil("run", doubling, "--board", simulator, "--fault", "crash", "--json"), "--fault requires a simulator")


def test_run_rejects_unknown_function(hil, simulator, doubling, tmp_path):
    refused(hil("run", doubling, "--board", simulator, "--function", "nothing", "--json"), "nothing")
    (tmp_path / "two.mlir").write_text(
        "func.func @a(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }\n"
        "func.func @b(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }\n"
    )
    refused(hil("run", "two.mlir", "--board", simulator, "--json"), "a, b")
    refused(hil("run", "two.mlir", "--board", simulator, "--function", "c", "--json"), "a, b")
    given = ["--input", "4xf32=1", "--expected", "4xf32=1"]
    assert hil("run", "two.mlir", "--board", simulator, "--function", "b", *given).code == 0


@pytest.mark.parametrize(
    ("array", "text", "word"),
    [
        (np.zeros(4, np.float64), "x={}", "float64"),
        (np.zeros(4, np.int32), "x={}", "int32"),
        (np.zeros(5, np.float32), "x={}", "5"),
        (np.zeros((4, 1), np.float32), "x={}", "4x1"),
        (np.zeros(4, np.float32), "wrong_name={}", "wrong_name"),
    ],
)
def test_run_rejects_input_with_wrong_dtype_shape_or_name(hil, simulator, doubling, tmp_path, array, text, word):
    np.save(tmp_path / "x.npy", array)
    refused(hil("run", doubling, "--board", simulator, "--input", text.format("x.npy"), "--json"), word)
    assert not (tmp_path / "hil-runs").exists()


def test_run_rejects_extra_missing_and_pickled_inputs(hil, simulator, doubling, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(4, np.float32))
    np.save(tmp_path / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-3])
    for inputs in (["x.npy", "x.npy"], ["x=gone.npy"], ["x=pickle.npy"], ["x=cut.npy"]):
        options = [part for text in inputs for part in ("--input", text)]
        refused(hil("run", doubling, "--board", simulator, *options, "--json"))


@pytest.mark.slow
def test_run_reports_unknown_target_cpu_as_compile_error(hil, simulator, doubling):
    for flag in ("--iree-llvmcpu-target-cpu=cortex-b12", "--iree-llvmcpu-target-cpu-features=+nonesuch"):
        flags = ["--compile-flag", "--iree-llvmcpu-target-cpu=generic", "--compile-flag", flag]
        ended = hil("run", doubling, "--board", simulator, *flags, "--json")
        ends(ended, 3, "COMPILE_ERROR", flag.split("=")[1], "not a recognized")


@pytest.mark.parametrize(
    "options",
    [
        ["--rtol", "nan"],
        ["--rtol", "-1"],
        ["--rtol", "1"],
        ["--atol", "inf"],
        ["--iterations", "0"],
        ["--warmup", "-1"],
        ["--timeout", "0"],
        ["--dim", "N"],
        ["--dim", "N=4"],
        ["--input-range", "5:1"],
        ["--reference", "nonesuch"],
    ],
)
def test_run_rejects_invalid_option_values(hil, simulator, doubling, options):
    refused(hil("run", doubling, "--board", simulator, *options, "--json"))


def test_run_requires_value_for_open_dimension(hil, simulator):
    ended = hil("run", DIGITS / "digits_cnn_batch.onnx", "--board", simulator, "--json")
    refused(ended, "--dim N=1", "Nx1x8x8 float32")


def test_run_lists_all_open_dimensions(hil, simulator, tmp_path):
    node = helper.make_node("MatMul", ["a", "b"], ["y"])
    values = [("a", FLOAT, ["N", "K"]), ("b", FLOAT, ["K", "M"])]
    save_model(tmp_path / "open.onnx", [node], values, [("y", FLOAT, ["N", "M"])])
    refused(
        hil("run", "open.onnx", "--board", simulator, "--json"),
        "missing size for dimensions 'N' and 'K' and 'M'", "--dim N=1 --dim K=1 --dim M=1",
    )  # fmt: skip
    sizes = ("--dim", "N=2", "--dim", "K=3")
    refused(
        hil("run", "open.onnx", "--board", simulator, *sizes, "--json"), "missing size for dimension 'M'", "--dim M=1"
    )
    ended = hil("run", "open.onnx", "--board", simulator, *sizes, "--dim", "M=4", "--json")
    ends(ended, 0, "PASS")
    assert ended.case["name"] == "open"
    listed = hil("cache", "ls", "--json").document["entries"]
    assert {entry["meta"]["model"] for entry in listed if entry["kind"] in ("artifact", "reference")} >= {"open"}
    assert not {entry["meta"].get("model") for entry in listed} & {"N", "K", "M"}


def test_run_without_pytorch_suggests_torch_extra(hil, tmp_path):
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is installed here")
    (tmp_path / "net.pt2").write_bytes(b"PK")
    refused(hil("run", "net.pt2", "--json"), "requires PyTorch", "[torch]'")


def test_compile_reports_unwritable_directory_with_valid_option(hil, doubling):
    ended = hil("compile", doubling, "--json", cwd=Path("/proc"))
    assert ended.document["error"]["hint"].endswith("-o selects another directory")
    assert "--out" not in ended.err and "/proc" in ended.err


def test_run_reports_missing_board_with_exit_code_4(hil, doubling, tmp_path):
    ended = hil("run", doubling, "--board", f"unix:{tmp_path}/nobody.sock", "--json")
    ends(ended, 4, "BOARD_UNREACHABLE", "no agent responds", "socket not found")
    assert ended.document["folder"] == "" and not (tmp_path / "hil-runs").exists()


@pytest.mark.parametrize("verb", [["run"], ["bench"], ["suite", "run"], ["bisect"], ["board", "info"]])
def test_cli_reports_closed_port_without_leaving_files(hil, doubling, tmp_path, verb):
    port, before = free_port(), set(tmp_path.iterdir())
    model = [] if verb[0] == "board" else [doubling]
    ended = hil(*verb, *model, "--board", f"127.0.0.1:{port}")
    assert ended.code == 4
    said = " ".join((ended.out + ended.err).split())
    assert f"no agent responds at 127.0.0.1:{port}: Connection refused" in said
    # Ignore the user's directories: the artifact cache and the key that seals runs.
    assert set(tmp_path.iterdir()) - {tmp_path / ".cache", tmp_path / ".config"} == before


def test_suite_without_board_stores_zero_cases(hil, doubling, tmp_path):
    (tmp_path / "models").mkdir()
    doubling.rename(tmp_path / "models" / "doubling.onnx")
    ended = hil("suite", "run", "models", "--board", f"unix:{tmp_path}/nobody.sock", "--out", "out", "--json")
    error = ended.document["error"]
    assert (ended.code, error["kind"], error["outcome"]) == (4, "BoardUnreachable", "BOARD_UNREACHABLE")
    assert not (tmp_path / "out").exists()


def test_run_stores_import_error_despite_unreachable_board(hil, doubling, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07broken")
    ended = hil("run", "broken.onnx", doubling, "--board", f"unix:{tmp_path}/nobody.sock", "--json")
    assert [case["outcome"] for case in ended.document["cases"]] == ["IMPORT_ERROR", "BOARD_UNREACHABLE"]
    assert (tmp_path / ended.document["folder"] / "run.json").exists()


def test_run_rejects_excessive_atol(hil, simulator, doubling, tmp_path):
    ended = hil("run", doubling, "--board", simulator, "--atol", "1e6", "--json")
    assert ended.code == 2


# ---- unusual but valid models: exit code 0


def test_run_passes_zero_size_and_scalar_tensors(hil, simulator, tmp_path):
    nodes = [helper.make_node("Add", ["e", "e"], ["f"]), helper.make_node("Mul", ["s", "s"], ["t"])]
    values = [("e", FLOAT, [0, 3]), ("s", FLOAT, [])], [("f", FLOAT, [0, 3]), ("t", FLOAT, [])]
    save_model(tmp_path / "odd.onnx", nodes, *values)
    for runtime in ("iree", "onnxruntime"):
        ends(hil("run", "odd.onnx", "--board", simulator, "--runtime", runtime, "--json"), 0, "PASS")


@pytest.mark.slow
def test_run_passes_model_without_inputs(hil, simulator, tmp_path):
    value = helper.make_tensor("v", FLOAT, [3], [1, 2, 3])
    nodes = [helper.make_node("Constant", [], ["c"], value=value), helper.make_node("Neg", ["c"], ["y"])]
    save_model(tmp_path / "const.onnx", nodes, [], [("y", FLOAT, [3])])
    for runtime in ("iree", "onnxruntime"):
        ends(hil("run", "const.onnx", "--board", simulator, "--runtime", runtime, "--json"), 0, "PASS")


@pytest.mark.slow
def test_run_passes_model_with_hundred_outputs(hil, simulator, tmp_path):
    nodes = [helper.make_node("Add", ["x", f"c{i}"], [f"y{i}"]) for i in range(100)]
    weights = [helper.make_tensor(f"c{i}", FLOAT, [2], [i, -i]) for i in range(100)]
    outputs = [(f"y{i}", FLOAT, [2]) for i in range(100)]
    save_model(tmp_path / "many.onnx", nodes, [("x", FLOAT, [2])], outputs, weights)
    for runtime in ("iree", "onnxruntime"):
        ended = hil("run", "many.onnx", "--board", simulator, "--runtime", runtime, "--json")
        ends(ended, 0, "PASS")
        assert [one["name"] for one in ended.case["verdicts"][0]["outputs"]] == [f"y{i}" for i in range(100)]


def test_run_passes_nan_inputs(hil, simulator, doubling, tmp_path):
    np.save(tmp_path / "x.npy", np.array([1, np.nan, np.inf, -np.inf], np.float32))
    for runtime in ("iree", "onnxruntime"):
        ended = hil("run", doubling, "--board", simulator, "--runtime", runtime, "--input", "x.npy", "--json")
        ends(ended, 0, "PASS")


# ---- full or unwritable disks


def test_run_rejects_unwritable_output_directory(hil, simulator, doubling, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for out in ("file", "file/below", "/proc/hil"):
        refused(hil("run", doubling, "--board", simulator, "--out", out, "--json"), "cannot write to")


@pytest.fixture
def full_disk(tmp_path):
    """Mount a full file system of 256 KiB."""
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    yield place
    subprocess.run(["umount", place], check=True)


def test_run_reports_full_disk_in_output_directory(hil, simulator, doubling, full_disk):
    refused(hil("run", doubling, "--board", simulator, "--out", full_disk / "runs", "--json"), "No space left")


def test_run_reports_full_disk_in_cache(hil, simulator, doubling, full_disk, environment):
    environment["HIL_CACHE_DIR"] = str(full_disk / "cache")
    ended = hil("run", doubling, "--board", simulator, "--json")
    assert ended.code == 2
    assert "no space left" in ended.err.lower()


@pytest.mark.parametrize(
    ("rows", "code", "outcome", "words"),
    [
        pytest.param(128, 4, "BOARD_UNFIT", "bytes free", id="full"),
        pytest.param(256, 3, "LOAD_ERROR", "the board's disk has only", id="too small"),
    ],
)
def test_run_reports_full_disk_on_board(hil, full_disk, tmp_path, rows, code, outcome, words):
    from support.agents import start_process, stop_process

    (full_disk / "filler").unlink()
    (full_disk / "filler").write_bytes(b"\0" * 200_000)
    big = np.random.default_rng(0).random((rows, 256), np.float32)
    weights = helper.make_tensor("w", FLOAT, [rows, 256], big.tobytes(), raw=True)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    save_model(tmp_path / "big.onnx", [node], [("x", FLOAT, [1, rows])], [("y", FLOAT, [1, 256])], [weights])
    process, address = start_process("hil.agent", f"unix:{tmp_path}/a.sock", full_disk / "store")
    try:
        ended = hil("run", "big.onnx", "--board", address, "--runtime", "onnxruntime", "--json")
        ends(ended, code, outcome, words)
    finally:
        stop_process(process)


# ---- interrupts


STAGES = ("compile", "push", "run", "refer")


@pytest.mark.parametrize("stage", slow_except(STAGES, 2))
def test_run_resumes_after_interrupt_in_any_stage(hil, environment, tmp_path, stage, monkeypatch):
    model, options = slow_in(stage, tmp_path)
    command = [sys.executable, "-m", "hil.controller.cli.main", "run", str(model), *options]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    wait_for_stage(tmp_path, stage)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"Traceback" not in said, said
    assert b"--resume" in said
    (path,) = (tmp_path / "hil-runs").glob("*/run.json")
    record = json.loads(path.read_text())
    assert record["finished"] is False
    assert record["cases"][0]["outcome"] is None
    assert not [line for line in processes() if str(tmp_path) in line or f"hil-sim-{process.pid}" in line]
    # The run finishes after the cause of the delay is removed.
    record["request"].update(faults=[], references=["onnxruntime"])
    path.write_text(json.dumps(record))
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, environment[name])
    seal(path.parent, record["request"])  # resume accepts only sealed requests
    resumed = hil("run", "--resume", record["id"], "--json")
    assert resumed.code == 0, resumed.out
    assert resumed.document["id"] == record["id"]


def slow_in(stage: str, folder: Path) -> tuple[Path, list[str]]:
    """Return a model and options that take long in a stage."""
    if stage == "compile":
        # A long chain of products takes seconds to compile. The inputs are zero because products amplify rounding
        # errors.
        nodes = [
            node
            for i in range(120)
            for node in (
                helper.make_node("MatMul", [f"x{i}", f"x{i}"], [f"m{i}"]),
                helper.make_node("Tanh", [f"m{i}"], [f"x{i + 1}"]),
            )
        ]
        values = [("x0", FLOAT, [64, 64])], [("x120", FLOAT, [64, 64])]
        return save_model(folder / "compile.onnx", nodes, *values), ["--input-range", "0:0"]
    if stage == "refer":
        # ONNX's reference evaluator computes Erf per element in Python.
        nodes = [helper.make_node("Erf", [f"x{i}"], [f"x{i + 1}"]) for i in range(20)]
        path = save_model(folder / "refer.onnx", nodes, [("x0", FLOAT, [2048, 1024])], [("x20", FLOAT, [2048, 1024])])
        return path, ["--runtime", "onnxruntime", "--reference", "onnx-reference"]
    weights = np.random.default_rng(0).random((1024, 1024), np.float32)
    initializer = helper.make_tensor("w", FLOAT, [1024, 1024], weights.tobytes(), raw=True)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = save_model(
        folder / f"{stage}.onnx", [node], [("x", FLOAT, [1, 1024])], [("y", FLOAT, [1, 1024])], [initializer]
    )
    tolerance = ["--runtime", "onnxruntime", "--rtol", "0.01"]
    return path, [*tolerance, "--fault", "slow:rate=1e5" if stage == "push" else "hang"]


def wait_for_stage(folder: Path, stage: str) -> None:
    """Wait until the stored record shows the stage."""

    def is_there() -> bool:
        records = [json.loads(path.read_text()) for path in (folder / "hil-runs").glob("*/run.json")]
        cases = [record["cases"][0] for record in records if record["cases"]]
        return any(case.get("stage") == stage or (stage == "refer" and case.get("outputs")) for case in cases)

    eventually(is_there, stage)
    time.sleep(0.3)


def processes() -> list[str]:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()


# ---- large models


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["onnxruntime", "iree"])
def test_run_passes_2_1_gb_model_with_external_data(hil, tmp_path, environment, runtime):
    environment["HIL_CACHE_DIR"] = str(tmp_path / "cache")
    rows = 2_150_000_000 // 4096
    table = TensorProto(name="table", data_type=FLOAT, dims=[rows, 1024], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "table.data"), ("offset", "0"), ("length", str(rows * 4096))):
        table.external_data.add(key=key, value=value)
    with (tmp_path / "table.data").open("wb") as file:
        file.truncate(rows * 4096)
        file.seek(5 * 4096)
        file.write(np.arange(1024, dtype=np.float32).tobytes())
    node = helper.make_node("Gather", ["table", "row"], ["y"])
    save_model(tmp_path / "big.onnx", [node], [("row", TensorProto.INT64, [2])], [("y", FLOAT, [2, 1024])], [table])
    ended = hil("run", "big.onnx", "--runtime", runtime, "--input", "row=2xi64=5 7", "--timeout", 200, "--json")
    ends(ended, 0, "PASS")
    y = np.load(tmp_path / ended.document["folder"] / ended.case["outputs"][0]["file"])
    np.testing.assert_array_equal(y, [np.arange(1024), np.zeros(1024)])
