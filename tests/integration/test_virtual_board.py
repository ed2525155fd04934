"""Virtual boards do what boards do: they are reached over SSH, lose their network and their power, and come back."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.boards import MakeBoard
from support.commands import with_tools
from support.waiting import eventually

from hil.errors import BoardError, BoardLost
from tools.virtual_board import VirtualBoard

pytestmark = pytest.mark.board

ARCHS = ["x86_64", "aarch64"]
WAIT_S = 60


@pytest.fixture(params=["board_x86", "board_aarch64"])
def board(request: pytest.FixtureRequest) -> VirtualBoard:
    return request.getfixturevalue(request.param)


def ssh(board: VirtualBoard, *command: str, user: str = "root", **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*board.ssh(user=user), *command], capture_output=True, text=True, timeout=WAIT_S, **options)


def said(board: VirtualBoard, *command: str, user: str = "root") -> str:
    done = ssh(board, *command, user=user)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Talk:
    """An open SSH session that echoes lines."""

    def __init__(self, board: VirtualBoard) -> None:
        command = [*board.ssh(), "while read -r line; do echo $line; done"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.send("hello")
        assert self.hears("hello", WAIT_S)

    def send(self, word: str) -> None:
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()

    def hears(self, word: str, seconds: float) -> bool:
        """Whether that word comes next, within so many seconds."""
        readable, _, _ = select.select([self.process.stdout], [], [], seconds)
        return bool(readable) and self.process.stdout.readline().decode().strip() == word

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def talk() -> Iterator[Callable[[VirtualBoard], Talk]]:
    talks: list[Talk] = []

    def make(board: VirtualBoard) -> Talk:
        talks.append(Talk(board))
        return talks[-1]

    yield make
    for one in talks:
        one.close()


def test_it_is_a_machine_of_that_architecture(board: VirtualBoard) -> None:
    assert said(board, "uname -m") == board.arch
    assert said(board, "hostname") == board.name
    assert said(board, "python3 -c 'import platform; print(platform.machine())'") == board.arch


def test_an_arm_board_has_an_arm_processor(board_aarch64: VirtualBoard) -> None:
    assert "0xd03" in said(board_aarch64, "cat /proc/cpuinfo"), "the part number of a Cortex-A53"


def test_nothing_of_this_machine_is_seen_from_it(board: VirtualBoard) -> None:
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        here = Path(path)
        assert said(board, f"cat {path}") != (here.read_text().strip() if here.exists() else "")
    assert ssh(board, f"ls {Path(__file__).parent}").returncode == 2
    processes = said(board, "ls /proc | grep -c '^[0-9]'")
    # Its own, and the agents that other tests keep on it; here there are more.
    assert int(processes) < 60


def test_nothing_but_sshd_listens(board: VirtualBoard) -> None:
    listening = board.run(["ss", "-H", "-ltun"]).stdout.splitlines()
    assert listening and all(line.split()[4].endswith(":22") for line in listening), listening


def test_an_ordinary_user_logs_in_by_key_and_by_password(board_x86: VirtualBoard, tmp_path: Path) -> None:
    assert said(board_x86, "id -un", user="tester") == "tester"
    assert ssh(board_x86, "ls /root", user="tester").returncode == 2
    ask = tmp_path / "ask"
    ask.write_text(f"#!/bin/sh\necho {board_x86.user}\n")
    ask.chmod(0o700)
    password = ["-o", "BatchMode=no", "-o", "PreferredAuthentications=password"]
    command = board_x86.ssh(user="tester")
    environment = {**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
    done = subprocess.run(
        [command[0], *password, *command[1:], "id -un"],
        capture_output=True, text=True, timeout=WAIT_S, env=environment, start_new_session=True,
    )  # fmt: skip
    assert done.stdout == "tester\n", done.stderr


def test_commands_run_on_it_without_its_network(board: VirtualBoard) -> None:
    done = board.run(["sh", "-c", 'cat; echo "$0" >&2; exit 3', "a  'b"], stdin="in\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "in\n", "a  'b\n")
    with pytest.raises(BoardError, match="timed out"):
        board.run(["sleep", "60"], timeout=1)
    assert "sleep 60" not in board.run(["ps", "axww"]).stdout, "it was ended"


def test_packets_vanish_while_the_cable_is_out(make_board: MakeBoard, talk: Callable[[VirtualBoard], Talk]) -> None:
    board = make_board()
    session = talk(board)
    board.cut()
    session.send("lost")
    assert not session.hears("lost", 1)
    assert session.process.poll() is None, "nobody told the client"
    assert board.run(["hostname"]).stdout == "board\n"
    board.restore()
    assert session.hears("lost", WAIT_S)
    assert said(board, "hostname") == "board"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_reboot_ends_all_processes_and_keeps_the_disk(make_board: MakeBoard, arch: str) -> None:
    board = make_board(arch=arch)
    state = "cat /proc/sys/kernel/random/boot_id /etc/machine-id; grep btime /proc/stat; cut -d. -f1 /proc/uptime"
    assert said(board, "echo kept >file; echo lost >/tmp/file; sleep 1000 >/dev/null 2>&1 &") == ""
    time.sleep(1.1)
    before = said(board, state).splitlines()
    board.reboot()
    after = said(board, state).splitlines()
    assert before[0] != after[0], "another boot_id"
    assert before[1] == after[1], "the same machine"
    assert before[2] != after[2], "another time of booting"
    assert said(board, "cat file") == "kept"
    assert ssh(board, "cat /tmp/file").returncode == 1
    assert "sleep" not in board.run(["ps", "ax"]).stdout


def test_it_reboots_itself(make_board: MakeBoard) -> None:
    board = make_board()
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    before = said(board, boot_id)
    ssh(board, "reboot")
    eventually(lambda: ssh(board, boot_id).stdout.strip() not in ("", before))


def test_a_power_cut_tells_nobody(make_board: MakeBoard, talk: Callable[[VirtualBoard], Talk]) -> None:
    board = make_board()
    session = talk(board)
    board.kill()
    assert board.status()["power"] == "off"
    with pytest.raises(BoardError, match="off"):
        board.run(["true"])
    session.send("lost")
    assert not session.hears("lost", 1)
    assert session.process.poll() is None, "no connection was closed"
    board.power_on()
    # The board knows nothing of that connection any more, and says so as soon as it is asked.
    assert session.process.wait(WAIT_S) == 255
    assert said(board, "hostname") == "board"


def test_a_board_that_hangs_goes_on_later(make_board: MakeBoard, talk: Callable[[VirtualBoard], Talk]) -> None:
    board = make_board()
    session = talk(board)
    board.freeze()
    session.send("late")
    assert not session.hears("late", 1)
    with socket.create_connection((board.ip, 22), timeout=WAIT_S):
        pass  # the kernel still answers
    board.thaw()
    assert session.hears("late", WAIT_S)


def test_a_command_waits_for_the_board_to_boot(make_board: MakeBoard) -> None:
    board = make_board()
    for _ in range(5):
        board.reboot(wait=False)
        assert board.run(["cat", "/etc/hostname"]).stdout == "board\n"


def test_sshd_comes_back_when_it_is_killed(make_board: MakeBoard) -> None:
    board = make_board()
    board.run(["pkill", "-KILL", "-o", "sshd"], check=True)
    eventually(lambda: ssh(board, "true").returncode == 0)


def test_a_small_disk_gets_full(make_board: MakeBoard) -> None:
    board = make_board(disk_mb=16)
    done = ssh(board, "head -c 32M /dev/zero >file")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert said(board, "rm file; head -c 8M /dev/zero >file; stat -c %s file") == str(8 << 20)


def connect_s(board: VirtualBoard) -> float:
    """How long one way there and back takes."""
    began = time.monotonic()
    with socket.create_connection((board.ip, 22), timeout=WAIT_S):
        return time.monotonic() - began


def test_a_slow_network_delays_every_packet(make_board: MakeBoard) -> None:
    board = make_board(netem="delay 160ms 10ms")
    assert min(connect_s(board) for _ in range(3)) > 0.3
    assert said(board, "hostname") == "board"
    board.reboot()
    assert min(connect_s(board) for _ in range(3)) > 0.3, "it is the network that is slow, whatever the board does"


def test_a_network_that_loses_packets_still_carries_data(make_board: MakeBoard) -> None:
    board = make_board(netem="loss 5%")
    assert said(board, "head -c 2M /dev/zero | sha256sum") == said(board, "head -c 2M /dev/zero | sha256sum")
    done = ssh(board, "cat | wc -c", input="x" * (1 << 20))
    assert done.stdout.strip() == str(1 << 20), done.stderr


def test_boards_are_apart(board_x86: VirtualBoard, make_board: MakeBoard) -> None:
    other = make_board()
    assert other.ip != board_x86.ip
    said(other, "echo mine >/etc/mine")
    assert ssh(board_x86, "cat /etc/mine").returncode == 1
    assert ssh(other, "true", user="nobody-there").returncode == 255


START = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
from tools.virtual_board import start
print(start(Path(sys.argv[1]), arch=sys.argv[2]).run(["readlink", "/proc/1/ns/net"]).stdout, flush=True)
time.sleep(1000)
"""


def in_namespace(name: str) -> list[str]:
    """The processes of this machine that are in a network namespace."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "ns/net").readlink()) == name:
                found.append(process.name)
        except OSError:
            continue
    return found


def links() -> list[str]:
    """The names of this machine's network devices."""
    return [name for _, name in socket.if_nameindex()]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("arch", ARCHS)
def test_it_ends_with_whoever_started_it(arch: str, end: signal.Signals) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "board"
        starter = subprocess.Popen(
            [sys.executable, "-c", START, str(folder), arch], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        namespace = starter.stdout.readline().decode().strip()
        link = VirtualBoard(folder).link
        # Another board may be given the namespace's number as soon as it is free.
        inside = set(in_namespace(namespace))
        assert inside and link in links()
        starter.send_signal(end)
        starter.communicate(timeout=WAIT_S)
        eventually(lambda: not inside & set(in_namespace(namespace)) and link not in links())
        eventually(lambda: not folder.exists())


def test_nothing_is_left_of_a_board_that_is_taken_down(make_board: MakeBoard) -> None:
    board = make_board()
    namespace = board.run(["readlink", "/proc/1/ns/net"]).stdout.strip()
    link, folder = board.link, board.folder
    inside = set(in_namespace(namespace))
    assert inside
    board.down()
    assert not inside & set(in_namespace(namespace))
    assert link not in links()
    assert not folder.exists()
    assert str(folder) not in Path("/proc/mounts").read_text()
    with pytest.raises(BoardLost):
        board.status()
    board.down()


class Command:
    """scripts/virtual-board, with a lab of its own."""

    def __init__(self, lab: Path) -> None:
        self.environment = with_tools({**os.environ, "HIL_VIRTUAL_LAB": str(lab)})

    def __call__(self, *words: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        command = [*before, sys.executable, "-m", "tools.virtual_board.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=5 * WAIT_S)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    # Longer than the name of a socket may be.
    made = Command(tmp_path / ("lab" * 40))
    yield made
    for line in made("list").stdout.splitlines():
        made("down", line.split("\t")[0])


def test_the_command_starts_a_board_and_says_how_to_reach_it(command: Command) -> None:
    done = command("up", "pi", "--netem", "delay 1ms")
    reach = json.loads(done.stdout)
    assert list(reach) == ["address", "identity", "known_hosts"]
    login = ["ssh", "-F", "none", "-i", reach["identity"], "-o", f"UserKnownHostsFile={reach['known_hosts']}"]
    tried = [*login, reach["address"], "hostname"]
    there = command("exec", "--", *tried)
    assert there.stdout == "pi\n", there.stderr

    assert command("kill", "pi").returncode == 0
    assert "power off" in command("list").stdout
    again = command("up", "pi", "--netem", "delay 1ms")
    assert json.loads(again.stdout) == reach, again.stderr
    assert command("cut", "pi").returncode == 0
    assert command("exec", "--", tried[0], "-o", "ConnectTimeout=1", *tried[1:]).returncode == 255
    assert command("restore", "pi").returncode == 0
    assert command("reboot", "pi").returncode == 0
    assert command("exec", "--", *tried).stdout == "pi\n"
    assert command("down", "pi").returncode == 0
    assert command("list").stdout == ""


@pytest.mark.parametrize(
    "words, message",
    [
        (["cut", "nobody"], "no virtual board 'nobody' is up"),
        (["up", "../x"], "is no name for a board"),
        (["up", "x", "--netem", "delay"], "cannot read the network's quality"),
        (["up", "x", "--arch", "z80"], "Invalid value for '--arch'"),
        (["exec", "--", "no-such-command"], "cannot run no-such-command"),
    ],
)
def test_wrong_usage_is_told(command: Command, words: list[str], message: str) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


NO_NAMESPACES = 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$@"'


@pytest.mark.parametrize(
    "before, message",
    [
        (["unshare", "--user"], "need root"),
        (["unshare", "--user", "--map-root-user"], "cannot make a network"),
        (["unshare", "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES, "sh"], "need user namespaces"),
    ],
    ids=["no root", "no network", "no namespaces"],
)
def test_missing_privileges_are_told(command: Command, before: list[str], message: str) -> None:
    done = command("up", "pi", before=before)
    assert done.returncode == 2
    assert message in done.stderr
    assert "HIL_NO_BOARDS=1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "chosen, code, summary",
    [("1", 0, "1 skipped"), ("", 1, "need root")],
    ids=["asked to leave them out", "without privileges"],
)
def test_tests_without_a_board_fail_unless_told_not_to(chosen: str, code: int, summary: str) -> None:
    chooses = "test_virtual_board.py::test_a_small_disk_gets_full"
    command = ["unshare", "--user", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name(chooses))],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HIL_NO_BOARDS": chosen},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == code, done.stdout
    assert summary in done.stdout
