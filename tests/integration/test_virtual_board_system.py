"""Virtual boards as full machines: a kernel that boots, reboots and loses power, with a separate clock."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence

import pytest
from support.boards import MakeBoard
from support.waiting import eventually

from hil.errors import BoardError
from tools.virtual_board import VirtualBoard

pytestmark = [pytest.mark.board, pytest.mark.slow]

WAIT_S = 120
HOUR_S = 3600
BOOT_ID = ["cat", "/proc/sys/kernel/random/boot_id"]


@pytest.fixture(scope="module")
def machine(start_board: MakeBoard) -> VirtualBoard:
    """Shared machine. Every test leaves it on, connected and reachable."""
    return start_board(name="whole", arch="aarch64", system=True)


def ssh(board: VirtualBoard, *command: str) -> subprocess.CompletedProcess[str]:
    # A dead machine sends no data: only polling every second detects it.
    alive = ["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=5", "-o", "ConnectTimeout=20"]
    return subprocess.run([*board.ssh(*alive), *command], capture_output=True, text=True, timeout=WAIT_S)


def said(board: VirtualBoard, command: str) -> str:
    done = ssh(board, command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def answer(board: VirtualBoard, command: Sequence[str]) -> str:
    """Return a command's output from the serial line. Output in flight at shutdown is lost."""
    return board.run(command, check=True, timeout=10).stdout.strip()


def boot_id(board: VirtualBoard) -> str:
    """Return the boot id, or "" while the machine boots."""
    try:
        return answer(board, BOOT_ID)
    except BoardError:
        return ""


def memory_mb(board: VirtualBoard) -> int:
    return int(answer(board, ["awk", "/^MemTotal/ { print $2 }", "/proc/meminfo"])) // 1024


def test_machine_runs_separate_kernel_with_given_resources(machine: VirtualBoard) -> None:
    assert said(machine, "uname -m; hostname") == "aarch64\nwhole"
    assert said(machine, "uname -r") != os.uname().release, "the kernel is its own"
    assert "0xd03" in said(machine, "cat /proc/cpuinfo"), "the part number of a Cortex-A53"
    assert said(machine, "nproc") == "2"
    assert 400 < memory_mb(machine) <= 512
    assert said(machine, "id -un; stat -c '%U %a' / /root /home/tester /tmp").splitlines() == [
        "root",
        "root 755",
        "root 700",
        "tester 700",
        "root 1777",
    ]


@pytest.mark.parametrize("command", ["reboot -f", "reboot"])
def test_reboot_command_restarts_and_preserves_disk(machine: VirtualBoard, command: str) -> None:
    before = boot_id(machine)
    said(machine, "echo kept >/root/kept; echo lost >/tmp/lost; sync")
    ssh(machine, command)
    eventually(lambda: boot_id(machine) not in ("", before))
    machine.wait()
    assert said(machine, "cat /root/kept; ls /tmp") == "kept"
    assert float(said(machine, "cat /proc/uptime").split()[0]) < WAIT_S
    assert machine.status()["power"] == "on"


def test_reboot_gives_new_boot_id_and_preserves_disk(machine: VirtualBoard) -> None:
    before = boot_id(machine)
    said(machine, "echo kept >/root/kept; sync")
    machine.reboot()
    assert boot_id(machine) not in ("", before)
    assert said(machine, "cat /root/kept") == "kept"


def test_machine_clock_changes_independently(machine: VirtualBoard) -> None:
    uptime = float(said(machine, "cat /proc/uptime").split()[0])
    offset = int(said(machine, "date +%s")) - time.time()
    assert abs(offset) < WAIT_S
    said(machine, "date -s '1 hour'")
    jumped = int(said(machine, "date +%s")) - time.time()
    assert HOUR_S - WAIT_S < jumped < HOUR_S + WAIT_S
    assert 0 <= float(said(machine, "cat /proc/uptime").split()[0]) - uptime < WAIT_S, "that clock is steady"
    said(machine, "date -s '1 hour ago'")


def test_power_cut_loses_unsynced_files(machine: VirtualBoard) -> None:
    before = boot_id(machine)
    said(machine, "mkdir -p cut; rm -f cut/*; echo kept >cut/kept; sync; echo lost >cut/lost")
    machine.kill()
    assert machine.status()["power"] == "off"
    with pytest.raises(BoardError):
        machine.run(["true"])
    machine.power_on()
    assert boot_id(machine) != before
    assert said(machine, "cat cut/*") == "kept"


def test_frozen_machine_drops_connections(machine: VirtualBoard) -> None:
    machine.freeze()
    try:
        with pytest.raises(TimeoutError):
            socket.create_connection((machine.ip, 22), timeout=2)
        with pytest.raises(BoardError):
            machine.run(["true"], timeout=1)
    finally:
        machine.thaw()
    assert said(machine, "hostname") == "whole"


def test_run_executes_commands_over_serial_line(machine: VirtualBoard) -> None:
    done = machine.run(["sh", "-c", 'cat; echo "$0" >&2; exit 3', "a  'b $HOME *"], stdin="in\n" * 30_000)
    assert (done.returncode, done.stdout, done.stderr) == (3, "in\n" * 30_000, "a  'b $HOME *\n")
    with pytest.raises(BoardError):
        machine.run(["sh", "-c", "sleep 3; echo late"], timeout=1)
    assert answer(machine, ["echo", "now"]) == "now", "an answer that came too late is nobody's"
    assert machine.run(["no-such-program"]).returncode == 127


def test_serial_line_works_with_network_cut(machine: VirtualBoard) -> None:
    machine.cut()
    try:
        assert answer(machine, ["hostname"]) == "whole"
        with pytest.raises(TimeoutError):
            socket.create_connection((machine.ip, 22), timeout=2)
    finally:
        machine.restore()
    assert said(machine, "hostname") == "whole"


def test_kernel_delays_packets_with_tc(machine: VirtualBoard) -> None:
    said(machine, "tc qdisc add dev eth0 root netem delay 300ms")
    try:
        began = time.monotonic()
        with socket.create_connection((machine.ip, 22), timeout=WAIT_S):
            assert time.monotonic() - began > 0.25
    finally:
        answer(machine, ["tc", "qdisc", "del", "dev", "eth0", "root"])


def test_machine_powers_on_after_poweroff(make_board: MakeBoard) -> None:
    board = make_board(arch="aarch64", system=True, disk_mb=64)
    ssh(board, "poweroff")
    eventually(lambda: board.status()["power"] == "off")
    board.power_on()
    assert said(board, "hostname") == "board"


def test_machine_survives_out_of_memory_program(make_board: MakeBoard) -> None:
    board = make_board(arch="aarch64", system=True, memory_mb=128)
    before = boot_id(board)
    assert memory_mb(board) <= 128
    done = ssh(board, "exec python3 -c 'bytearray(b\"x\") * (256 << 20)'")
    assert done.returncode in (1, 137), done.stderr
    assert done.returncode == 137 or "MemoryError" in done.stderr
    assert boot_id(board) == before


def test_small_disk_rejects_large_file(make_board: MakeBoard) -> None:
    board = make_board(arch="aarch64", system=True, disk_mb=16)
    done = ssh(board, "head -c 512M /dev/zero >file")
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert said(board, "rm file; echo room >file; cat file") == "room"
