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
from support.memory_groups import join_group, memory_group, memory_used
from support.waiting import eventually

from hil.controller.devices.agentless import scripts
from hil.controller.devices.agentless.scripts import parse_machine, parse_readings
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.deploy.wheels import fetch_iree_tool
from hil.controller.storage.cache import Cache
from hil.core.board_config import BoardConfig, Connection, RuntimeCommand, fill
from hil.core.board_parser import parse_runtime
from hil.core.files import digest_file
from hil.core.results import Artifact, Part
from hil.core.tensors import Array, TensorSpec, parse_dtype
from hil.errors import (
    BoardBusy,
    BoardError,
    BoardLost,
    BoardUnfit,
    ErrorCode,
    LoadFailed,
    RanElsewhere,
    RunCrashed,
    RunFailed,
    StageTimeout,
    StorageError,
    UsageError,
)
from hil.formats.iree_command import PROFILE_TOOL, RUN_TOOL, own_tool
from hil.formats.iree_values import format_mlir_type

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the commands are those of a Linux board")

# Every dtype that IREE supports; string and 2-bit types are rejected earlier.
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
    """Compile identity functions for each dtype: one of 3 elements, one of 2 rows of any length."""
    lines = []
    for dtype in DTYPES:
        for kind, shape in (("fixed", (3,)), ("rows", (2, None))):
            tensor = format_mlir_type(TensorSpec("", dtype, shape))
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
def test_run_preserves_tensors_of_every_dtype(open_board, identities):
    board = open_board()
    values = np.array([0, 1, 3, 2, 5, 7], np.uint8)
    for dtype in DTYPES:
        flat = values.astype(np.bool_) if dtype == "bool" else values.astype(np.float32).astype(parse_dtype(dtype))
        for function, given in ((f"{dtype}_fixed", flat[:3]), (f"{dtype}_rows", flat.reshape(2, 3))):
            result, _, _ = run(board, artifact_of(identities, function), given)
            (output,) = result.outputs.values()
            assert (output.dtype, output.shape) == (given.dtype, given.shape), function
            assert output.tobytes() == given.tobytes(), function


@pytest.mark.ci
def test_run_preserves_scalars(open_board, functions):
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


@pytest.mark.ci
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_run_preserves_nan_and_infinite_scalars(open_board, functions, value):
    given = [np.array(1), np.array(value, np.float32), np.array(value), np.array(False), np.array(1, np.int8)]
    result, _, _ = run(open_board(), artifact_of(functions, "numbers"), *given)
    outputs = list(result.outputs.values())
    np.testing.assert_array_equal(outputs[1], given[1])
    np.testing.assert_array_equal(outputs[2], given[2])


@pytest.mark.ci
def test_run_accepts_empty_tensors_and_multiple_outputs(open_board, functions):
    board = open_board()
    result, _, _ = run(board, artifact_of(functions, "empty"), np.empty((0, 3), np.float32))
    assert next(iter(result.outputs.values())).shape == (0, 3)
    result, _, _ = run(board, artifact_of(functions, "none"))
    np.testing.assert_array_equal(next(iter(result.outputs.values())), [1.5, 2.5])
    result, _, _ = run(board, artifact_of(functions, "main"), np.ones(4, np.float32), np.array(4, np.int32))
    doubled, number = result.outputs.values()
    np.testing.assert_array_equal(doubled, np.full(4, 2.0))
    assert number == 8


@pytest.mark.ci
def test_run_names_outputs_like_the_model(open_board, functions):
    inputs = (np.ones(4, np.float32), np.array(4, np.int32))
    result, _, _ = run(open_board(), artifact_of(functions, "main"), *inputs, names=("sum", "twice"))
    assert list(result.outputs) == ["sum", "twice"]


def test_load_rejects_signature_unsupported_by_command(open_board, functions):
    board = open_board()
    for function, words in (("half", "float16 numbers are unsupported"), ("open", "but not the shape")):
        with pytest.raises(LoadFailed, match=words) as caught:
            board.load(artifact_of(functions, function))
        assert caught.value.stage == "load"
        assert caught.value.hint


@pytest.mark.ci
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([np.ones(4, np.float32)], "takes 2 inputs, got 1"),
        ([np.ones(4, np.float64), np.array(1, np.int32)], "does not accept a 4 float64 tensor"),
        ([np.ones(5, np.float32), np.array(1, np.int32)], "does not accept a 5 float32 tensor"),
    ],
)
def test_run_rejects_mismatched_inputs(open_board, functions, inputs, words):
    with pytest.raises(UsageError, match=words):
        run(open_board(), artifact_of(functions, "main"), *inputs)


# ---- names


@pytest.mark.ci
def test_shell_never_evaluates_model_names(open_board, shell, functions, tmp_path):
    for name in ("w $(touch pwned) 'b\".vmfb", "-rf", "new\nline;touch pwned.vmfb", "`touch pwned`.$HOME"):
        path = tmp_path / name
        shutil.copy(functions, path)
        given = np.array([1, 2], np.int32)
        result, _, _ = run(open_board(folder="$(touch pwned) -f"), artifact_of(path, ODD_NAME), given)
        np.testing.assert_array_equal(next(iter(result.outputs.values())), given)
    assert not list(tmp_path.rglob("pwned*"))
    assert not Path("pwned").exists()
    assert (shell.home / "$(touch pwned) -f" / "command" / "programs").is_dir()


def test_fill_does_not_expand_values():
    assert fill("{file}={value}", {"file": "{value}", "value": "$(x)"}) == "{value}=$(x)"


# ---- pushing


def test_second_push_sends_zero_bytes(open_board, shell, functions):
    artifact = artifact_of(functions, "none")
    first = open_board()
    assert first.push(artifact) == first.payload_bytes_sent > functions.stat().st_size
    assert first.push(artifact) == 0
    assert len(shell.puts) == 3, "the program, the command, and the tool that times it"
    assert open_board().push(artifact) == 0
    assert len(shell.puts) == 3


def test_push_reports_progress(open_board, functions):
    told: list[tuple[int, int]] = []
    sent = open_board().push(artifact_of(functions, "none"), lambda done, total: told.append((done, total)))
    assert told[-1] == (sent, sent)


def test_push_replaces_damaged_file(open_board, shell, functions):
    artifact = artifact_of(functions, "none")
    board = open_board()
    board.push(artifact)
    (file,) = Path(board.client.store.folder).glob("programs/*.vmfb")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert open_board().push(artifact) == functions.stat().st_size
    assert file.read_bytes() == functions.read_bytes()


def test_push_reconnects_and_continues(open_board, shell, functions):
    broken = replace(shell, puts=[], cut_at_put=2)
    said: list[str] = []
    board = open_board(shell=broken, reopen=lambda: shell, say=said.append)
    result, _, _ = run(board, artifact_of(functions, "none"))
    assert result.outputs
    assert broken.closed
    assert any("reconnecting" in text for text in said)


@pytest.mark.ci
def test_push_fails_after_repeated_disconnects(open_board, shell, functions):
    broken = [replace(shell, puts=[], cut_at_put=1) for _ in range(4)]
    board = open_board(shell=broken[0], reopen=iter(broken[1:]).__next__)
    with pytest.raises(BoardLost) as caught:
        board.push(artifact_of(functions, "none"))
    assert (caught.value.stage, caught.value.board) == ("push", "lab")
    assert all(len(one.puts) == 1 for one in broken)


def test_make_room_rejects_program_larger_than_disk(open_board, shell):
    board = open_board()
    with pytest.raises(BoardUnfit, match=r"(?s)not enough disk space .*the program"):
        board.client.store.make_room(1 << 60)


@pytest.mark.parametrize("what", ["program", "inputs"])
def test_read_only_board_raises_unfit(open_board, shell, functions, monkeypatch, what):
    board, put = open_board(), LocalShell.put

    def refuse(self: LocalShell, local: Path, remote: str, **options: object) -> None:
        if ("/runs/" in remote) == (what == "inputs"):
            raise BoardError(f"{remote} cannot be written: Read-only file system")
        put(self, local, remote, **options)

    monkeypatch.setattr(LocalShell, "put", refuse)
    with pytest.raises(BoardUnfit, match=r"(?s)cannot write to .*Read-only file system") as caught:
        run(board, artifact_of(functions, "main"), np.ones(4, np.float32), np.array(4, np.int32))
    assert board.client.store.folder in caught.value.message and "read-only" in caught.value.hint


def test_make_room_deletes_unused_programs(open_board, shell, functions):
    board = open_board()
    board.push(artifact_of(functions, "none"))
    old = Path(board.client.store.folder) / "programs" / "old"
    old.write_bytes(b"x")
    os.utime(old, (time.time() - 40 * 86400,) * 2)
    board.client.store.make_room(1)
    assert not old.exists()
    assert len(list((Path(board.client.store.folder) / "programs").iterdir())) == 3


@pytest.mark.ci
def test_push_sends_evicted_program_again(open_board, shell, functions, identities):
    board = open_board()
    first, second = artifact_of(functions, "none"), artifact_of(identities, "int8_fixed")
    board.push(first)
    for path in (Path(board.client.store.folder) / "programs").glob("*.vmfb"):
        os.utime(path, (time.time() - 40 * 86400,) * 2)
    board.push(second)
    assert board.push(first) == functions.stat().st_size


# ---- cleanup


@pytest.mark.ci
def test_run_cleans_up_and_uses_private_modes(open_board, functions):
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


def test_open_deletes_old_run_directories(open_board, shell):
    runs = Path(open_board().client.store.folder) / "runs"
    for name, age_s in (("old", 3 * 86400), ("young", 0)):
        (runs / name).mkdir()
        (runs / name / "i0.bin").write_bytes(b"x")
        os.utime(runs / name, (time.time() - age_s,) * 2)
    open_board()
    assert [path.name for path in runs.iterdir()] == ["young"]


# ---- results


def test_run_takes_output_from_command_and_times_from_tool(open_board, shell, functions):
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
    assert result.provenance["command"]["why"] == "disabled in the board's config"
    assert result.provenance["machine"]["arch"] == platform.machine()
    assert 0 < call.warmup_ns < 1e9
    assert not any("device time" in text for text in said)
    assert result.source.startswith("lab: iree 3.")
    assert program.log() == [], "what the tool says of itself is no log of the program"


@pytest.mark.ci
def test_run_succeeds_if_timing_tool_fails(open_board, shell, functions):
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
    assert any("device time not measured" in note for note in result.provenance["notes"])


@pytest.mark.ci
@pytest.mark.parametrize(
    "error",
    [BoardBusy("another run held the board"), BoardUnfit("out of memory: others use it")],
    ids=["busy", "unfit"],
)
def test_run_succeeds_if_board_refuses_timing(open_board, functions, monkeypatch, error):
    board = open_board()
    artifact = artifact_of(functions, "main")
    board.push(artifact)
    with board.load(artifact) as program:
        run_once = board.client._once

        def once(loaded: object, argv: list[str], *arguments: object) -> object:
            if argv[0].endswith(PROFILE_TOOL):
                raise error
            return run_once(loaded, argv, *arguments)

        monkeypatch.setattr(board.client, "_once", once)
        result, _ = program.run({"a": F4, "n": N7})
    np.testing.assert_array_equal(next(iter(result.outputs.values())), F4 + F4)
    assert result.iterations_ns == ()
    assert f"device time not measured: {error.message}" in result.provenance["notes"]


@pytest.mark.ci
def test_vendor_command_runs_each_iteration_without_device_time(open_board, shell, functions):
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


def test_compile_target_follows_board_probe(shell, monkeypatch):
    monkeypatch.setattr("hil.controller.devices.ssh.connect.open_shell", lambda *_, **__: shell)
    config = BoardConfig("bare", "bare", connection=Connection(address="root@bare"))
    with connect_board(BoardChoice(config, without_agent="it has no Python")) as board:
        assert any(flag.startswith("--iree-llvmcpu-target-triple=") for flag in board.config.compile_flags["iree"])


# ---- ends


@pytest.mark.ci
def test_program_for_other_cpu_raises_load_error(open_board, tmp_path):
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    path = compile_mlir(ADD_MLIR, tmp_path, "alien", f"--iree-llvmcpu-target-triple={other}-unknown-linux-gnu")
    with pytest.raises(LoadFailed, match="INCOMPATIBLE") as caught:
        run(open_board(), artifact_of(path, "main"), *[np.ones(4096, np.float32)] * 2)
    assert "compile flags" in caught.value.hint and caught.value.code is ErrorCode.WRONG_TARGET
    assert caught.value.stage == "load"


@pytest.mark.ci
def test_invalid_program_raises_load_error(open_board, functions, identities, tmp_path):
    board = open_board()
    (tmp_path / "half.vmfb").write_bytes(functions.read_bytes()[:3000])
    with pytest.raises(LoadFailed, match=r"half\.vmfb"):
        run(board, artifact_of(tmp_path / "half.vmfb", "none"))
    with pytest.raises(LoadFailed, match="missing_function"):
        run(board, artifact_of(functions, "missing_function"))
    with pytest.raises(LoadFailed, match="multiple functions"):
        run(board, artifact_of(identities, ""))


@pytest.mark.ci
def test_unknown_device_raises_load_error(open_board, functions):
    with pytest.raises(LoadFailed, match="nowhere") as caught:
        run(open_board(device="nowhere"), artifact_of(functions, "none"))
    assert "[devices]" in caught.value.hint


def test_runtime_failure_raises_run_error(open_board, functions):
    with pytest.raises(RunFailed, match="it is not three") as caught:
        run(open_board(), artifact_of(functions, "refuses"), np.array(4, np.int32))
    assert (caught.value.stage, caught.value.board) == ("run", "lab")


@pytest.mark.ci
def test_timeout_stops_program_on_board(open_board, functions):
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


@pytest.mark.ci
@pytest.mark.parametrize(
    ("signal", "hint"), [("SEGV", ""), ("ILL", "compile target"), ("KILL", "memory"), ("ABRT", "")]
)
def test_command_killed_by_signal_raises_crash(open_board, shell, functions, signal, hint):
    program = vendor(shell, f"echo last words >&2; kill -{signal} $$")
    board = open_board(RuntimeCommand(kind="command", program=program))
    with pytest.raises(RunCrashed, match=f"vendor-run was killed by SIG{signal}") as caught:
        run(board, artifact_of(functions, "none"))
    assert hint in caught.value.hint
    assert "last words" in caught.value.detail


@pytest.mark.ci
@pytest.mark.parametrize(
    ("others_mib", "kind", "text"),
    [(200, BoardUnfit, "other processes use the rest of the board's"), (1, RunCrashed, "the program used")],
)
def test_out_of_memory_blames_program_or_board(open_board, shell, functions, tmp_path, others_mib, kind, text):
    program = vendor(shell, f"exec {sys.executable} -c \"print('last words'); kept = bytearray(1 << 29)\" >&2")
    with memory_group(300) as group, memory_used(group, others_mib):
        login = tmp_path / "login"
        login.write_text(f'#!/bin/sh\n{join_group(group)}\nexec sh "$@"\n')
        login.chmod(0o755)
        board = open_board(RuntimeCommand(kind="command", program=program), shell=replace(shell, sh=str(login)))
        with pytest.raises(kind, match=f"out of memory: .*{text}.* {300 << 20}") as caught:
            run(board, artifact_of(functions, "none"))
    assert (caught.value.stage, caught.value.board) == ("run", "lab")


MEMORY = ["hil-memory", "MemTotal:  1000 kB", "MemAvailable: 400 kB"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([*MEMORY, "hil-memory"], (1024000, 409600), id="machine"),
        pytest.param([*MEMORY, "group max 4096", "group 9000 4096", "hil-memory"], (9000, 4904), id="smallest"),
        pytest.param([*MEMORY, "group 9223372036854771712 1", "hil-memory"], (1024000, 409600), id="no limit"),
        pytest.param(["hil-memory", "group 4096 5000", "hil-memory"], (4096, 0), id="more is used"),
        pytest.param(["hil-memory", "group 4096", "MemTotal: x kB", "hil-memory"], None, id="unknown"),
        pytest.param(["hil-memory", "MemTotal: 1000 kB", "hil-memory"], None, id="old Linux"),
        pytest.param([], None, id="not killed"),
    ],
)
def test_run_output_reports_memory_after_kill(lines, expected):
    ended = scripts.parse_end("\n".join([".", *lines, "hil-command 137 0", "-", "hil-command", "out"]))
    assert ended == scripts.CommandEnd("exit", 137, 0, (None,), "out", expected)
    assert scripts.parse_end("\n".join(MEMORY)) is None


@pytest.mark.ci
def test_timeout_stops_child_processes(open_board, shell, functions):
    program = vendor(shell, f"sleep 1000 & echo $! >'{shell.home.parent}/child'; wait")
    board = open_board(RuntimeCommand(kind="command", program=program))
    with pytest.raises(StageTimeout):
        run(board, artifact_of(functions, "none"), timeout=3)
    child = int((shell.home.parent / "child").read_text())
    eventually(lambda: not is_running(child))


@pytest.mark.ci
def test_command_stops_after_connection_closes(open_board, shell, functions):
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
    process.stdout.close()  # as sshd does after the connection closes
    eventually(lambda: not is_running(tool))
    process.wait(30)
    assert not folder.exists()


@pytest.mark.parametrize(("environment", "expected"), [({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")])
def test_command_runs_without_telemetry_unless_configured(environment, expected, tmp_path):
    program = ["sh", "-c", 'printf %s "$ORT_DISABLE_TELEMETRY"']
    argv = scripts.run(str(tmp_path), [], program, limit_s=60, wait_s=0, environment=environment)
    variables = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    printed = subprocess.run(argv, env=variables, capture_output=True, text=True, check=True).stdout
    ended = scripts.parse_end(printed)
    assert ended is not None and ended.out.strip() == expected


@pytest.mark.ci
def test_runs_of_multiple_controllers_are_serialized(open_board, shell):
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
        except BaseException as error:  # checked by the test
            ends.append(error)

    threads = [threading.Thread(target=one, args=(board,)) for board in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ends == [b"12345678"] * 3


def test_busy_board_raises_busy_error(open_board, shell, functions):
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
        with pytest.raises(BoardBusy, match="a different run"):
            run(second, artifact_of(functions, "none"))
    finally:
        os.killpg(int(pid.read_text()), 9)
        thread.join(30)
    assert end


# ---- a vendor's command


COPY = 'for one; do case $one in in=*) cp "${one#in=}" x;; out=*) mv x "${one#out=}";; esac; done; echo "$KIND" >&2'


def test_vendor_command_uses_configured_arguments(open_board, shell, tmp_path):
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
    given = np.arange(6).reshape(2, 3).astype(parse_dtype("bfloat16"))
    result, _, program = run(open_board(command, runtime="npu"), artifact, given)
    np.testing.assert_array_equal(result.outputs["x"], given)
    assert program.log() == ["a b$(touch pwned)"]
    assert result.provenance["runtime_version"] == "7.1"
    assert open_board(command, runtime="npu").push(artifact) == 0


def test_missing_output_raises_run_error_despite_older_output(open_board, shell, tmp_path):
    program = vendor(shell, f"[ -e ../../again ] && exit 0; : >../../again\n{COPY}")
    command = RuntimeCommand(
        "command", program, flags=("{inputs}", "{outputs}"), input="in={file}", output="out={file}", tensors="bin"
    )
    (tmp_path / "model").write_bytes(b"x")
    spec = TensorSpec("x", "int8", (2,))
    artifact = replace(artifact_of(tmp_path / "model", "f"), inputs=(spec,), outputs=(spec,))
    with pytest.raises(RunFailed, match="did not write output 'x'"):
        run(open_board(command), artifact, np.ones(2, np.int8), iterations=2)


def test_output_of_wrong_size_raises_run_error(open_board, shell, tmp_path):
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
def test_scalar_output_preserves_written_dtype_and_shape(open_board, shell, tmp_path, dtype, written, words):
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


def test_output_larger_than_memory_raises_run_error(open_board, shell, tmp_path):
    with (shell.home / "huge.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 60,)}
        np.lib.format.write_array_header_1_0(file, header)
    program = vendor(shell, f'cp {shlex.quote(str(shell.home / "huge.npy"))} "${{1#--output=@}}"')
    (tmp_path / "model").write_bytes(b"x")
    artifact = replace(
        artifact_of(tmp_path / "model", "f"), inputs=(), outputs=(TensorSpec("x", "float32", (1 << 60,)),)
    )
    with pytest.raises(RunFailed, match="cannot read"):
        run(open_board(RuntimeCommand("command", program, flags=("{outputs}",))), artifact)


def test_full_local_disk_raises_storage_error(open_board, identities):
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


def test_exit_code_255_raises_run_error(open_board, shell, functions):
    program = vendor(shell, "echo no licence >&2; exit 255")
    with pytest.raises(RunFailed, match="exit code 255: no licence"):
        run(open_board(RuntimeCommand("command", program)), artifact_of(functions, "none"))


def test_missing_size_tool_raises_board_error(open_board, shell, functions):
    board = open_board()
    board.push(artifact_of(functions, "none"))
    tools = shell.home / "tools"
    tools.mkdir()
    for name in ("sh", "rm", "flock", "setsid", "sleep", "tail", "mkdir"):
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    shell.path = str(tools)
    with pytest.raises(BoardError, match="did not report a file's size"):
        board.load(artifact_of(functions, "none")).run({})


@pytest.mark.ci
def test_missing_or_broken_command_raises_board_unfit(open_board, shell, functions, tmp_path):
    artifact = artifact_of(functions, "none")
    for program in ("no-such-vendor-run", "/no/such/vendor-run"):
        with pytest.raises(BoardUnfit, match="not found on the board"):
            run(open_board(RuntimeCommand("command", program)), artifact)
    (tmp_path / "broken").write_bytes(b"\x7fELF and nothing more")
    with pytest.raises(BoardUnfit, match="cannot start the command broken"):
        run(open_board(RuntimeCommand("command", file="broken")), artifact)
    for file in ("absent", "~nobody-there/absent"):
        with pytest.raises(UsageError, match="program of the board not found"):
            open_board(RuntimeCommand("command", file=file)).push(artifact)


def test_only_iree_has_built_in_command(open_board, shell):
    with pytest.raises(UsageError, match="no command for the runtime 'onnxruntime'"):
        open_board(runtime="onnxruntime")
    assert shell.closed


@pytest.mark.parametrize("tool", [RUN_TOOL, PROFILE_TOOL])
@pytest.mark.parametrize(
    ("arch", "libc", "words"),
    [("riscv64", "glibc 2.38", "architecture 'riscv64'"), ("", "", "'unknown'"), ("aarch64", "musl", "requires glibc")],
)
def test_iree_tool_rejects_unsupported_board(tmp_path, tool, arch, libc, words):
    with pytest.raises(LoadFailed, match=words) as caught:
        fetch_iree_tool(tool, arch, libc, cache=Cache(tmp_path), board="lab")
    assert "[runtime]" in caught.value.hint


def test_iree_tool_uses_local_program_for_same_platform(tmp_path):
    tool = fetch_iree_tool(PROFILE_TOOL, platform.machine(), cache=Cache(tmp_path), board="lab")
    assert tool.read_bytes()[:4] == b"\x7fELF"
    assert fetch_iree_tool(PROFILE_TOOL, platform.machine(), cache=Cache(tmp_path), board="lab") == tool


def test_unusable_directory_raises_board_error(open_board, shell):
    (shell.home / "file").write_text("")
    with pytest.raises(BoardError, match="cannot create hil's directory") as caught:
        open_board(folder="file/below")
    assert "folder" in caught.value.hint


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"surprise": 1}, "surprise"),
        ({"kind": "magic"}, "agent, command"),
        ({"tensors": "csv"}, "auto, bin, npy"),
        ({"program": 3}, "must be text"),
        ({"program": "a", "file": "b"}, "sets both program"),
        ({"program": "bin/tool"}, "absolute path"),
        ({"flags": "--a"}, "list of strings"),
        ({"flags": ["--in={inputs}"]}, "separate flag"),
        ({"flags": ["{surprise}"]}, "unknown placeholder {surprise}"),
        ({"output": "{value}"}, "unknown placeholder {value}"),
        ({"environment": {"A=B": "1"}}, "invalid environment variable name"),
        ({"environment": {"-i": "1"}}, "invalid environment variable name"),
        ({"environment": {"A": 1}}, "table of strings"),
        ({"flags": ["a\0b"]}, "contains a NUL"),
    ],
)
def test_parse_runtime_rejects_invalid_table(tmp_path, table, word):
    with pytest.raises(UsageError) as caught:
        parse_runtime(table, tmp_path / "lab.toml")
    assert word in str(caught.value)


# ---- board output


def test_machine_accepts_board_with_few_tools():
    text = scripts.split_parts(
        "noise\nhil-command folder\n/root/.hil/command\n\nhil-command system\nLinux\n\nhil-command arch\naarch64\n"
        "\nhil-command cpuinfo\nprocessor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd03\n\n"
        "processor\t: 1\nCPU implementer\t: 0x41\nCPU part\t: 0xd08\n\nhil-command meminfo\nMemTotal:   1024 kB\n"
    )
    assert text["folder"] == "/root/.hil/command"
    assert parse_machine(text) == {
        "system": "Linux",
        "arch": "aarch64",
        "cpu_features": ["fp", "asimd"],
        "cpu_parts": ["0x41:0xd03", "0x41:0xd08"],
        "cores": 2,
        "memory_bytes": str(1 << 20),
    }


def test_readings_have_agent_names():
    assert parse_readings(
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


def test_ended_rejects_truncated_output():
    assert scripts.parse_end(".\n.\n") is None
    assert scripts.parse_end("hil-command 0 0\n12\n") is None
    whole = scripts.parse_end(".\nhil-command 3 2\n 12\n-\nhil-command\nEXEC @main\n")
    assert whole == scripts.CommandEnd("exit", 3, 2, (12, None), "EXEC @main\n")


@pytest.mark.parametrize(
    "text",
    [
        "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/root 100 40 60 40% /\n",
        "Filesystem           1K-blocks      Used Available Use% Mounted on\nmy disk 100 40 60  40% /a b\n",
    ],
)
def test_free_bytes_parses_df(text):
    assert scripts.free_bytes(text) == 60 * 1024
    assert scripts.free_bytes("df: not found") is None


# ---- profiling

F4, N7 = np.ones(4, np.float32), np.array(7, np.int32)


def test_profile_returns_tool_output_and_cleans_up(open_board, shell, functions):
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


def test_profile_of_failing_program_raises_run_error(open_board, functions):
    board = open_board()
    artifact = artifact_of(functions, "refuses")
    board.push(artifact)
    with board.load(artifact) as program, pytest.raises(RunFailed, match="it is not three"):
        program.profile({"n": N7})


@pytest.mark.ci
def test_profile_timeout_stops_tool(open_board, functions):
    board = open_board()
    artifact = artifact_of(functions, "hangs")
    board.push(artifact)
    with board.load(artifact) as program, pytest.raises(StageTimeout, match="limit of 1 s"):
        program.profile({"n": np.array(1, np.int32)}, timeout=1)


def test_vendor_command_cannot_profile(open_board, shell, functions):
    board = open_board(RuntimeCommand(kind="command", program=vendor(shell, "exit 0")))
    artifact = artifact_of(functions, "main")
    board.push(artifact)
    with board.load(artifact) as program, pytest.raises(RunFailed, match="vendor-run does not support profiling"):
        program.profile({"a": F4, "n": N7})


def test_watch_counters_reports_problem(open_board):
    board = open_board()
    with board.watch_counters() as watch:
        pass
    assert watch.problem


# ---- placement


def test_iree_command_reports_configured_placement(open_board, functions):
    result, _, _ = run(open_board(), artifact_of(functions, "none"))
    assert result.provenance["placement"] == [Part("local-sync").to_json()]
    assert result.provenance["elsewhere"] == ""
    assert result.provenance["notes"] == []


def test_vendor_command_placement_remains_unknown(open_board, shell, functions):
    tool = own_tool(RUN_TOOL)
    board = open_board(RuntimeCommand(kind="command", program=vendor(shell, f'exec {shlex.quote(str(tool))} "$@"')))
    artifact = artifact_of(functions, "none")
    board.push(artifact)
    with board.load(artifact) as program:
        result, _ = program.run({})
    assert result.provenance["placement"] is None
    with (
        board.load(artifact, no_fallback=True) as program,
        pytest.raises(RanElsewhere, match="does not report") as caught,
    ):
        program.run({})
    assert caught.value.result.provenance["placement"] is None


def test_command_without_device_flag_adds_note(open_board, functions):
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


@pytest.mark.ci
def test_undeclared_program_accepts_given_inputs(open_board, torch_functions):
    given = np.array([1, 2, 3, 254], np.uint8), np.array(1, np.int64)
    result, _, program = run(open_board(), artifact_of(torch_functions, "main"), *given)
    assert [spec.dtype for spec in program.loaded.inputs] == ["", "int64"]
    tensor, number = result.outputs.values()
    # The output file does not record signedness; the comparison applies it.
    assert (tensor.dtype, tensor.tolist()) == (np.int8, [2, 3, 4, -1])
    assert (number.dtype, number.shape, int(number)) == (np.int64, (), 1)
    with pytest.raises(UsageError, match="takes 2 inputs, got 1"):
        run(open_board(), artifact_of(torch_functions, "main"), given[0])


@pytest.mark.ci
def test_undeclared_output_requires_typed_file(open_board, torch_functions):
    with pytest.raises(RunFailed, match="unsupported data encoding"):
        run(open_board(), artifact_of(torch_functions, "half"), np.zeros(2, parse_dtype("bfloat16")))
    board = open_board(RuntimeCommand(kind="command", tensors="bin"))
    with pytest.raises(LoadFailed, match="but not the dtype"):
        run(board, artifact_of(torch_functions, "half"), np.zeros(2, parse_dtype("bfloat16")))
