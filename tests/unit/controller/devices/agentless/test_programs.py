"""Boards without an agent, against the real iree-run-module and a real shell on this machine."""

from __future__ import annotations

import itertools
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.agents import ADD_MLIR
from support.command_shell import LocalShell
from support.waiting import eventually

from hil.controller.devices.agentless import scripts
from hil.controller.devices.agentless.scripts import machine, readings
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_factory import connect_board
from hil.controller.devices.deploy.wheels import iree_tool
from hil.controller.storage.cache import Cache
from hil.core.board_config import BoardConfig, Connection, RuntimeCommand, fill
from hil.core.boards import parse_runtime
from hil.core.digest import digest_file
from hil.core.results import Artifact, Part
from hil.core.tensors import Array, TensorSpec, dtype_of
from hil.errors import (
    BoardBusy,
    BoardError,
    BoardLost,
    LoadFailed,
    RanElsewhere,
    RunCrashed,
    RunFailed,
    StageTimeout,
    StorageError,
    UsageError,
)
from hil.formats.iree_command import PROFILE_TOOL, RUN_TOOL, own_tool
from hil.formats.iree_values import mlir_type

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the commands are those of a Linux board")

# Every dtype that IREE passes; string and those of 2 bits are refused on the way to it.
DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int4 uint4"
).split()
FLAGS = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]
HOST = ["--iree-llvmcpu-target-cpu=host", "--iree-input-demote-f64-to-f32=false"]
ODD_NAME = "w $(touch pwned) 'q' ;\n-x"


def compile_mlir(text: str, folder: Path, name: str, *flags: str) -> Path:
    source, output = folder / f"{name}.mlir", folder / f"{name}.vmfb"
    source.write_text(text)
    command = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile", *FLAGS, *(flags or HOST)]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    return output


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each dtype a function that gives back what it takes: of three elements, and of two rows of any length."""
    lines = []
    for dtype in DTYPES:
        for kind, shape in (("fixed", (3,)), ("rows", (2, None))):
            tensor = mlir_type(TensorSpec("", dtype, shape))
            lines.append(f"func.func @{dtype}_{kind}(%a: {tensor}) -> {tensor} {{ return %a : {tensor} }}")
    return compile_mlir("\n".join(lines), tmp_path_factory.mktemp("identities"), "identities")


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Functions of all sorts of signatures and ends."""
    escaped = ODD_NAME.replace("\n", "\\0A")
    text = f"""
    func.func @main(%a: tensor<4xf32>, %n: i32) -> (tensor<4xf32>, i32) {{
      %0 = arith.addf %a, %a : tensor<4xf32>
      %1 = arith.addi %n, %n : i32
      return %0, %1 : tensor<4xf32>, i32
    }}
    func.func @numbers(%a: i64, %b: f32, %c: f64, %d: i1, %e: i8) -> (i64, f32, f64, i1, i8) {{
      return %a, %b, %c, %d, %e : i64, f32, f64, i1, i8
    }}
    func.func @half(%a: f16) -> f16 {{ return %a : f16 }}
    func.func @empty(%a: tensor<0x3xf32>) -> tensor<0x3xf32> {{
      %0 = arith.addf %a, %a : tensor<0x3xf32>
      return %0 : tensor<0x3xf32>
    }}
    func.func @none() -> tensor<2xf64> {{
      %0 = arith.constant dense<[1.5, 2.5]> : tensor<2xf64>
      return %0 : tensor<2xf64>
    }}
    func.func @open(%a: tensor<?x?xbf16>) -> tensor<?x?xbf16> {{ return %a : tensor<?x?xbf16> }}
    func.func @refuses(%n: i32) -> i32 {{
      %0 = arith.constant 3 : i32
      %1 = arith.cmpi eq, %n, %0 : i32
      cf.assert %1, "it is not three"
      return %n : i32
    }}
    func.func @hangs(%n: i32) -> i32 {{
      %0 = scf.while (%i = %n) : (i32) -> i32 {{
        %1 = arith.constant 0 : i32
        %2 = arith.cmpi ne, %n, %1 : i32
        scf.condition(%2) %i : i32
      }} do {{
      ^bb0(%i: i32):
        %3 = arith.addi %i, %n : i32
        scf.yield %3 : i32
      }}
      return %0 : i32
    }}
    func.func @"{escaped}"(%a: tensor<2xi32>) -> tensor<2xi32> {{ return %a : tensor<2xi32> }}
    """
    return compile_mlir(text, tmp_path_factory.mktemp("functions"), "functions")


def artifact_of(path: Path, function: str, **more: object) -> Artifact:
    files = {path.name: path}
    digests = {path.name: digest_file(path)}
    return replace(Artifact("iree", path.name, files, digests, function, "none"), **more)


@pytest.fixture
def shell(tmp_path: Path) -> LocalShell:
    """A board's home whose name is as bad as a name can be."""
    home = tmp_path / "a 'home' $(of) \"\\ \n-sorts"
    home.mkdir()
    return LocalShell(home)


@pytest.fixture
def open_board(shell: LocalShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Board]]:
    """Opens boards; ``shell`` is how each is reached, ``reopen`` how it is reached after a break."""
    boards: list[Board] = []

    def make(command: RuntimeCommand | None = None, **options: object) -> Board:
        connection = Connection(address="root@lab", folder=str(options.pop("folder", "")))
        devices = {"iree": str(options.pop("device", "local-sync"))}
        compile_flags = {"iree": tuple(FLAGS)}
        config = BoardConfig(
            "lab",
            "lab",
            devices=devices,
            compile_flags=compile_flags,
            connection=connection,
            command=command or RuntimeCommand(kind="command"),
            path=tmp_path / "lab.toml",
        )
        first, reopen = options.pop("shell", shell), options.pop("reopen", lambda: shell)
        logins = itertools.chain([first], iter(reopen, None))
        monkeypatch.setattr("hil.controller.devices.ssh.connect.open_shell", lambda *_, **__: next(logins))
        boards.append(connect_board(BoardChoice(config, **options)))
        return boards[-1]

    yield make
    for board in boards:
        board.close()


def run(board: Board, artifact: Artifact, *inputs: Array, **options: object):
    board.push(artifact)
    with board.load(artifact) as program:
        named = {spec.name: value for spec, value in zip(program.loaded.inputs, inputs, strict=False)}
        named |= {f"more{number}": value for number, value in enumerate(inputs[len(named) :])}
        result, call = program.run(named, **options)
        return result, call, program


def vendor(shell: LocalShell, text: str) -> str:
    """A vendor's command on the board, in sh."""
    path = shell.home / "vendor-run"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# ---- tensors


@pytest.mark.ci
def test_every_dtype_comes_back_as_it_went(open_board, identities):
    board = open_board()
    values = np.array([0, 1, 3, 2, 5, 7], np.uint8)
    for dtype in DTYPES:
        flat = values.astype(np.bool_) if dtype == "bool" else values.astype(np.float32).astype(dtype_of(dtype))
        for function, given in ((f"{dtype}_fixed", flat[:3]), (f"{dtype}_rows", flat.reshape(2, 3))):
            result, _, _ = run(board, artifact_of(identities, function), given)
            (output,) = result.outputs.values()
            assert (output.dtype, output.shape) == (given.dtype, given.shape), function
            assert output.tobytes() == given.tobytes(), function


def test_numbers_come_back_as_they_went(open_board, functions):
    given = [
        np.array(-(2**63), np.int64),
        np.array(0.1, np.float32),
        np.array(1 / 3, np.float64),
        np.array(True),
        np.array(-7, np.int8),
    ]
    result, _, _ = run(open_board(), artifact_of(functions, "numbers"), *given)
    for output, value in zip(result.outputs.values(), given, strict=True):
        assert (output.dtype, output.shape, output.item()) == (value.dtype, (), value.item())


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_none_come_back_too(open_board, functions, value):
    given = [np.array(1), np.array(value, np.float32), np.array(value), np.array(False), np.array(1, np.int8)]
    result, _, _ = run(open_board(), artifact_of(functions, "numbers"), *given)
    outputs = list(result.outputs.values())
    np.testing.assert_array_equal(outputs[1], given[1])
    np.testing.assert_array_equal(outputs[2], given[2])


def test_empty_tensors_no_inputs_and_several_outputs(open_board, functions):
    board = open_board()
    result, _, _ = run(board, artifact_of(functions, "empty"), np.empty((0, 3), np.float32))
    assert next(iter(result.outputs.values())).shape == (0, 3)
    result, _, _ = run(board, artifact_of(functions, "none"))
    np.testing.assert_array_equal(next(iter(result.outputs.values())), [1.5, 2.5])
    result, _, _ = run(board, artifact_of(functions, "main"), np.ones(4, np.float32), np.array(4, np.int32))
    doubled, number = result.outputs.values()
    np.testing.assert_array_equal(doubled, np.full(4, 2.0))
    assert number == 8


def test_outputs_take_the_names_of_the_model(open_board, functions):
    inputs = (np.ones(4, np.float32), np.array(4, np.int32))
    result, _, _ = run(open_board(), artifact_of(functions, "main"), *inputs, names=("sum", "twice"))
    assert list(result.outputs) == ["sum", "twice"]


def test_what_a_command_cannot_pass_is_refused_before_it_is_run(open_board, functions):
    board = open_board()
    for function, words in (("half", "no float16 numbers"), ("open", "not its shape")):
        with pytest.raises(LoadFailed, match=words) as caught:
            board.load(artifact_of(functions, function))
        assert caught.value.stage == "load"
        assert caught.value.hint


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([np.ones(4, np.float32)], "takes 2 inputs, got 1"),
        ([np.ones(4, np.float64), np.array(1, np.int32)], "does not take a 4 float64 tensor"),
        ([np.ones(5, np.float32), np.array(1, np.int32)], "does not take a 5 float32 tensor"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(open_board, functions, inputs, words):
    with pytest.raises(UsageError, match=words):
        run(open_board(), artifact_of(functions, "main"), *inputs)


# ---- names


def test_no_name_of_a_model_is_ever_read_as_shell(open_board, shell, functions, tmp_path):
    for name in ("w $(touch pwned) 'b\".vmfb", "-rf", "new\nline;touch pwned.vmfb", "`touch pwned`.$HOME"):
        path = tmp_path / name
        shutil.copy(functions, path)
        given = np.array([1, 2], np.int32)
        result, _, _ = run(open_board(folder="$(touch pwned) -f"), artifact_of(path, ODD_NAME), given)
        np.testing.assert_array_equal(next(iter(result.outputs.values())), given)
    assert not list(tmp_path.rglob("pwned*"))
    assert not Path("pwned").exists()
    assert (shell.home / "$(touch pwned) -f" / "command" / "programs").is_dir()


def test_an_output_pattern_keeps_what_fills_it_as_it_is():
    assert fill("{file}={value}", {"file": "{value}", "value": "$(x)"}) == "{value}=$(x)"


# ---- pushing


def test_a_second_run_pushes_nothing(open_board, shell, functions):
    artifact = artifact_of(functions, "none")
    first = open_board()
    assert first.push(artifact) == first.payload_bytes_sent > functions.stat().st_size
    assert first.push(artifact) == 0
    assert len(shell.puts) == 3, "the program, the command, and the tool that times it"
    assert open_board().push(artifact) == 0
    assert len(shell.puts) == 3


def test_progress_tells_how_much_of_how_much_was_sent(open_board, functions):
    told: list[tuple[int, int]] = []
    sent = open_board().push(artifact_of(functions, "none"), lambda done, total: told.append((done, total)))
    assert told[-1] == (sent, sent)


def test_a_file_that_was_damaged_on_the_board_is_sent_again(open_board, shell, functions):
    artifact = artifact_of(functions, "none")
    board = open_board()
    board.push(artifact)
    (file,) = Path(board.client.store.folder).glob("programs/*.vmfb")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert open_board().push(artifact) == functions.stat().st_size
    assert file.read_bytes() == functions.read_bytes()


def test_a_push_goes_on_over_a_new_link(open_board, shell, functions):
    broken = replace(shell, puts=[], cut_at_put=2)
    said: list[str] = []
    board = open_board(shell=broken, reopen=lambda: shell, say=said.append)
    result, _, _ = run(board, artifact_of(functions, "none"))
    assert result.outputs
    assert broken.closed
    assert any("connecting again" in text for text in said)


def test_a_push_that_is_cut_for_good_loses_the_board(open_board, shell, functions):
    broken = [replace(shell, puts=[], cut_at_put=1) for _ in range(4)]
    board = open_board(shell=broken[0], reopen=iter(broken[1:]).__next__)
    with pytest.raises(BoardLost) as caught:
        board.push(artifact_of(functions, "none"))
    assert (caught.value.stage, caught.value.board) == ("push", "lab")
    assert all(len(one.puts) == 1 for one in broken)


def test_a_program_that_no_disk_holds_is_refused(open_board, shell):
    board = open_board()
    with pytest.raises(LoadFailed, match="no room for the program"):
        board.client.store.make_room(1 << 60)


def test_programs_that_nobody_uses_make_room(open_board, shell, functions):
    board = open_board()
    board.push(artifact_of(functions, "none"))
    old = Path(board.client.store.folder) / "programs" / "old"
    old.write_bytes(b"x")
    os.utime(old, (time.time() - 40 * 86400,) * 2)
    board.client.store.make_room(1)
    assert not old.exists()
    assert len(list((Path(board.client.store.folder) / "programs").iterdir())) == 3


def test_a_program_that_had_to_make_room_is_sent_again(open_board, shell, functions, identities):
    board = open_board()
    first, second = artifact_of(functions, "none"), artifact_of(identities, "int8_fixed")
    board.push(first)
    for path in (Path(board.client.store.folder) / "programs").glob("*.vmfb"):
        os.utime(path, (time.time() - 40 * 86400,) * 2)
    board.push(second)
    assert board.push(first) == functions.stat().st_size


# ---- what is left behind


def test_a_run_leaves_nothing_behind_and_nobody_else_can_look(open_board, functions):
    board = open_board()
    seen: list[int] = []
    argv = board.shell.run

    def spy(command, **more):
        seen.extend(path.stat().st_mode & 0o777 for path in (Path(board.client.store.folder) / "runs").iterdir())
        return argv(command, **more)

    board.shell.run = spy
    run(board, artifact_of(functions, "none"))
    with pytest.raises(RunFailed):
        run(board, artifact_of(functions, "refuses"), np.array(4, np.int32))
    assert seen and set(seen) == {0o700}
    assert not list((Path(board.client.store.folder) / "runs").iterdir())
    assert Path(board.client.store.folder).stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode & 0o077 for path in Path(board.client.store.folder).rglob("*")}
    assert modes == {0}


def test_what_a_killed_controller_left_goes_when_the_board_is_opened_a_day_later(open_board, shell):
    runs = Path(open_board().client.store.folder) / "runs"
    for name, age_s in (("old", 3 * 86400), ("young", 0)):
        (runs / name).mkdir()
        (runs / name / "i0.bin").write_bytes(b"x")
        os.utime(runs / name, (time.time() - age_s,) * 2)
    open_board()
    assert [path.name for path in runs.iterdir()] == ["young"]


# ---- results


def test_the_answer_is_of_one_command_and_the_times_are_of_irees_tool(open_board, shell, functions):
    said: list[str] = []
    board = open_board(say=said.append)
    artifact = artifact_of(functions, "main")
    result, call, program = run(board, artifact, F4, N7, warmup=1, iterations=3)
    assert sum("hil-run" in command for command in shell.commands) == 2
    assert len(result.device_ns) == 3 and all(0 < time < 1e9 for time in result.device_ns)
    assert result.iterations_ns[0][0] == 0, "when they ran is not known"
    assert result.peak_memory_bytes is None
    assert "clock" not in result.provenance
    (wall,) = result.provenance["command"]["wall_s"]
    assert wall > 0
    assert result.provenance["command"]["not_measured"] == ["peak memory", "clock"]
    assert result.provenance["command"]["why"] == "its config asks for none"
    assert result.provenance["machine"]["arch"] == platform.machine()
    assert 0 < call.warmup_ns < 1e9
    assert not any("device time" in text for text in said)
    assert result.source.startswith("lab: iree 3.")
    assert program.log() == [], "what the tool says of itself is no log of the program"


def test_a_time_that_cannot_be_measured_is_no_failure_of_the_program(open_board, shell, functions):
    board = open_board()
    artifact = artifact_of(functions, "main")
    board.push(artifact)
    for tool in (Path(board.client.store.folder) / "programs").glob(f"*-{PROFILE_TOOL}"):
        tool.write_text("#!/bin/sh\necho the tool is broken >&2\nexit 3\n")
    with board.load(artifact) as program:
        result, _ = program.run({"a": F4, "n": N7})
    np.testing.assert_array_equal(next(iter(result.outputs.values())), F4 + F4)
    assert result.iterations_ns == ()
    assert "device time" in result.provenance["command"]["not_measured"]
    assert any("device time could not be measured" in note for note in result.provenance["notes"])


def test_an_answer_outlives_another_run_that_takes_the_board_before_it_is_timed(open_board, functions, monkeypatch):
    board = open_board()
    artifact = artifact_of(functions, "main")
    board.push(artifact)
    with board.load(artifact) as program:
        run_once = board.client._once

        def once(loaded: object, argv: list[str], *arguments: object) -> object:
            if argv[0].endswith(PROFILE_TOOL):
                raise BoardBusy("another run held the board for more than 60 s")
            return run_once(loaded, argv, *arguments)

        monkeypatch.setattr(board.client, "_once", once)
        result, _ = program.run({"a": F4, "n": N7})
    np.testing.assert_array_equal(next(iter(result.outputs.values())), F4 + F4)
    assert result.iterations_ns == ()
    assert "the device time could not be measured: another run held the board" in "".join(result.provenance["notes"])


def test_a_vendors_command_is_run_each_time_and_tells_no_device_time(open_board, shell, functions):
    said: list[str] = []
    own = own_tool(RUN_TOOL)
    board = open_board(RuntimeCommand(kind="command", program=str(own)), say=said.append)
    result, call, _ = run(board, artifact_of(functions, "main"), F4, N7, warmup=1, iterations=3)
    assert sum("hil-run" in command for command in shell.commands) == 4
    assert result.iterations_ns == ()
    assert len(result.provenance["command"]["wall_s"]) == 3
    assert result.provenance["command"]["not_measured"] == ["device time", "peak memory", "clock"]
    assert call.warmup_ns > 0
    assert any("device time" in text for text in said)


def test_the_target_is_what_the_board_shows(shell, monkeypatch):
    monkeypatch.setattr("hil.controller.devices.ssh.connect.open_shell", lambda *_, **__: shell)
    config = BoardConfig("bare", "bare", connection=Connection(address="root@bare"))
    with connect_board(BoardChoice(config, without_agent="it has no Python")) as board:
        assert any(flag.startswith("--iree-llvmcpu-target-triple=") for flag in board.config.compile_flags["iree"])


# ---- ends


def test_a_program_for_another_cpu_is_a_load_error(open_board, tmp_path):
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    path = compile_mlir(ADD_MLIR, tmp_path, "alien", f"--iree-llvmcpu-target-triple={other}-unknown-linux-gnu")
    with pytest.raises(LoadFailed, match="INCOMPATIBLE") as caught:
        run(open_board(), artifact_of(path, "main"), *[np.ones(4096, np.float32)] * 2)
    assert "compile flags" in caught.value.hint
    assert caught.value.stage == "load"


def test_what_is_no_program_is_a_load_error(open_board, functions, identities, tmp_path):
    board = open_board()
    (tmp_path / "half.vmfb").write_bytes(functions.read_bytes()[:3000])
    with pytest.raises(LoadFailed, match=r"half\.vmfb"):
        run(board, artifact_of(tmp_path / "half.vmfb", "none"))
    with pytest.raises(LoadFailed, match="missing_function"):
        run(board, artifact_of(functions, "missing_function"))
    with pytest.raises(LoadFailed, match="several functions"):
        run(board, artifact_of(identities, ""))


def test_an_unknown_device_is_a_load_error(open_board, functions):
    with pytest.raises(LoadFailed, match="nowhere") as caught:
        run(open_board(device="nowhere"), artifact_of(functions, "none"))
    assert "[devices]" in caught.value.hint


def test_what_the_runtime_reports_is_a_run_error(open_board, functions):
    with pytest.raises(RunFailed, match="it is not three") as caught:
        run(open_board(), artifact_of(functions, "refuses"), np.array(4, np.int32))
    assert (caught.value.stage, caught.value.board) == ("run", "lab")


def test_a_program_that_hangs_is_ended_on_the_board(open_board, functions):
    board = open_board()
    with pytest.raises(StageTimeout, match="limit of 1 s"):
        run(board, artifact_of(functions, "hangs"), np.array(1, np.int32), timeout=1)
    ours = str(board.client.store.folder).encode()
    deadline = time.monotonic() + 60
    while [path for path in Path("/proc").glob("[0-9]*/cmdline") if ours in read(path)]:
        assert time.monotonic() < deadline, "it runs on"
        time.sleep(0.1)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("signal", "hint"), [("SEGV", ""), ("ILL", "compile target"), ("KILL", "memory"), ("ABRT", "")]
)
def test_a_command_that_dies_of_a_signal_is_a_crash(open_board, shell, functions, signal, hint):
    program = vendor(shell, f"echo last words >&2; kill -{signal} $$")
    board = open_board(RuntimeCommand(kind="command", program=program))
    with pytest.raises(RunCrashed, match=f"vendor-run was killed by SIG{signal}") as caught:
        run(board, artifact_of(functions, "none"))
    assert hint in caught.value.hint
    assert "last words" in caught.value.detail


def test_all_that_a_command_started_ends_with_it(open_board, shell, functions):
    program = vendor(shell, f"sleep 1000 & echo $! >'{shell.home.parent}/child'; wait")
    board = open_board(RuntimeCommand(kind="command", program=program))
    with pytest.raises(StageTimeout):
        run(board, artifact_of(functions, "none"), timeout=3)
    child = int((shell.home.parent / "child").read_text())
    eventually(lambda: not is_running(child))


def test_a_command_whose_link_is_gone_ends_by_itself(open_board, shell, functions):
    program = vendor(shell, "echo $$ >../../pid; exec sleep 1000")
    board = open_board(RuntimeCommand(kind="command", program=program))
    folder = Path(board.client.store.folder) / "runs" / "lost"
    folder.mkdir()
    argv = scripts.run(str(folder), ["o0.npy"], [program], limit_s=1000, wait_s=0, environment={})
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    pid = Path(board.client.store.folder) / "pid"
    eventually(lambda: pid.exists() and pid.read_text().strip())
    tool = int(pid.read_text())
    assert is_running(tool)
    assert process.stdout
    process.stdout.close()  # as sshd does when its connection is gone
    eventually(lambda: not is_running(tool))
    process.wait(30)
    assert not folder.exists()


def test_runs_of_several_controllers_go_one_after_the_other(open_board, shell):
    busy = shell.home.parent / "busy"
    program = vendor(
        shell, f"mkdir '{busy}' || exit 9\nsleep 1\nrmdir '{busy}'\nprintf 12345678 >\"${{2#--output=@}}\""
    )
    command = RuntimeCommand("command", program, flags=("x", "{outputs}"), tensors="bin")
    boards = [open_board(command, shell=replace(shell, commands=[])) for _ in range(3)]
    spec = TensorSpec("y", "int8", (8,))
    artifact = replace(artifact_of(Path(__file__), "one"), inputs=(), outputs=(spec,))
    ends: list[object] = []

    def one(board: Board) -> None:
        try:
            ends.append(run(board, artifact)[0].outputs["y"].tobytes())
        except BaseException as error:  # the test tells
            ends.append(error)

    threads = [threading.Thread(target=one, args=(board,)) for board in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ends == [b"12345678"] * 3


def test_a_board_that_stays_busy_says_so(open_board, shell, functions):
    program = vendor(shell, "echo $$ >../../pid; sleep 1000")
    command = RuntimeCommand(kind="command", program=program)
    first, second = open_board(command), open_board(command, shell=replace(shell, commands=[]), wait_s=0)
    end: list[BaseException] = []

    def hold() -> None:
        try:
            run(first, artifact_of(functions, "none"), timeout=1000)
        except RunCrashed as error:
            end.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    pid = Path(first.client.store.folder) / "pid"
    eventually(lambda: pid.exists() and pid.read_text().strip())
    try:
        with pytest.raises(BoardBusy, match="another run"):
            run(second, artifact_of(functions, "none"))
    finally:
        os.killpg(int(pid.read_text()), 9)
        thread.join(30)
    assert end


# ---- a vendor's command


COPY = 'for one; do case $one in in=*) cp "${one#in=}" x;; out=*) mv x "${one#out=}";; esac; done; echo "$KIND" >&2'


def test_a_vendors_command_is_put_there_and_called_as_the_config_says(open_board, shell, tmp_path):
    (tmp_path / "vendor tool").write_text(f"#!/bin/sh\n{COPY}\n")
    (tmp_path / "model.bin").write_bytes(b"no IREE program")
    command = parse_runtime(
        {
            "kind": "command",
            "file": "vendor tool",
            "flags": ["--model", "{module}", "{inputs}", "{outputs}"],
            "input": "in={file}",
            "output": "out={file}",
            "tensors": "bin",
            "environment": {"KIND": "a b$(touch pwned)"},
            "version": "7.1",
        },
        tmp_path / "lab.toml",
    )
    spec = TensorSpec("x", "bfloat16", (2, "n"))
    artifact = replace(artifact_of(tmp_path / "model.bin", ""), runtime="npu", inputs=(spec,), outputs=(spec,))
    given = np.arange(6).reshape(2, 3).astype(dtype_of("bfloat16"))
    result, _, program = run(open_board(command, runtime="npu"), artifact, given)
    np.testing.assert_array_equal(result.outputs["x"], given)
    assert program.log() == ["a b$(touch pwned)"]
    assert result.provenance["runtime_version"] == "7.1"
    assert open_board(command, runtime="npu").push(artifact) == 0


def test_an_output_that_was_never_written_is_a_run_error_even_if_an_older_run_wrote_one(open_board, shell, tmp_path):
    program = vendor(shell, f"[ -e ../../again ] && exit 0; : >../../again\n{COPY}")
    command = RuntimeCommand(
        "command", program, flags=("{inputs}", "{outputs}"), input="in={file}", output="out={file}", tensors="bin"
    )
    (tmp_path / "model").write_bytes(b"x")
    spec = TensorSpec("x", "int8", (2,))
    artifact = replace(artifact_of(tmp_path / "model", "f"), inputs=(spec,), outputs=(spec,))
    with pytest.raises(RunFailed, match="wrote no output 'x'"):
        run(open_board(command), artifact, np.ones(2, np.int8), iterations=2)


def test_an_output_of_the_wrong_size_is_a_run_error(open_board, shell, tmp_path):
    program = vendor(shell, 'printf 123 >"${1#--output=@}"')
    (tmp_path / "model").write_bytes(b"x")
    artifact = replace(artifact_of(tmp_path / "model", "f"), inputs=(), outputs=(TensorSpec("x", "int32", (1,)),))
    for tensors, words in (("bin", "has 3 bytes"), ("npy", "not a readable .npy")):
        command = RuntimeCommand("command", program, flags=("{outputs}",), tensors=tensors)
        with pytest.raises(RunFailed, match=words):
            run(open_board(command), artifact)


@pytest.mark.parametrize(
    ("dtype", "written", "words"),
    [
        ("int32", np.array(2.5, np.float32), ""),
        ("int32", np.array([1, 2], np.int32), ""),
        ("float32", np.array(3, "datetime64[s]"), "not supported"),
    ],
)
def test_a_number_is_not_made_of_what_is_none(open_board, shell, tmp_path, dtype, written, words):
    np.save(shell.home / "written.npy", written)
    program = vendor(shell, f'cp {shlex.quote(str(shell.home / "written.npy"))} "${{1#--output=@}}"')
    (tmp_path / "model").write_bytes(b"x")
    spec = TensorSpec("scalar:x", dtype, ())
    artifact = replace(artifact_of(tmp_path / "model", "f"), inputs=(), outputs=(spec,))
    board = open_board(RuntimeCommand("command", program, flags=("{outputs}",)))
    if words:
        with pytest.raises(RunFailed, match=words):
            run(board, artifact)
    else:
        result, _, _ = run(board, artifact)
        (output,) = result.outputs.values()
        assert (output.dtype, output.shape) == (written.dtype, written.shape)
        np.testing.assert_array_equal(output, written)


def test_an_output_that_says_it_is_larger_than_memory_is_a_run_error(open_board, shell, tmp_path):
    with (shell.home / "huge.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 60,)}
        np.lib.format.write_array_header_1_0(file, header)
    program = vendor(shell, f'cp {shlex.quote(str(shell.home / "huge.npy"))} "${{1#--output=@}}"')
    (tmp_path / "model").write_bytes(b"x")
    artifact = replace(
        artifact_of(tmp_path / "model", "f"), inputs=(), outputs=(TensorSpec("x", "float32", (1 << 60,)),)
    )
    with pytest.raises(RunFailed, match="cannot be read"):
        run(open_board(RuntimeCommand("command", program, flags=("{outputs}",))), artifact)


def test_a_full_disk_of_this_machine_is_not_the_boards_failure(open_board, identities):
    board, artifact = open_board(), artifact_of(identities, "int8_rows")
    board.push(artifact)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with board.load(artifact) as program:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with pytest.raises(StorageError, match="cannot write the inputs"):
                program.run({"a": np.ones((2, 1 << 20), np.int8)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_command_that_ends_with_minus_one_failed_and_did_not_crash(open_board, shell, functions):
    program = vendor(shell, "echo no licence >&2; exit 255")
    with pytest.raises(RunFailed, match="exit code 255: no licence"):
        run(open_board(RuntimeCommand("command", program)), artifact_of(functions, "none"))


def test_a_board_that_tells_no_sizes_is_the_boards_failure(open_board, shell, functions):
    board = open_board()
    board.push(artifact_of(functions, "none"))
    tools = shell.home / "tools"
    tools.mkdir()
    for name in ("sh", "rm", "flock", "setsid", "sleep", "tail", "mkdir"):
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    shell.path = str(tools)
    with pytest.raises(BoardError, match="does not tell the size"):
        board.load(artifact_of(functions, "none")).run({})


def test_a_command_that_is_not_there_or_cannot_start_is_a_load_error(open_board, shell, functions, tmp_path):
    artifact = artifact_of(functions, "none")
    for program in ("no-such-vendor-run", "/no/such/vendor-run"):
        with pytest.raises(LoadFailed, match="has no program"):
            run(open_board(RuntimeCommand("command", program)), artifact)
    (tmp_path / "broken").write_bytes(b"\x7fELF and nothing more")
    with pytest.raises(LoadFailed, match="cannot start the command broken"):
        run(open_board(RuntimeCommand("command", file="broken")), artifact)
    for file in ("absent", "~nobody-there/absent"):
        with pytest.raises(UsageError, match="is no file"):
            open_board(RuntimeCommand("command", file=file)).push(artifact)


def test_only_iree_has_a_command_of_hils_own(open_board, shell):
    with pytest.raises(UsageError, match="no command for the runtime 'onnxruntime'"):
        open_board(runtime="onnxruntime")
    assert shell.closed


@pytest.mark.parametrize("tool", [RUN_TOOL, PROFILE_TOOL])
@pytest.mark.parametrize(
    ("arch", "libc", "words"),
    [("riscv64", "glibc 2.38", "architecture 'riscv64'"), ("", "", "'unknown'"), ("aarch64", "musl", "needs glibc")],
)
def test_a_board_that_no_package_is_made_for_needs_a_program_of_its_own(tmp_path, tool, arch, libc, words):
    with pytest.raises(LoadFailed, match=words) as caught:
        iree_tool(tool, arch, libc, cache=Cache(tmp_path), board="lab")
    assert "[runtime]" in caught.value.hint


def test_a_board_like_this_machine_gets_this_machines_own_program(tmp_path):
    tool = iree_tool(PROFILE_TOOL, platform.machine(), cache=Cache(tmp_path), board="lab")
    assert tool.read_bytes()[:4] == b"\x7fELF"
    assert iree_tool(PROFILE_TOOL, platform.machine(), cache=Cache(tmp_path), board="lab") == tool


def test_a_folder_that_cannot_be_made_is_the_boards_failure(open_board, shell):
    (shell.home / "file").write_text("")
    with pytest.raises(BoardError, match="cannot be made") as caught:
        open_board(folder="file/below")
    assert "folder" in caught.value.hint


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"surprise": 1}, "surprise"),
        ({"kind": "magic"}, "agent, command"),
        ({"tensors": "csv"}, "auto, bin, npy"),
        ({"program": 3}, "must be text"),
        ({"program": "a", "file": "b"}, "both a program"),
        ({"program": "bin/tool"}, "absolute path"),
        ({"flags": "--a"}, "list of texts"),
        ({"flags": ["--in={inputs}"]}, "flag of its own"),
        ({"flags": ["{surprise}"]}, "has no {surprise}"),
        ({"output": "{value}"}, "has no {value}"),
        ({"environment": {"A=B": "1"}}, "cannot be"),
        ({"environment": {"-i": "1"}}, "cannot be"),
        ({"environment": {"A": 1}}, "table of texts"),
        ({"flags": ["a\0b"]}, "no name or argument can"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(tmp_path, table, word):
    with pytest.raises(UsageError) as caught:
        parse_runtime(table, tmp_path / "lab.toml")
    assert word in str(caught.value)


# ---- what a board says


def test_a_board_without_the_tools_of_a_large_one_is_read_as_far_as_it_goes():
    text = scripts.parts(
        "noise\nhil-command folder\n/root/.hil/command\n\nhil-command system\nLinux\n\nhil-command arch\naarch64\n"
        "\nhil-command cpuinfo\nprocessor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd03\n\n"
        "processor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd08\n\nhil-command meminfo\nMemTotal:   1024 kB\n"
    )
    assert text["folder"] == "/root/.hil/command"
    assert machine(text) == {
        "system": "Linux",
        "arch": "aarch64",
        "cpu_features": ["fp", "asimd"],
        "cpu_parts": ["0x41:0xd03", "0x41:0xd08"],
        "cores": 2,
        "memory_bytes": str(1 << 20),
    }


def test_readings_are_named_as_the_agent_names_them():
    assert readings(
        "cpufreq/policy4/scaling_cur_freq:1500000\ncpufreq/policy0/scaling_max_freq:1800000\n"
        "cpufreq/policy0/scaling_governor:schedutil\ncpu0/thermal_throttle/core_throttle_count:2\n"
        "cpu1/thermal_throttle/core_throttle_count:3\nthermal_zone0/type:soc: a\nthermal_zone0/temp:48500\n"
        "thermal_zone1/type:gpu\nthermal_zone1/temp:<unknown>\ncooling_device0/type:cpufreq-cpu0\n"
        "cooling_device0/cur_state:1\ncooling_device1/type:fan\ncooling_device1/cur_state:1\n"
        "get_throttled:50005\n/proc/meminfo:MemAvailable:  2048 kB\n"
    ) == [
        {"name": "free memory", "value": 2.0, "unit": "MiB"},
        {"name": "cooling_device0 (cpufreq-cpu0)", "value": 1.0},
        {"name": "cpu0 governor", "text": "schedutil"},
        {"name": "cpu0 highest frequency", "value": 1800.0, "unit": "MHz"},
        {"name": "cpu4 frequency", "value": 1500.0, "unit": "MHz"},
        {"name": "firmware throttling", "text": "50005"},
        {"name": "thermal_zone0 (soc: a)", "value": 48.5, "unit": "degC"},
        {"name": "throttle events", "value": 5.0},
    ]


def test_a_run_whose_end_is_missing_is_no_end():
    assert scripts.ended(".\n.\n") is None
    assert scripts.ended("hil-command 0 0\n12\n") is None
    whole = scripts.ended(".\nhil-command 3 2\n 12\n-\nhil-command\nEXEC @main\n")
    assert whole == scripts.Ended("exit", 3, 2, (12, None), "EXEC @main\n")


@pytest.mark.parametrize(
    "text",
    [
        "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/root 100 40 60 40% /\n",
        "Filesystem           1K-blocks      Used Available Use% Mounted on\nmy disk 100 40 60  40% /a b\n",
    ],
)
def test_free_space_is_read_from_df(text):
    assert scripts.free_bytes(text) == 60 * 1024
    assert scripts.free_bytes("df: not found") is None


# ---- profiling

F4, N7 = np.ones(4, np.float32), np.array(7, np.int32)


def test_a_profile_is_what_the_tool_wrote_and_leaves_nothing_behind(open_board, shell, functions):
    board = open_board()
    artifact = artifact_of(functions, "main")
    with board.load(artifact) as program:
        assert board.push(artifact)
        (tool,) = Path(board.client.store.folder).glob(f"programs/*-{PROFILE_TOOL}")
        tool.unlink()
        board._there.clear()
        before = len(shell.puts)
        taken = program.profile({"a": F4, "n": N7}, warmup=1, iterations=2)
        assert len(taken.files["profile.ireeprof"]) > 1000
        assert taken.clock_pairs == ()
        assert taken.board is None
        assert [name for name, _ in shell.puts[before:] if name.endswith(PROFILE_TOOL)]
        sent = len(shell.puts)
        program.profile({"a": F4, "n": N7})
        assert not [name for name, _ in shell.puts[sent:] if name.endswith(PROFILE_TOOL)], "it is there now"
    assert list((shell.home / ".hil/command/runs").iterdir()) == []


def test_a_profile_of_a_program_that_fails_is_a_run_error(open_board, functions):
    board = open_board()
    artifact = artifact_of(functions, "refuses")
    board.push(artifact)
    with board.load(artifact) as program, pytest.raises(RunFailed, match="it is not three"):
        program.profile({"n": N7})


def test_a_profile_at_its_limit_ends_the_tool(open_board, functions):
    board = open_board()
    artifact = artifact_of(functions, "hangs")
    board.push(artifact)
    with board.load(artifact) as program, pytest.raises(StageTimeout, match="limit of 1 s"):
        program.profile({"n": np.array(1, np.int32)}, timeout=1)


def test_a_vendors_command_cannot_profile(open_board, shell, functions):
    board = open_board(RuntimeCommand(kind="command", program=vendor(shell, "exit 0")))
    artifact = artifact_of(functions, "main")
    board.push(artifact)
    with board.load(artifact) as program, pytest.raises(RunFailed, match="own command vendor-run cannot profile"):
        program.profile({"a": F4, "n": N7})


def test_its_counters_are_not_known(open_board):
    board = open_board()
    with board.watch_counters() as watch:
        pass
    assert watch.problem


# ---- where it ran


def test_irees_own_command_runs_where_it_is_told_to(open_board, functions):
    result, _, _ = run(open_board(), artifact_of(functions, "none"))
    assert result.provenance["placement"] == [Part("local-sync").to_json()]
    assert result.provenance["elsewhere"] == ""
    assert result.provenance["notes"] == []


def test_of_a_command_of_the_boards_own_nothing_is_known(open_board, shell, functions):
    tool = own_tool(RUN_TOOL)
    board = open_board(RuntimeCommand(kind="command", program=vendor(shell, f'exec {shlex.quote(str(tool))} "$@"')))
    artifact = artifact_of(functions, "none")
    board.push(artifact)
    with board.load(artifact) as program:
        result, _ = program.run({})
    assert result.provenance["placement"] is None
    with (
        board.load(artifact, no_fallback=True) as program,
        pytest.raises(RanElsewhere, match="does not tell") as caught,
    ):
        program.run({})
    assert caught.value.result.provenance["placement"] is None


def test_a_command_that_is_not_told_of_the_device_is_told_apart(open_board, functions):
    flags = tuple(flag for flag in RuntimeCommand().flags if "{device}" not in flag)
    result, _, _ = run(open_board(RuntimeCommand(kind="command", flags=flags)), artifact_of(functions, "none"))
    assert result.provenance["placement"] is None
    assert any("local-sync" in note and "{device}" in note for note in result.provenance["notes"])


@pytest.fixture(scope="session")
def torch_functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Functions in torch's dialect, of which IREE's compiler writes down neither inputs nor outputs."""
    tensor, half = "!torch.vtensor<[4],ui8>", "!torch.vtensor<[2],bf16>"
    text = f"""
    func.func @main(%x: {tensor}, %n: !torch.int) -> ({tensor}, !torch.int) {{
      %one = torch.constant.int 1
      %0 = torch.aten.add.Scalar %x, %n, %one : {tensor}, !torch.int, !torch.int -> {tensor}
      return %0, %n : {tensor}, !torch.int
    }}
    func.func @half(%x: {half}) -> {half} {{ return %x : {half} }}
    """
    return compile_mlir(text, tmp_path_factory.mktemp("torch"), "torch")


def test_a_program_without_a_declaration_takes_what_it_is_given(open_board, torch_functions):
    given = np.array([1, 2, 3, 254], np.uint8), np.array(1, np.int64)
    result, _, program = run(open_board(), artifact_of(torch_functions, "main"), *given)
    assert [spec.dtype for spec in program.loaded.inputs] == ["", "int64"]
    tensor, number = result.outputs.values()
    # A command's file tells no sign either: whoever compares it knows.
    assert (tensor.dtype, tensor.tolist()) == (np.int8, [2, 3, 4, -1])
    assert (number.dtype, number.shape, int(number)) == (np.int64, (), 1)
    with pytest.raises(UsageError, match="takes 2 inputs, got 1"):
        run(open_board(), artifact_of(torch_functions, "main"), given[0])


def test_an_output_of_unknown_type_needs_a_file_that_tells_it(open_board, torch_functions):
    with pytest.raises(RunFailed, match="unsupported data encoding"):
        run(open_board(), artifact_of(torch_functions, "half"), np.zeros(2, dtype_of("bfloat16")))
    board = open_board(RuntimeCommand(kind="command", tensors="bin"))
    with pytest.raises(LoadFailed, match="not its type"):
        run(board, artifact_of(torch_functions, "half"), np.zeros(2, dtype_of("bfloat16")))
