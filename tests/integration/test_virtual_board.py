"""Virtual boards behave like boards: SSH access, network and power loss, and recovery."""

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
        """Return whether the word arrives within the time limit."""
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


@pytest.mark.slow
def test_board_reports_requested_architecture(board: VirtualBoard) -> None:
    assert said(board, "uname -m") == board.arch
    assert said(board, "hostname") == board.name
    assert said(board, "python3 -c 'import platform; print(platform.machine())'") == board.arch


def test_arm_board_emulates_cortex_a53(board_aarch64: VirtualBoard) -> None:
    assert "0xd03" in said(board_aarch64, "cat /proc/cpuinfo"), "the part number of a Cortex-A53"


@pytest.mark.slow
def test_board_hides_host_files_and_processes(board: VirtualBoard) -> None:
    for path in ("/proc/sys/kernel/random/boot_id", "/etc/machine-id"):
        here = Path(path)
        assert said(board, f"cat {path}") != (here.read_text().strip() if here.exists() else "")
    assert ssh(board, f"ls {Path(__file__).parent}").returncode == 2
    processes = said(board, "ls /proc | grep -c '^[0-9]'")
    # Board processes and agents of other tests. The host has more.
    assert int(processes) < 60


def test_board_listens_only_on_ssh_port(board: VirtualBoard) -> None:
    listening = board.run(["ss", "-H", "-ltun"]).stdout.splitlines()
    assert listening and all(line.split()[4].endswith(":22") for line in listening), listening


def test_user_logs_in_by_key_and_password(board_x86: VirtualBoard, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_run_executes_command_without_network(board: VirtualBoard) -> None:
    done = board.run(["sh", "-c", 'cat; echo "$0" >&2; exit 3', "a  'b"], stdin="in\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "in\n", "a  'b\n")
    with pytest.raises(BoardError, match="timed out"):
        board.run(["sleep", "60"], timeout=1)
    assert "sleep 60" not in board.run(["ps", "axww"]).stdout, "it was ended"


def test_cut_drops_packets_until_restore(make_board: MakeBoard, talk: Callable[[VirtualBoard], Talk]) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_reboot_ends_processes_and_preserves_disk(make_board: MakeBoard, arch: str) -> None:
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


@pytest.mark.slow
def test_reboot_command_restarts_board(make_board: MakeBoard) -> None:
    board = make_board()
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    before = said(board, boot_id)
    ssh(board, "reboot")
    eventually(lambda: ssh(board, boot_id).stdout.strip() not in ("", before))


@pytest.mark.slow
def test_power_cut_leaves_connection_open_at_client(
    make_board: MakeBoard, talk: Callable[[VirtualBoard], Talk]
) -> None:
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
    # The board has lost the connection state and resets it on the next packet.
    assert session.process.wait(WAIT_S) == 255
    assert said(board, "hostname") == "board"


@pytest.mark.slow
def test_frozen_board_continues_after_thaw(make_board: MakeBoard, talk: Callable[[VirtualBoard], Talk]) -> None:
    board = make_board()
    session = talk(board)
    board.freeze()
    session.send("late")
    assert not session.hears("late", 1)
    with socket.create_connection((board.ip, 22), timeout=WAIT_S):
        pass  # the kernel still accepts connections
    board.thaw()
    assert session.hears("late", WAIT_S)


@pytest.mark.slow
def test_command_waits_for_boot(make_board: MakeBoard) -> None:
    board = make_board()
    for _ in range(5):
        board.reboot(wait=False)
        assert board.run(["cat", "/etc/hostname"]).stdout == "board\n"


@pytest.mark.slow
def test_killed_sshd_restarts(make_board: MakeBoard) -> None:
    board = make_board()
    board.run(["pkill", "-KILL", "-o", "sshd"], check=True)
    eventually(lambda: ssh(board, "true").returncode == 0)


def test_small_disk_rejects_large_file(make_board: MakeBoard) -> None:
    board = make_board(disk_mb=16)
    done = ssh(board, "head -c 32M /dev/zero >file")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert said(board, "rm file; head -c 8M /dev/zero >file; stat -c %s file") == str(8 << 20)


def connect_s(board: VirtualBoard) -> float:
    """Return the round-trip time in seconds."""
    began = time.monotonic()
    with socket.create_connection((board.ip, 22), timeout=WAIT_S):
        return time.monotonic() - began


@pytest.mark.slow
def test_netem_delay_slows_every_connection(make_board: MakeBoard) -> None:
    board = make_board(netem="delay 160ms 10ms")
    assert min(connect_s(board) for _ in range(3)) > 0.3
    assert said(board, "hostname") == "board"
    board.reboot()
    assert min(connect_s(board) for _ in range(3)) > 0.3, "it is the network that is slow, whatever the board does"


@pytest.mark.slow
def test_netem_loss_preserves_data(make_board: MakeBoard) -> None:
    board = make_board(netem="loss 5%")
    assert said(board, "head -c 2M /dev/zero | sha256sum") == said(board, "head -c 2M /dev/zero | sha256sum")
    done = ssh(board, "cat | wc -c", input="x" * (1 << 20))
    assert done.stdout.strip() == str(1 << 20), done.stderr


@pytest.mark.slow
def test_boards_do_not_share_files(board_x86: VirtualBoard, make_board: MakeBoard) -> None:
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
    """Return the host processes in a network namespace."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "ns/net").readlink()) == name:
                found.append(process.name)
        except OSError:
            continue
    return found


def links() -> list[str]:
    """Return the host's network device names."""
    return [name for _, name in socket.if_nameindex()]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("arch", ARCHS)
def test_board_stops_when_starter_exits(arch: str, end: signal.Signals) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "board"
        starter = subprocess.Popen(
            [sys.executable, "-c", START, str(folder), arch], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        namespace = starter.stdout.readline().decode().strip()
        link = VirtualBoard(folder).link
        # A new board may reuse the namespace number.
        inside = set(in_namespace(namespace))
        assert inside and link in links()
        starter.send_signal(end)
        starter.communicate(timeout=WAIT_S)
        eventually(lambda: not inside & set(in_namespace(namespace)) and link not in links())
        eventually(lambda: not folder.exists())


def test_down_removes_every_trace_of_board(make_board: MakeBoard) -> None:
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
    """scripts/virtual-board with a separate lab directory."""

    def __init__(self, lab: Path) -> None:
        self.environment = with_tools({**os.environ, "HIL_VIRTUAL_LAB": str(lab)})

    def __call__(self, *words: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        command = [*before, sys.executable, "-m", "tools.virtual_board.cli", *words]
        return subprocess.run(command, capture_output=True, text=True, env=self.environment, timeout=5 * WAIT_S)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    # Longer than a socket path may be.
    made = Command(tmp_path / ("lab" * 40))
    yield made
    for line in made("list").stdout.splitlines():
        made("down", line.split("\t")[0])


@pytest.mark.slow
def test_up_command_starts_board_and_prints_address(command: Command) -> None:
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
        (["cut", "nobody"], "virtual board 'nobody' not running"),
        (["up", "../x"], "invalid board name"),
        (["up", "x", "--netem", "delay"], "invalid network quality"),
        (["up", "x", "--arch", "z80"], "Invalid value for '--arch'"),
        (["exec", "--", "no-such-command"], "cannot run no-such-command"),
    ],
)
def test_command_rejects_invalid_arguments(command: Command, words: list[str], message: str) -> None:
    done = command(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


NO_NAMESPACES = 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$@"'


@pytest.mark.slow
@pytest.mark.parametrize(
    "before, message",
    [
        (["unshare", "--user"], "require root"),
        (["unshare", "--user", "--map-root-user"], "cannot create a network"),
        (["unshare", "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES, "sh"], "require user namespaces"),
    ],
    ids=["no root", "no network", "no namespaces"],
)
def test_command_reports_missing_privileges(command: Command, before: list[str], message: str) -> None:
    done = command("up", "pi", before=before)
    assert done.returncode == 2
    assert message in done.stderr
    assert "HIL_NO_BOARDS=1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen, code, summary",
    [("1", 0, "1 skipped"), ("", 1, "require root")],
    ids=["asked to leave them out", "without privileges"],
)
def test_board_tests_fail_without_privileges_unless_disabled(chosen: str, code: int, summary: str) -> None:
    chooses = "test_virtual_board.py::test_small_disk_rejects_large_file"
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
