"""Deployment of the agent over SSH: complete, reused, private and removable."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.boards import MakeBoard
from support.deploying import empty_index
from support.waiting import eventually

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.choosing.board_factory import open_board
from hil.controller.devices.deploy import ensure, probe, wheels
from hil.controller.devices.deploy.ensure import AgentPlace, AgentRecipe
from hil.controller.devices.deploy.packages import NoPython, NoWheels
from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import open_tunnel
from hil.core.board_config import BoardConfig, Connection
from hil.core.runtimes import RuntimeInfo, Wheel
from hil.errors import BoardBusy, BoardError, BoardLost, BoardUnfit
from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board

LogIn = Callable[..., Shell]
# Directories that a running system writes to, and Python's bytecode caches.
ELSEWHERE = ("/proc", "/sys", "/dev", "/run", "/tmp", "/var", "/usr/lib/python3*")


@pytest.fixture
def log_in() -> Iterator[LogIn]:
    """Return a function that opens shells on boards; ``user`` defaults to root."""
    with ExitStack() as opened:

        def make(board: VirtualBoard, user: str = "root") -> Shell:
            connection = Connection(identity=str(board.identity), known_hosts=str(board.known_hosts))
            shell = open_shell(f"{user}@{board.ip}", connection, board=board.name, base=Path("/"))
            opened.callback(shell.close)
            return shell

        yield make


def put(shell: Shell, *runtimes: str, folder: str = "", say: Callable[[str], None] = print) -> AgentPlace:
    return ensure.ensure_agent(shell, AgentRecipe.of(runtimes or ["iree"]), folder=folder, board="board", say=say)


def on(board: VirtualBoard, command: str) -> str:
    """Run a command on the board without hil and return its output."""
    return board.run(["sh", "-c", command], check=True).stdout


def files_of(board: VirtualBoard) -> set[str]:
    pruned = " -o ".join(f"-path '{path}'" for path in ELSEWHERE)
    found = set(on(board, rf"find / -xdev \( {pruned} \) -prune -o -print").splitlines())
    assert "/etc/passwd" in found
    return found


def usable_runtimes(shell: Shell, place: AgentPlace) -> set[str]:
    """Ask the agent for its usable runtimes through a tunnel."""
    with ExitStack() as opened:
        tunnel = open_tunnel(shell, place.socket)
        opened.callback(tunnel.close)
        client = AgentClient(AgentEndpoint(tunnel.address), "board")
        opened.callback(client.close)
        described = client.describe()
        assert described.build == place.build
        # Every agent has xla-aot: it needs no package.
        return {one.name for one in described.runtimes if not one.error} - {"xla-aot"}


def test_deploy_reuses_agent_and_clean_removes_files(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    before = files_of(board)
    shell = log_in(board)

    first = put(shell)
    second = put(log_in(board))

    assert first.pushed_bytes > 10e6
    assert second == AgentPlace(first.socket, first.folder, first.build, first.python, 0)
    assert usable_runtimes(shell, first) == {"iree"}
    assert on(board, "find /root/.hil -perm /077") == ""
    listening = {line.split()[4].rpartition(":")[2] for line in on(board, "ss -Hltun").splitlines() if line.strip()}
    assert listening <= {"22"}

    assert probe.clean(shell, "").used_bytes
    assert files_of(board) - before == set()
    assert "hil.agent" not in on(board, "ps -eo args")


@pytest.mark.slow
def test_deploy_reports_runtime_without_wheels_for_board(
    make_board: MakeBoard, log_in: LogIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    board = make_board(arch="x86_64")
    put(log_in(board))
    connection = Connection(identity=str(board.identity), known_hosts=str(board.known_hosts))
    choice = BoardChoice(BoardConfig("lab", "lab", connection=connection, path=tmp_path / "lab.toml"), board.address)
    # Use an empty package index: the agent's packages are already deployed.
    empty_index(tmp_path, monkeypatch)
    unheard_of = RuntimeInfo("unheard-of", agent="", wheels=(Wheel("no-such-runtime"),))
    monkeypatch.setattr(wheels, "RUNTIMES", {"unheard-of": unheard_of})

    with pytest.raises(
        NoWheels, match=r"^no-such-runtime is not published for Python 3\.\d+ on x86_64, glibc"
    ) as raised:
        open_board(replace(choice, runtime="unheard-of"))

    assert raised.value.exit_code == 4
    assert raised.value.hint == "no command supports unheard-of programs: use --runtime iree, or a different board"


@pytest.mark.slow
def test_deploy_works_for_unprivileged_user(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    shell = log_in(board, "tester")

    place = put(shell)

    assert place.folder == "/home/tester/.hil"
    assert usable_runtimes(shell, place) == {"iree"}
    assert set(on(board, "find /home/tester/.hil -printf '%u\\n'").split()) == {"tester"}
    assert on(board, "find /home/tester/.hil -perm /077") == ""
    probe.clean(shell, "", force=True)


@pytest.mark.slow
def test_deploy_restarts_agent_after_reboot(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    place = put(log_in(board))
    board.reboot()
    shell = log_in(board)

    again = put(shell)

    assert again == AgentPlace(place.socket, place.folder, place.build, place.python, 0)
    assert usable_runtimes(shell, again) == {"iree"}


def test_deploy_resumes_after_broken_connection(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64", netem="rate 20mbit")

    def break_it() -> None:
        eventually(lambda: "grpcio" in on(board, "ls /root/.hil/packages || true"))
        on(board, "pkill -KILL sshd || true")

    breaker = threading.Thread(target=break_it)
    shell = log_in(board)
    with pytest.raises(BoardError):
        put(shell, say=lambda text: breaker.start() if text.startswith("pushing") else None)
    breaker.join()
    there = set(on(board, "ls /root/.hil/packages").split())
    assert there
    board.wait()
    said: list[str] = []

    shell = log_in(board)
    place = put(shell, say=said.append)

    assert not any("grpcio" in text for text in said)
    assert place.pushed_bytes > 0
    assert usable_runtimes(shell, place) == {"iree"}
    assert there <= set(on(board, "ls /root/.hil/packages").split())


@pytest.mark.slow
def test_deploy_recovers_after_cable_cut(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64", netem="rate 20mbit")
    shell = log_in(board)

    def cut(text: str) -> None:
        if text.startswith("pushing"):
            threading.Timer(1.0, board.cut).start()

    with pytest.raises(BoardLost):
        put(shell, say=cut)
    board.restore()
    board.wait()

    shell = log_in(board)
    assert usable_runtimes(shell, put(shell)) == {"iree"}


@pytest.mark.slow
def test_concurrent_deploys_share_single_upload(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64", netem="rate 20mbit")  # slow enough that both deploys overlap
    said: list[str] = []
    shells = [log_in(board), log_in(board)]

    with ThreadPoolExecutor() as pool:
        places = list(pool.map(lambda shell: put(shell, say=said.append), shells))

    assert places[0].build == places[1].build
    assert sorted(place.pushed_bytes > 0 for place in places) == [False, True]
    assert any("waiting until another deploy" in text for text in said)
    assert on(board, "pgrep -f -c 'm hil[.]agent --listen'").strip() == "1"


@pytest.mark.slow
def test_deploy_reports_full_disk_and_preserves_agent(
    make_board: MakeBoard, log_in: LogIn, monkeypatch: pytest.MonkeyPatch
):
    board = make_board(arch="x86_64", disk_mb=100)
    shell = log_in(board)
    place = put(shell)

    with pytest.raises(BoardUnfit, match=r"needs \d+ MB .* only .* MB are free") as caught:
        put(shell, "onnxruntime")
    assert "folder" in caught.value.hint
    monkeypatch.setattr(ensure, "_check_room", lambda *_: None)
    with pytest.raises(BoardUnfit, match=r"cannot use /root/.hil: the disk is full"):
        put(shell, "onnxruntime")

    assert on(board, "find /root/.hil -name '.new-*'") == ""
    assert put(shell) == AgentPlace(place.socket, place.folder, place.build, place.python, 0)
    assert usable_runtimes(shell, place) == {"iree"}


@pytest.mark.slow
def test_deploy_replaces_other_version_after_session_ends(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    shell = log_in(board)
    first = put(shell)
    tunnel = open_tunnel(shell, first.socket)
    client = AgentClient(AgentEndpoint(tunnel.address), "board")
    client.describe()
    client.open_session("somebody", wait_s=10, on_wait=print)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "in use" in text:
            client.close()

    second = put(shell, "iree", "onnxruntime", say=say)
    tunnel.close()

    assert any("in use" in text for text in said)
    assert second.build != first.build
    assert usable_runtimes(shell, second) == {"iree", "onnxruntime"}
    assert second.pushed_bytes < first.pushed_bytes


def test_deploy_without_python_suggests_command_runtime(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    on(board, "rm /usr/bin/python3*")

    with pytest.raises(NoPython) as caught:
        put(log_in(board))

    assert 'runtime.kind = "command"' in caught.value.hint


def test_deploy_rejects_noexec_directory(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    on(board, "mkdir -p /media/card && mount -t tmpfs -o noexec none /media/card")

    with pytest.raises(BoardUnfit, match="noexec") as caught:
        put(log_in(board), folder="/media/card/hil")

    assert "folder" in caught.value.hint


def memory_of(socket: str) -> int:
    """Return the resident bytes of the emulated agent at a socket, without the emulator's memory."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            maps = (process / "smaps").read_text() if f"unix:{socket}".encode() in command.split(b"\0") else ""
        except OSError:
            continue
        for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", maps):
            head = part.partition("\n")[0].split(None, 5)
            name = head[5] if len(head) > 5 else ""
            # Program addresses are far below the emulator's.
            ours = int(head[0].partition("-")[0], 16) < 0x600000000000 if head else False
            if ours or (name.startswith("/") and "qemu" not in name):
                total += int(re.search(r"^Rss: +(\d+) kB", part, re.M)[1]) * 1024
    return total


@pytest.mark.slow
def test_arm_agent_uses_little_disk_and_memory(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="aarch64")
    shell = log_in(board)

    # A separate directory: other boards have agents of this build, too.
    place = put(shell, folder="/root/small")

    assert usable_runtimes(shell, place) == {"iree"}
    assert put(shell, folder="/root/small").pushed_bytes == 0
    assert int(on(board, "du -s -B1 /root/small").split()[0]) < 75e6
    assert 30e6 < memory_of(place.socket) < 60e6
    probe.clean(shell, "/root/small")
    assert "small" not in on(board, "ls -A /root").split()


@pytest.mark.slow
def test_clean_refuses_while_agent_in_use(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    shell = log_in(board)
    place = put(shell)
    tunnel = open_tunnel(shell, place.socket)
    client = AgentClient(AgentEndpoint(tunnel.address), "board")
    client.describe()
    client.open_session("somebody", wait_s=10, on_wait=print)

    with pytest.raises(BoardBusy):
        probe.clean(shell, "")
    assert probe.read_status(shell, "").build == place.build

    client.close()
    tunnel.close()
    assert probe.clean(shell, "", force=True).used_bytes
