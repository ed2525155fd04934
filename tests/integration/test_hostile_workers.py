"""Hostile programs harm only themselves: the agent survives within limits and runs the next program."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support import agents, hostile
from support.waiting import eventually

from hil import errors
from hil.agent import confinement
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint

HOSTILE = Path(hostile.__file__)
MIB = 1 << 20
NOBODY = 65534


class Board:
    """An agent process with hostile programs, and a session."""

    def __init__(self, folder: Path, *more: str, prefix: Sequence[str] = ()) -> None:
        self._folder = folder
        listen = ["--listen", f"unix:{folder}/a.sock", "--store", str(folder / "store"), "--lifeline", *more]
        command = [*prefix, sys.executable, str(HOSTILE), *listen]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.pid, self.address = told["pid"], told["address"]
        self.client = self.connect()

    def connect(self) -> AgentClient:
        client = AgentClient(AgentEndpoint(self.address), "test")
        client.describe()
        client.open_session("test", wait_s=60, on_wait=print)
        return client

    def load(self, attack: str, device: str = "", timeout: float = 60):
        path = self._folder / f"{len(list(self._folder.iterdir()))}.attack"
        path.write_text(attack)
        program = agents.program("hostile", path)
        program.push(self.client)
        return self.client.load(
            program.digests, path.name, runtime="hostile", device=device, function="", timeout=timeout
        )

    def run(self, attack: str, timeout: float = 60):
        return self.client.invoke(self.load(attack).program_id, {}, timeout=timeout)

    def is_well(self) -> bool:
        return bool((self.run("behave").outputs["y"] == 1).all()) and self.process.poll() is None

    def rss(self) -> int:
        line = next(x for x in Path(f"/proc/{self.pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def below(self) -> set[int]:
        """Return the worker processes of the agent."""
        parents: dict[int, list[int]] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(stat.parent.name))
        return {pid for server in parents.get(self.pid, ()) for pid in parents.get(server, ())}

    def end(self) -> None:
        self.client.close()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Provide a world-writable directory and remove it afterwards, however deep."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.fixture
def make_board(open_folder: Path) -> Iterator[Callable[..., Board]]:
    made: list[Board] = []

    def make(*more: str, prefix: Sequence[str] = ()) -> Board:
        made.append(Board(open_folder, *more, prefix=prefix))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture
def board(make_board: Callable[..., Board]) -> Board:
    return make_board()


def test_agent_survives_truncated_shared_memory(board: Board):
    board.run("truncate")
    assert board.is_well()


def test_agent_reads_outputs_while_program_writes_them(board: Board):
    loaded = board.load("waver")
    for _ in range(10):
        assert board.client.invoke(loaded.program_id, {}, timeout=60).outputs["y"].shape == (1 << 20,)
    assert board.is_well()


def test_unload_removes_files_written_by_program(board: Board, open_folder: Path):
    loaded = board.load("litter")
    board.client.invoke(loaded.program_id, {}, timeout=60)
    folder = open_folder / "store/programs"
    assert list(folder.iterdir())
    board.client.unload(loaded.program_id)
    eventually(lambda: not list(folder.iterdir()))
    assert board.is_well()


@pytest.mark.slow
def test_agent_ends_slow_answer_at_timeout(board: Board):
    start = time.monotonic()
    with pytest.raises(errors.StageTimeout, match="run exceeded the limit of 2 s"):
        board.run("drip", timeout=2)
    assert time.monotonic() - start < 20
    with pytest.raises(errors.StageTimeout, match="load exceeded the limit"):
        board.load("at_load drip", timeout=2)
    assert board.is_well()


@pytest.mark.parametrize(
    "attack",
    [
        "flood",
        "send deep",
        "send many",
        "send no-utf8",
        "send surrogate",
        "send digits",
        "send []",
        "send {}",
        'send {"ok": null}',
        'send {"ok": {"outputs": []}}',
        "send cut numbers",
        "send many numbers",
        'send {"error": "no"}',
        'send {"error": [1, 2, 3, 4, 5]}',
    ],
)
def test_agent_reports_invalid_answer_as_run_crash(board: Board, attack: str):
    before = board.rss()
    for stage in ("", "at_load "):
        with pytest.raises(errors.RunCrashed, match="invalid response from the worker"):
            board.run(stage + attack)
    assert board.rss() - before < 64 * MIB
    assert board.is_well()


OUTPUT = {"name": "y", "dtype": "float32", "shape": [16], "at": 0, "bytes": 64}


@pytest.mark.parametrize(
    "outputs",
    [
        [OUTPUT | {"at": -64}],
        [OUTPUT | {"bytes": -64, "shape": [-16]}],
        [OUTPUT | {"at": 1 << 40}],
        [OUTPUT | {"shape": [1] * 70 + [16]}],
        [OUTPUT | {"shape": [1 << 62, 0, 1 << 62], "bytes": 0}],
        [OUTPUT | {"dtype": "float31"}],
        [OUTPUT | {"at": 1.5}],
        [OUTPUT | {"name": None}],
        [OUTPUT] * 1000,
    ],
)
def test_agent_reports_invalid_outputs_as_program_error(board: Board, outputs: list[object]):
    with pytest.raises((errors.RunCrashed, errors.RunFailed)):
        board.run(f"send ran {json.dumps({'outputs': outputs})}")
    assert board.is_well()


@pytest.mark.parametrize("kind", ["BoardLost", "SessionEnded", "HilError", "StageTimeout", "nothing"])
def test_program_error_cannot_blame_board(board: Board, kind: str):
    with pytest.raises(errors.RunFailed, match="so it says"):
        board.run(f"report {kind}")
    assert board.is_well()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["line", "lines"])
def test_agent_bounds_memory_for_endless_stderr(board: Board, what: str):
    before = board.rss()
    took: list[float] = []

    def look() -> None:
        for _ in range(5):
            start = time.monotonic()
            board.client.describe()
            took.append(time.monotonic() - start)
            time.sleep(0.3)

    looker = threading.Thread(target=look)
    looker.start()
    with pytest.raises(errors.StageTimeout) as caught:
        board.run(f"shout {what}", timeout=3)
    looker.join()
    assert len(took) == 5
    assert len(caught.value.detail) < 300_000
    assert board.rss() - before < 64 * MIB
    assert board.is_well()


@pytest.mark.parametrize("end", ["unload", "session", "crash", "agent", "fork server"])
def test_agent_ends_processes_started_by_program(board: Board, tmp_path: Path, end: str):
    (tmp_path / "left").mkdir()
    attack = f"{tmp_path}/left 40"
    if end == "crash":
        with pytest.raises(errors.RunCrashed):
            board.run(f"offspring_and_die {attack}")
    else:
        loaded = board.load(f"offspring {attack}")
        board.client.invoke(loaded.program_id, {}, timeout=60)
    left = _started(tmp_path / "left", 40)
    if end == "unload":
        board.client.unload(loaded.program_id)
    elif end == "session":
        board.client.close_session()
    elif end == "agent":
        os.kill(board.pid, signal.SIGKILL)
    elif end == "fork server":
        server = int(Path(f"/proc/{loaded.worker_pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(server, signal.SIGKILL)
    eventually(lambda: not any(map(_lives, left)), lambda: f"after the {end} there are {sum(map(_lives, left))}")


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="cannot start it as somebody else")
def test_unprivileged_agent_confines_workers(make_board: Callable[..., Board], open_folder: Path):
    # The capability lets the user read this Python installation, and grants no other access.
    allowed = [f"--{kind}-caps=+dac_read_search" for kind in ("inh", "ambient")]
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *allowed]
    board = make_board(prefix=prefix)
    with pytest.raises(errors.RunFailed) as caught:
        board.run("limits")
    told = json.loads(caught.value.message)
    assert told["user"] == NOBODY
    assert 0 < told["NPROC"] < confinement.MORE_TASKS + 1000
    board.run("truncate")
    before = set((open_folder / "store/programs").iterdir())
    board.client.unload(_ran(board, "litter"))
    eventually(lambda: set((open_folder / "store/programs").iterdir()) == before)
    with pytest.raises(errors.RunFailed) as caught:
        board.run(f"reach {board.pid}")
    reached = json.loads(caught.value.message)
    assert not reached["trace"] and not reached["memory"]
    assert board.is_well()
    (open_folder / "left").mkdir()
    (open_folder / "left").chmod(0o777)
    board.run(f"offspring {open_folder}/left 20")
    left = _started(open_folder / "left", 20)
    os.kill(board.pid, signal.SIGKILL)
    eventually(lambda: not any(map(_lives, left)))


@pytest.mark.slow
def test_unload_spares_processes_of_other_programs(board: Board, tmp_path: Path):
    folders = [tmp_path / name for name in "ab"]
    loaded = []
    for folder in folders:
        folder.mkdir()
        loaded.append(board.load(f"offspring {folder} 5"))
        board.client.invoke(loaded[-1].program_id, {}, timeout=60)
    first, second = (_started(folder, 5) for folder in folders)
    board.client.unload(loaded[0].program_id)
    eventually(lambda: not any(map(_lives, first)))
    assert all(map(_lives, second))
    assert board.client.invoke(loaded[1].program_id, {}, timeout=60).outputs


@pytest.mark.slow
def test_agent_prepares_spare_workers_per_existing_device(board: Board):
    for number in range(40):
        with pytest.raises(errors.BoardUnfit, match=f"cannot find device 'no-{number}' on this board"):
            board.load("behave", device=f"no-{number}")
    assert len(board.below()) == 0
    for device in ("", "here", "secret") * 3:
        board.client.unload(board.load("behave", device=device).program_id)
    eventually(lambda: len(board.below()) == 2)
    time.sleep(0.5)
    assert len(board.below()) == 2, "one for each device that was used last, and two at most"
    spares = board.below()
    assert board.load("behave", device="secret").worker_pid in spares
    board.client.close_session()
    eventually(lambda: not spares & board.below())


@pytest.mark.slow
def test_session_without_load_preserves_spare_workers(board: Board):
    board.client.close_session()
    board.client = board.connect()
    board.client.close_session()
    time.sleep(0.3)
    assert not board.below()
    board.client = board.connect()
    board.load("behave")
    board.client.close_session()
    eventually(lambda: len(board.below()) == 1)
    standing = board.below()
    board.client = board.connect()
    board.client.close_session()
    time.sleep(0.3)
    assert board.below() == standing


def test_agent_starts_single_worker_for_single_program(board: Board):
    loaded = board.load("behave")
    time.sleep(0.5)
    assert board.below() == {loaded.worker_pid}


def test_spare_worker_opens_device_only_at_load(board: Board):
    for _ in range(2):
        loaded = board.load("behave", device="here")
    eventually(lambda: len(board.below()) == 3)
    seen = board.below()
    board.client.close_session()
    eventually(lambda: len(board.below()) == 1 and not seen & board.below())
    (standing,) = board.below()
    time.sleep(0.2)
    board.client = board.connect()
    begun = time.monotonic()
    loaded = board.load("tell_opened", device="here")
    assert loaded.worker_pid == standing
    with pytest.raises(errors.RunFailed) as told:
        board.client.invoke(loaded.program_id, {}, timeout=60)
    assert float(told.value.message) > begun


def test_worker_has_resource_limits(make_board: Callable[..., Board]):
    board = make_board("--memory-limit", str(256 * MIB))
    with pytest.raises(errors.RunFailed) as caught:
        board.run("limits")
    told = json.loads(caught.value.message)
    assert told["CORE"] == 0
    assert 0 < told["NOFILE"] <= confinement.MAX_FILES
    assert told["FSIZE"] == 256 * MIB + confinement.OWN_BYTES
    assert 0 < told["DATA"] < 8 << 30
    assert told["oom"] >= 500
    with pytest.raises(errors.RunFailed, match="MemoryError"):
        board.run("gobble 6000")
    assert board.is_well()


def _ran(board: Board, attack: str) -> str:
    program_id: str = board.load(attack).program_id
    board.client.invoke(program_id, {}, timeout=60)
    return program_id


def _started(folder: Path, count: int) -> list[int]:
    eventually(lambda: len([x for x in folder.iterdir() if x.suffix != ".new"]) == count)
    return [int(file.read_text()) for file in folder.iterdir()]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_agent_hides_program_logs_from_next_session(board: Board):
    board.run("say a secret of this session")
    eventually(lambda: board.client.logs() == ["a secret of this session"])
    board.client.close()
    board.client = board.connect()
    assert board.client.logs() == []


def test_worker_cannot_signal_or_trace_agent(board: Board):
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 6:
        pytest.skip("this kernel cannot keep a process's signals in")
    for pid in (board.pid, *_fork_servers(board)):
        with pytest.raises(errors.RunFailed) as caught:
            board.run(f"reach {pid}")
        assert json.loads(caught.value.message) == dict.fromkeys(("signal", "limit", "trace", "memory"), False)


def _fork_servers(board: Board) -> set[int]:
    worker = board.load("behave").worker_pid
    return {int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])}
