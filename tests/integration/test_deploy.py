"""The agent put on boards over SSH: there once, whole, for nobody else to read, and gone again."""

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

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_client import Target
from hil.controller.devices.board_factory import open_board
from hil.controller.devices.client import AgentClient
from hil.controller.devices.deploy import ensure, probe, wheels
from hil.controller.devices.deploy.ensure import AgentPlace, Recipe
from hil.controller.devices.deploy.packages import NoPython, NoWheels
from hil.controller.devices.ssh.connect import open_shell
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import open_tunnel
from hil.core.board_config import BoardConfig, Connection
from hil.core.runtimes import RuntimeInfo, Wheel
from hil.errors import BoardBusy, BoardError, BoardLost
from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board

LogIn = Callable[..., Shell]
# Where a running system writes by itself, and what Python keeps beside its own library.
ELSEWHERE = ("/proc", "/sys", "/dev", "/run", "/tmp", "/var", "/usr/lib/python3*")


@pytest.fixture
def log_in() -> Iterator[LogIn]:
    """Opens shells on boards; ``user`` is root unless it is given."""
    with ExitStack() as opened:

        def make(board: VirtualBoard, user: str = "root") -> Shell:
            connection = Connection(identity=str(board.identity), known_hosts=str(board.known_hosts))
            shell = open_shell(f"{user}@{board.ip}", connection, board=board.name, base=Path("/"))
            opened.callback(shell.close)
            return shell

        yield make


def put(shell: Shell, *runtimes: str, folder: str = "", say: Callable[[str], None] = print) -> AgentPlace:
    return ensure.ensure_agent(shell, Recipe.of(runtimes or ["iree"]), folder=folder, board="board", say=say)


def on(board: VirtualBoard, command: str) -> str:
    """What a command prints on the board, seen from beside it."""
    return board.run(["sh", "-c", command], check=True).stdout


def files_of(board: VirtualBoard) -> set[str]:
    pruned = " -o ".join(f"-path '{path}'" for path in ELSEWHERE)
    found = set(on(board, rf"find / -xdev \( {pruned} \) -prune -o -print").splitlines())
    assert "/etc/passwd" in found
    return found


def usable_runtimes(shell: Shell, place: AgentPlace) -> set[str]:
    """What the agent itself says, through a tunnel."""
    with ExitStack() as opened:
        tunnel = open_tunnel(shell, place.socket)
        opened.callback(tunnel.close)
        client = AgentClient(Target(tunnel.address), "board")
        opened.callback(client.close)
        described = client.describe()
        assert described.build == place.build
        # This one needs no package: every agent has it.
        return {one.name for one in described.runtimes if not one.error} - {"xla-aot"}


def test_a_board_gets_its_agent_once_and_keeps_nothing_of_it(make_board: MakeBoard, log_in: LogIn):
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


def test_a_runtime_that_is_not_published_for_the_board_is_the_reason_that_is_told(
    make_board: MakeBoard, log_in: LogIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    board = make_board(arch="x86_64")
    put(log_in(board))
    connection = Connection(identity=str(board.identity), known_hosts=str(board.known_hosts))
    choice = BoardChoice(BoardConfig("lab", "lab", connection=connection, path=tmp_path / "lab.toml"), board.address)
    # An index of nothing: what the agent itself needs is there already, as for any board that was deployed to before.
    empty_index(tmp_path, monkeypatch)
    unheard_of = RuntimeInfo("unheard-of", agent="", wheels=(Wheel("no-such-runtime"),))
    monkeypatch.setattr(wheels, "RUNTIMES", {"unheard-of": unheard_of})

    with pytest.raises(
        NoWheels, match=r"^no-such-runtime is not published for Python 3\.\d+ on x86_64, glibc"
    ) as raised:
        open_board(replace(choice, runtime="unheard-of"))

    assert raised.value.exit_code == 4
    assert raised.value.hint == "no command runs programs of unheard-of instead: --runtime iree, or another board"


def test_somebody_who_is_not_root_gets_an_agent_of_their_own(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    shell = log_in(board, "tester")

    place = put(shell)

    assert place.folder == "/home/tester/.hil"
    assert usable_runtimes(shell, place) == {"iree"}
    assert set(on(board, "find /home/tester/.hil -printf '%u\\n'").split()) == {"tester"}
    assert on(board, "find /home/tester/.hil -perm /077") == ""
    probe.clean(shell, "", force=True)


def test_a_reboot_leaves_no_agent_that_only_seems_to_run(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    place = put(log_in(board))
    board.reboot()
    shell = log_in(board)

    again = put(shell)

    assert again == AgentPlace(place.socket, place.folder, place.build, place.python, 0)
    assert usable_runtimes(shell, again) == {"iree"}


def test_a_deploy_whose_connection_broke_goes_on_where_it_was(make_board: MakeBoard, log_in: LogIn):
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
def test_a_deploy_whose_cable_was_pulled_keeps_nobody_out(make_board: MakeBoard, log_in: LogIn):
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


def test_two_who_come_at_once_send_it_once(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64", netem="rate 20mbit")  # which takes them long enough to meet
    said: list[str] = []
    shells = [log_in(board), log_in(board)]

    with ThreadPoolExecutor() as pool:
        places = list(pool.map(lambda shell: put(shell, say=said.append), shells))

    assert places[0].build == places[1].build
    assert sorted(place.pushed_bytes > 0 for place in places) == [False, True]
    assert any("another deploy" in text for text in said)
    assert on(board, "pgrep -f -c 'm hil[.]agent --listen'").strip() == "1"


def test_a_full_disk_is_told_and_breaks_nothing(make_board: MakeBoard, log_in: LogIn, monkeypatch: pytest.MonkeyPatch):
    board = make_board(arch="x86_64", disk_mb=100)
    shell = log_in(board)
    place = put(shell)

    with pytest.raises(BoardError, match=r"needs \d+ MB .* has .* MB left") as caught:
        put(shell, "onnxruntime")
    assert "folder" in caught.value.hint
    monkeypatch.setattr(ensure, "_check_room", lambda *_: None)
    with pytest.raises(BoardError, match="disk is full"):
        put(shell, "onnxruntime")

    assert on(board, "find /root/.hil -name '.new-*'") == ""
    assert put(shell) == AgentPlace(place.socket, place.folder, place.build, place.python, 0)
    assert usable_runtimes(shell, place) == {"iree"}


def test_an_agent_of_another_version_is_replaced_once_nobody_uses_it(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    shell = log_in(board)
    first = put(shell)
    tunnel = open_tunnel(shell, first.socket)
    client = AgentClient(Target(tunnel.address), "board")
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


def test_a_board_without_python_is_told_how_it_can_serve(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    on(board, "rm /usr/bin/python3*")

    with pytest.raises(NoPython) as caught:
        put(log_in(board))

    assert 'runtime.kind = "command"' in caught.value.hint


def test_a_folder_from_which_nothing_can_be_run_is_told(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    on(board, "mkdir -p /media/card && mount -t tmpfs -o noexec none /media/card")

    with pytest.raises(BoardError, match="noexec") as caught:
        put(log_in(board), folder="/media/card/hil")

    assert "folder" in caught.value.hint


def memory_of(socket: str) -> int:
    """Resident bytes of the emulated agent that serves a socket: its own memory and files, not those of the emulator
    (seen from here)."""
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
            # The emulator keeps a program's memory far below its own.
            ours = int(head[0].partition("-")[0], 16) < 0x600000000000 if head else False
            if ours or (name.startswith("/") and "qemu" not in name):
                total += int(re.search(r"^Rss: +(\d+) kB", part, re.M)[1]) * 1024
    return total


@pytest.mark.slow
def test_an_agent_on_an_arm_board_is_small(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="aarch64")
    shell = log_in(board)

    # In a folder of its own name: other boards have agents of this build, too.
    place = put(shell, folder="/root/small")

    assert usable_runtimes(shell, place) == {"iree"}
    assert put(shell, folder="/root/small").pushed_bytes == 0
    assert int(on(board, "du -s -B1 /root/small").split()[0]) < 75e6
    assert 30e6 < memory_of(place.socket) < 60e6
    probe.clean(shell, "/root/small")
    assert "small" not in on(board, "ls -A /root").split()


def test_clean_does_not_end_anothers_work(make_board: MakeBoard, log_in: LogIn):
    board = make_board(arch="x86_64")
    shell = log_in(board)
    place = put(shell)
    tunnel = open_tunnel(shell, place.socket)
    client = AgentClient(Target(tunnel.address), "board")
    client.describe()
    client.open_session("somebody", wait_s=10, on_wait=print)

    with pytest.raises(BoardBusy):
        probe.clean(shell, "")
    assert probe.status(shell, "").build == place.build

    client.close()
    tunnel.close()
    assert probe.clean(shell, "", force=True).used_bytes
