"""Boards without an agent: iree-run-module on virtual boards of both architectures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from support.agents import compile_mlir
from support.links import ENDS
from support.models import DIGITS
from support.waiting import eventually

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.ssh import connect as login
from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.shell import Shell
from hil.core.board_config import BoardConfig, Connection, RuntimeCommand
from hil.core.results import Artifact
from hil.errors import BoardError, BoardLost, BoardUnfit, LoadFailed, RunCrashed, RunFailed, StageTimeout
from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board

MLIR = (
    ENDS
    + """
func.func @main(%a: tensor<4xf32>, %n: i32) -> (tensor<4xf32>, i32) {
  %0 = arith.addf %a, %a : tensor<4xf32>
  %1 = arith.addi %n, %n : i32
  return %0, %1 : tensor<4xf32>, i32
}
func.func @mixed(%a: tensor<5xi4>, %b: tensor<?xbf16>, %c: tensor<3xi1>, %d: tensor<0x2xf32>)
    -> (tensor<5xi4>, tensor<?xbf16>, tensor<3xi1>, tensor<0x2xf32>) {
  return %a, %b, %c, %d : tensor<5xi4>, tensor<?xbf16>, tensor<3xi1>, tensor<0x2xf32>
}
"""
)


@pytest.fixture(scope="session")
def artifact_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Artifact]:
    """Return a function that compiles all functions above for an architecture."""
    made: dict[str, tuple[Path, dict[str, str]]] = {}

    def make(arch: str, function: str) -> Artifact:
        if arch not in made:
            folder = tmp_path_factory.mktemp(f"agentless-{arch}")
            (folder / "all.mlir").write_text(MLIR)
            program = compile_mlir(folder / "all.mlir", arch, folder / "all sorts $(of).vmfb")
            made[arch] = program.path, program.digests
        path, digests = made[arch]
        return Artifact("iree", path.name, {path.name: path}, digests, function, "none")

    return make


@pytest.fixture(params=["x86", pytest.param("aarch64", marks=pytest.mark.slow)])
def board(request: pytest.FixtureRequest) -> VirtualBoard:
    found: VirtualBoard = request.getfixturevalue(f"board_{request.param}")
    return found


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Board]]:
    """Return a function that connects to a virtual board by command. The directory on the board has an awkward name."""
    opened: list[Board] = []

    def make(board: VirtualBoard, *, user: str = "root", command: RuntimeCommand | None = None, **options) -> Board:
        connection = Connection(
            identity=str(board.identity),
            known_hosts=str(board.known_hosts),
            folder=options.pop("folder", f"hil of '{tmp_path.name}' $(x)\n-"),
        )
        config = BoardConfig(
            "lab",
            "lab",
            connection=connection,
            command=command or RuntimeCommand("command"),
            path=tmp_path / "lab.toml",
        )
        address = board.address.replace("root@", f"{user}@")
        through = options.pop("through", lambda shell: shell)
        with monkeypatch.context() as patch:
            patch.setattr(login, "open_shell", lambda *given, **more: through(open_shell(*given, **more)))
            opened.append(connect_board(BoardChoice(config, address, **options)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def call(board: Board, artifact: Artifact, *inputs, **options):
    board.push(artifact)
    with board.load(artifact, timeout=60) as program:
        given = {spec.name: value for spec, value in zip(program.loaded.inputs, inputs, strict=True)}
        return program.run(given, **{"timeout": 60, **options})[0]


class Hanging:
    """Run a hanging program in a thread; ``end`` is its exception."""

    def __init__(self, board: VirtualBoard, opened: Board, artifact: Artifact, timeout: float = 500) -> None:
        self.end: BaseException | None = None
        self._opened, self._artifact, self._timeout = opened, artifact, timeout
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: running(board))

    def _run(self) -> None:
        try:
            call(self._opened, self._artifact, np.array(1, np.int32), timeout=self._timeout)
        except BaseException as error:  # reported by the test
            self.end = error

    def ended(self) -> BaseException | None:
        self._thread.join(120)
        return self.end


def running(board: VirtualBoard) -> list[str]:
    """List process IDs of the hanging function on a board, without their shells."""
    return [line.split()[0] for line in commands_on(board, "--function=hangs") if "hil-command" not in line]


def commands_on(board: VirtualBoard, word: str) -> list[str]:
    """List processes on a board whose command line contains a word."""
    said = board.run(["ps", "-eo", "pid=,stat=,args="]).stdout.splitlines()
    return [line for line in said if word in line and " ps -eo" not in line and line.split()[1][0] != "Z"]


def test_command_board_runs_program_on_both_architectures(connect, board, artifact_for):
    said: list[str] = []
    first = connect(board, say=said.append)
    assert first.info["machine"]["arch"] == board.arch
    assert any(f"triple={board.arch}" in flag for flag in first.config.compile_flags["iree"])
    artifact = artifact_for(board.arch, "main")
    sent = first.push(artifact)
    assert sent > 1 << 20
    result = call(first, artifact, np.arange(4, dtype=np.float32), np.array(21, np.int32), iterations=2)
    doubled, number = result.outputs.values()
    np.testing.assert_array_equal(doubled, [0, 2, 4, 6])
    assert number == 42
    assert len(result.device_ns) == 2 and all(0 < time < 10e9 for time in result.device_ns)
    assert result.peak_memory_bytes is None
    assert result.provenance["machine"]["boot_id"]
    assert result.provenance["runtime_version"].startswith("3.")
    assert any("peak memory and clock are not measured" in text for text in said)
    assert connect(board).push(artifact) == 0


def test_command_board_returns_all_dtypes(connect, board, artifact_for):
    import ml_dtypes

    given = [
        np.array([-8, 7, 0, -1, 3], ml_dtypes.int4),
        np.array([1.5, -0.0, np.inf], ml_dtypes.bfloat16),
        np.array([True, False, True]),
        np.empty((0, 2), np.float32),
    ]
    result = call(connect(board), artifact_for(board.arch, "mixed"), *given)
    for output, value in zip(result.outputs.values(), given, strict=True):
        assert (output.dtype, output.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(output.astype(np.float32), value.astype(np.float32))


def test_command_board_removes_runs_and_protects_files(connect, board, artifact_for):
    opened = connect(board)
    call(opened, artifact_for(board.arch, "main"), np.ones(4, np.float32), np.array(1, np.int32))
    left = board.run(["ls", "-A", f"{opened.client.store.folder}/runs"])
    assert (left.returncode, left.stdout) == (0, "")
    open_to_others = board.run(["find", opened.client.store.folder, "-perm", "/077"])
    assert (open_to_others.returncode, open_to_others.stdout) == (0, "")


def test_command_board_serves_unprivileged_user(connect, board, artifact_for):
    result = call(
        connect(board, user=board.user, folder=""),
        artifact_for(board.arch, "main"),
        np.ones(4, np.float32),
        np.array(1, np.int32),
    )
    assert list(result.outputs.values())[1] == 2


def test_command_board_rejects_directory_of_other_user(connect, board):
    board.run(["sh", "-c", f"mkdir -p /tmp/planted/command && chown {board.user} /tmp/planted/command"], check=True)
    try:
        with pytest.raises(BoardError, match="belongs to a different user"):
            connect(board, folder="/tmp/planted")
        board.run(["sh", "-c", "mkdir /tmp/mine && ln -s /root /tmp/mine/command"], check=True)
        with pytest.raises(BoardError, match="belongs to a different user"):
            connect(board, folder="/tmp/mine")
        assert board.run(["test", "-e", "/root/runs"]).returncode == 1
    finally:
        board.run(["rm", "-rf", "/tmp/planted", "/tmp/mine"])


def test_command_board_reports_outcome_per_failure(connect, board, artifact_for):
    opened = connect(board)
    other = "x86_64" if board.arch == "aarch64" else "aarch64"
    with pytest.raises(LoadFailed, match="INCOMPATIBLE"):
        call(opened, artifact_for(other, "main"), np.ones(4, np.float32), np.array(1, np.int32))
    with pytest.raises(RunFailed, match="it is not three"):
        call(opened, artifact_for(board.arch, "refuses"), np.array(4, np.int32))
    with pytest.raises(StageTimeout):
        call(opened, artifact_for(board.arch, "hangs"), np.array(1, np.int32), timeout=3)
    assert commands_on(board, "--function=hangs") == []
    result = call(opened, artifact_for(board.arch, "refuses"), np.array(3, np.int32))
    assert next(iter(result.outputs.values())) == 3


def test_command_board_reports_killed_command_as_crash(connect, board, artifact_for):
    hanging = Hanging(board, connect(board), artifact_for(board.arch, "hangs"))
    board.run(["kill", "-SEGV", *running(board)])
    end = hanging.ended()
    assert isinstance(end, RunCrashed)
    assert "SIGSEGV" in str(end)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["controller gone", "sshd killed"])
def test_command_board_ends_abandoned_run(connect, board_x86, artifact_for, end):
    opened = connect(board_x86)
    hanging = Hanging(board_x86, opened, artifact_for("x86_64", "hangs"))
    if end == "controller gone":
        opened.shell.close()
    else:
        board_x86.run(["pkill", "-9", "-f", "sshd: root"])
    eventually(lambda: not running(board_x86))
    assert isinstance(hanging.ended(), BoardLost)
    eventually(lambda: board_x86.run(["ls", "-A", f"{opened.client.store.folder}/runs"]).stdout == "")
    assert call(connect(board_x86), artifact_for("x86_64", "refuses"), np.array(3, np.int32)).outputs


@pytest.mark.slow
def test_command_board_ends_run_at_limit_after_cut_link(connect, make_board, artifact_for):
    board = make_board(name="cut", arch="x86_64")
    hanging = Hanging(board, connect(board), artifact_for("x86_64", "hangs"), timeout=20)
    board.cut()
    assert isinstance(hanging.ended(), BoardLost)
    board.restore()
    # The next run waits until the board notices that the client is gone.
    assert call(connect(board), artifact_for("x86_64", "refuses"), np.array(3, np.int32)).outputs
    assert running(board) == []


@pytest.mark.slow
def test_command_board_recovers_from_reboot_during_run(connect, make_board, artifact_for):
    board = make_board(name="reboots", arch="x86_64")
    opened = connect(board)
    artifact = artifact_for("x86_64", "hangs")
    hanging = Hanging(board, opened, artifact)
    board.reboot()
    assert isinstance(hanging.ended(), BoardLost)
    again = connect(board)
    assert again.push(artifact) == 0
    assert again.info["machine"]["boot_id"] != opened.info["machine"]["boot_id"]
    assert call(again, artifact_for("x86_64", "refuses"), np.array(3, np.int32)).outputs


def test_command_board_reports_full_disk_and_removes_files(connect, make_board, artifact_for):
    board = make_board(name="small", arch="x86_64", disk_mb=16)
    opened = connect(board)
    board.run(["sh", "-c", "dd if=/dev/zero of=/root/full bs=64k 2>/dev/null"])
    with pytest.raises(BoardUnfit, match="not enough disk space"):
        opened.push(artifact_for("x86_64", "main"))
    assert board.run(["find", opened.client.store.folder, "-type", "f"]).stdout == ""
    board.run(["rm", "/root/full"])
    assert call(opened, artifact_for("x86_64", "refuses"), np.array(3, np.int32)).outputs


class BusyboxOnly:
    """Restrict a shell to busybox."""

    def __init__(self, shell: Shell, folder: str) -> None:
        self._shell = shell
        self._before = ["env", "-i", f"PATH={folder}", "HOME=/root"]

    def run(self, argv: Sequence[str], **options):
        return self._shell.run([*self._before, *argv], **options)

    def __getattr__(self, name: str):
        return getattr(self._shell, name)


def test_command_board_needs_only_busybox(connect, make_board, artifact_for):
    # Not on the emulated board: Debian's busybox starts tools by names that qemu does not pass on.
    board = make_board(arch="x86_64")
    board.run(["sh", "-c", "mkdir -p /tmp/busybox && busybox --install -s /tmp/busybox"], check=True)
    opened = connect(board, through=lambda shell: BusyboxOnly(shell, "/tmp/busybox"))
    assert "BusyBox" in opened.shell.run(["sh", "--help"], check=False).err
    artifact = artifact_for("x86_64", "main")
    inputs = (np.ones(4, np.float32), np.array(1, np.int32))
    assert list(call(opened, artifact, *inputs).outputs.values())[1] == 2
    with pytest.raises(StageTimeout):
        call(opened, artifact_for("x86_64", "hangs"), np.array(1, np.int32), timeout=1)
    assert running(board) == []
    assert connect(board).push(artifact) == 0


@pytest.mark.slow
def test_command_board_works_over_lossy_link(connect, make_board, artifact_for):
    board = make_board(name="far", arch="x86_64", netem="delay 20ms loss 1%")
    inputs = (np.ones(4, np.float32), np.array(1, np.int32))
    assert list(call(connect(board), artifact_for("x86_64", "main"), *inputs).outputs.values())[1] == 2


def test_run_serves_board_without_python(hil, make_board, tmp_path):
    board = make_board(name="bare", arch="x86_64")
    board.run(["sh", "-c", "rm -f /usr/bin/python3*"], check=True)
    options = ["--board", board.address, "--identity", board.identity, "--known-hosts", board.known_hosts, "--json"]
    ended = hil("run", DIGITS / "digits_cnn.onnx", *options)
    assert ended.code == 0, ended.err
    assert ended.case["outcome"] == "PASS"
    assert "peak memory and clock are not measured" in ended.err
    device = ended.case["device"]
    assert device["iterations"] == 1 and 0 < device["p50_ns"] == device["cold_ns"] < 10e9
    assert "Python 3.10 or newer" in ended.case["provenance"]["command"]["why"]
    assert ended.case["peak_memory_bytes"] is None
    assert "clock" not in ended.case["provenance"]
    schema = json.loads((Path(__file__).parents[2] / "docs" / "run.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(ended.document)
    shown = hil("run", DIGITS / "digits_cnn.onnx", *options[:-1]).out
    assert "without an agent" in shown.splitlines()[0] and "cold iteration" in shown
    assert "Python 3.10 or newer" in " ".join(shown.split())
    again = hil("run", DIGITS / "digits_cnn.onnx", *options)
    assert (again.code, again.case["pushed_bytes"]) == (0, 0)
    output = np.load(Path(tmp_path, ended.document["folder"], ended.case["outputs"][0]["file"]))
    np.save(tmp_path / "wrong.npy", output + 1)
    wrong = hil("run", DIGITS / "digits_cnn.onnx", *options, "--expected", "wrong.npy")
    assert (wrong.code, wrong.case["outcome"]) == (1, "FAIL")


@pytest.mark.slow
def test_config_selects_command_runtime(hil, board_aarch64, tmp_path):
    config = (Path(__file__).parents[2] / "board_configs" / "command.toml").read_text()
    where = f'[connection]\naddress = "{board_aarch64.address}"\nidentity = "{board_aarch64.identity}"\n'
    where += f'known_hosts = "{board_aarch64.known_hosts}"\nfolder = "by-command"\n'
    (tmp_path / "lab.toml").write_text(f"{config}\n{where}")
    ended = hil("run", DIGITS / "digits_cnn.onnx", "--board", "lab.toml", "--iterations", 2, "--json")
    assert ended.code == 0, ended.err
    assert ended.case["outcome"] == "PASS"
    assert len(ended.case["provenance"]["command"]["wall_s"]) == 1
    assert ended.case["provenance"]["command"]["why"] == "disabled in the board's config"
    assert ended.case["device"]["iterations"] == 2
    assert ended.case["provenance"]["host_key"].startswith("SHA256:")
