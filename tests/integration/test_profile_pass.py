"""Profiling passes: every input type, failing tools, and tools missing on the board."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.agents import compile_mlir
from support.waiting import eventually

from hil import errors
from hil.agent.server import Agent, AgentConfig
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.choosing.board_factory import connect_board
from hil.core.boards import load_board
from hil.core.clock import convert_by_pairs
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.core.tensors import TensorSpec, parse_dtype
from hil.formats.iree_command import PROFILE_TOOL
from hil.formats.iree_values import format_mlir_type

# A controller during a profiling pass.
CONTROLLER = """
import sys
import numpy as np
from support.agents import program
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
client = AgentClient(AgentEndpoint(sys.argv[1]), "test")
client.open_session("test", on_wait=print)
add = program("iree", __import__("pathlib").Path(sys.argv[2]))
add.push(client)
loaded = add.load(client)
print(loaded.worker_pid, flush=True)
a = np.ones(4096, np.float32)
client.profile(loaded.program_id, {"a": a, "b": a}, timeout=600)
"""
A = np.arange(4096, dtype=np.float32)
INPUTS = {"a": A, "b": A}
DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 complex64 bfloat16 float8_e4m3fn int4 uint4"
).split()
SUM = """
func.func @numbers(%a: tensor<2xf32>, %n: i32, %l: i64, %f: f32, %t: i1) -> (tensor<2xf32>, i32, i64, f32, i1) {
  return %a, %n, %l, %f, %t : tensor<2xf32>, i32, i64, f32, i1
}
func.func @half(%n: f16) -> f16 { return %n : f16 }
func.func @open(%a: tensor<?x2xf32>) -> tensor<?x2xf32> {
  %0 = arith.addf %a, %a : tensor<?x2xf32>
  return %0 : tensor<?x2xf32>
}
"""
WEIGHTED = """
util.global private @w = #flow.parameter.named<"model"::"w"> : tensor<4xf32>
func.func @main(%a: tensor<4xf32>) -> tensor<4xf32> {
  %w = util.global.load @w : tensor<4xf32>
  %0 = arith.addf %a, %w : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""
# A vendor runtime without profiling.
PLAIN = """
class Plain:
    def __init__(self, options): ...
    @staticmethod
    def describe():
        return {"version": "1", "devices": ["plain"]}
    def prepare(self, device): ...
    def load(self, folder, main, device, function):
        return Program()
class Program:
    inputs = outputs = ()
    function = "main"
    def bind(self, inputs): ...
    def run(self): ...
    def fetch(self):
        return []
"""


# A runtime with profiling and an invalid clock file.
CONFUSED = f"""{PLAIN}
    def profile(self, warmup, iterations, folder, tool, check):
        (folder / "clock.json").write_text("[")
        return [folder / "clock.json"]
"""


def artifact(path: Path, function: str = "") -> Artifact:
    return Artifact("iree", path.name, {path.name: path}, {path.name: digest_file(path)}, function, "none")


def processes_of(group: int) -> list[str]:
    """Return the live processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, fields = stat.read_text().rsplit(")", 1)
        except OSError:
            continue
        if int(fields.split()[2]) == group and fields.split()[0] != "Z":
            found.append(name)
    return found


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Functions of every dtype, with scalars and with open dimensions."""
    folder = tmp_path_factory.mktemp("odd")
    lines = [SUM]
    for dtype in DTYPES:
        tensor = format_mlir_type(TensorSpec("", dtype, (3,)))
        lines.append(f"func.func @{dtype}(%a: {tensor}) -> {tensor} {{ return %a : {tensor} }}")
    (folder / "odd.mlir").write_text("\n".join(lines))
    return compile_mlir(folder / "odd.mlir", platform.machine(), folder / "odd.vmfb").path


@pytest.fixture(scope="module")
def simulated():
    with connect_board(BoardChoice(load_board("sim").config)) as board:
        yield board


@pytest.fixture
def profile(simulated, odd):
    """Run a profiling pass of one function."""

    def make(function: str, **inputs: np.ndarray):
        simulated.push(artifact(odd, function))
        with simulated.load(artifact(odd, function)) as program:
            return program.profile(inputs, iterations=2)

    return make


@pytest.mark.slow
def test_profile_supports_every_dtype(profile):
    for dtype in DTYPES:
        value = np.array([1, 0, 1], np.uint8).astype(np.float32).astype(parse_dtype(dtype))
        assert profile(dtype, a=value).files, dtype


def test_profile_supports_scalars_and_open_dimensions(profile):
    numbers = {"n": np.array(-3, np.int32), "l": np.array(1 << 40, np.int64), "f": np.array(0.1, np.float32)}
    assert profile("numbers", a=A[:2], **numbers, t=np.array(True)).files
    for rows in (3, 0):
        assert profile("open", a=np.ones((rows, 2), np.float32)).files


def test_profile_loads_external_weights(simulated, tmp_path):
    from iree.runtime import save_archive_file

    (tmp_path / "w.mlir").write_text(WEIGHTED)
    made = compile_mlir(tmp_path / "w.mlir", platform.machine(), tmp_path / "w.vmfb")
    save_archive_file({"w": np.ones(4, np.float32)}, str(tmp_path / "w.irpa"))
    files = {path.name: path for path in (made.path, tmp_path / "w.irpa")}
    digests = {name: digest_file(path) for name, path in files.items()}
    weighted = Artifact("iree", made.path.name, files, digests, "", "none")
    simulated.push(weighted)
    with simulated.load(weighted) as program:
        assert program.profile({"a": A[:4]}).files


def test_profile_rejects_unsupported_scalar_dtype(profile):
    with pytest.raises(errors.RunFailed, match="does not support float16 numbers"):
        profile("half", n=np.array(1, np.float16))


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["iree", "onnxruntime"])
@pytest.mark.parametrize(
    ("how", "words"),
    [("missing", "cannot start .*: No such file"), ("crash", "was killed by SIGSEGV")],
)
def test_program_survives_failing_profile_tool(start_agent, open_client, add_programs, runtime, how, words):
    client = open_client(start_agent("--fault", f"profile:how={how},times=1", module="hil.sim"))
    add = add_programs[runtime]
    add.push(client)
    loaded = add.load(client)
    with pytest.raises(errors.RunFailed, match=words) as caught:
        client.profile(loaded.program_id, INPUTS)
    assert how == "missing" or "simulated crash" in caught.value.detail
    result = client.invoke(loaded.program_id, INPUTS)
    np.testing.assert_array_equal(next(iter(result.outputs.values())), A + A)
    assert client.profile(loaded.program_id, INPUTS).files


@pytest.mark.slow
def test_profile_timeout_kills_hanging_tool_and_children(start_agent, open_client, add_programs):
    client = open_client(start_agent("--fault", "profile:how=hang,times=1", module="hil.sim"))
    add = add_programs["iree"]
    add.push(client)
    loaded = add.load(client)
    with pytest.raises(errors.StageTimeout, match="limit of 1 s"):
        client.profile(loaded.program_id, INPUTS, timeout=1)
    eventually(lambda: not processes_of(loaded.worker_pid))
    assert client.profile(add.load(client).program_id, INPUTS).files


@pytest.mark.parametrize("victim", ["controller", "worker"])
def test_kill_during_profile_pass_cleans_up(start_agent, add_programs, tmp_path, victim):
    address = start_agent("--fault", "profile:how=hang", module="hil.sim")
    command = [sys.executable, "-c", CONTROLLER, address, str(add_programs["iree"].path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as controller:
        try:
            worker = int(controller.stdout.readline())
            eventually(lambda: len(processes_of(worker)) == 2)
            os.kill(worker if victim == "worker" else controller.pid, signal.SIGKILL)
            eventually(lambda: not processes_of(worker))
            eventually(lambda: not list((tmp_path / "store-0/programs").iterdir()))
        finally:
            controller.kill()


def test_profile_returns_truncated_file(start_agent, open_client, add_programs):
    client = open_client(start_agent("--fault", "profile:how=truncate,times=1", module="hil.sim"))
    add = add_programs["onnxruntime"]
    add.push(client)
    loaded = add.load(client)
    cut, whole = (client.profile(loaded.program_id, INPUTS).files["onnxruntime.json"] for _ in range(2))
    json.loads(bytes(whole))
    with pytest.raises(ValueError, match="line"):
        json.loads(bytes(cut))


def test_profile_files_contain_every_iteration(start_agent, open_client, add_programs):
    client = open_client(start_agent())
    add = add_programs["onnxruntime"]
    add.push(client)
    taken = client.profile(add.load(client).program_id, INPUTS, warmup=2, iterations=3)
    events = json.loads(bytes(taken.files["onnxruntime.json"]))
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    assert len(kernels) == 5
    for kernel in kernels:
        for moment in (kernel["ts"], kernel["ts"] + kernel["dur"]):
            # The profile clock has microsecond resolution.
            assert (
                taken.board.start_ns - 1000
                <= convert_by_pairs(moment * 1000, taken.clock_pairs)
                <= taken.board.end_ns + 1000
            )


def test_profile_streams_large_file(start_agent, open_client, add_programs):
    client = open_client(start_agent())
    add = add_programs["onnxruntime"]
    add.push(client)
    taken = client.profile(add.load(client).program_id, INPUTS, iterations=4000)
    assert len(taken.files["onnxruntime.json"]) > 1 << 20
    json.loads(bytes(taken.files["onnxruntime.json"]))


def test_oversized_profile_raises_run_failed(start_agent, open_client, add_programs):
    client = open_client(start_agent("--config", "sim-small", module="hil.sim"))
    add = add_programs["onnxruntime"]
    add.push(client)
    loaded = add.load(client)
    with pytest.raises(errors.RunFailed, match=r"the profile has \d+ bytes, more than the board's 1048576") as caught:
        client.profile(loaded.program_id, INPUTS, iterations=4000)
    assert caught.value.hint == "use fewer iterations"
    assert client.profile(loaded.program_id, INPUTS).files


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [("plain", PLAIN, "cannot profile"), ("confused", CONFUSED, "cannot read the profile's clock.json")],
)
def test_runtime_without_profiler_reports_error_and_runs(tmp_path, monkeypatch, name, text, words):
    (tmp_path / f"{name}_runtime.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    runtimes = {"plain": f"{name}_runtime:Plain"}
    agent = Agent(AgentConfig(f"unix:{tmp_path}/a.sock", tmp_path / "store", runtimes=runtimes))
    client = AgentClient(AgentEndpoint(agent.address), "plain")
    try:
        client.open_session("test", on_wait=print)
        (tmp_path / "program").write_text("anything")
        digest = digest_file(tmp_path / "program")
        client.put({digest: (tmp_path / "program", 0)})
        loaded = client.load({"p": digest}, "p", runtime="plain", device="", function="", timeout=30)
        with pytest.raises(errors.RunFailed, match=words):
            client.profile(loaded.program_id, {})
        client.invoke(loaded.program_id, {})
    finally:
        client.close()
        agent.stop()


@pytest.mark.slow
def test_missing_profile_tool_uploads_once_and_resumes(odd):
    said: list[str] = []
    program = artifact(odd, "open")
    with connect_board(
        BoardChoice(load_board("sim").config, faults=("drop:at=0.5,times=2",), say=said.append)
    ) as board:
        lacking = [{**one, "profile_tool": PROFILE_TOOL} for one in board.info["runtimes"] if one["name"] == "iree"]
        board.push(program)
        before = board.payload_bytes_sent
        with board.load(program) as loaded:
            board.info = {**board.info, "runtimes": lacking}
            monkey = board._describe
            board._describe = lambda: {**monkey(), "runtimes": lacking}
            x = {"a": np.ones((2, 2), np.float32)}
            assert loaded.profile(x).files["profile.ireeprof"]
            sent = board.payload_bytes_sent - before
            assert sent > 1_000_000
            assert sum("reconnecting" in line for line in said) == 2
            result, _ = loaded.run(x)
            np.testing.assert_array_equal(next(iter(result.outputs.values())), 2 * x["a"])
            assert loaded.profile(x).files
            assert board.payload_bytes_sent - before == sent
