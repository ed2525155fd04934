"""Start a virtual board: fetch packages, create keys, and start the keeper."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hil.core.processes import make_module_command
from hil.errors import BoardError, UsageError
from tools.virtual_board import host, packages
from tools.virtual_board import netem as network
from tools.virtual_board import system as machine
from tools.virtual_board.board import VirtualBoard
from tools.virtual_board.places import make_private
from tools.virtual_board.plan import Plan
from tools.virtual_board.rootfs import SSHD_CONFIG, get_emulator, get_root_filesystem

Arch = Literal["x86_64", "aarch64"]

_READY_SECONDS = 60.0
_CPU = {"aarch64": "cortex-a53"}


def start(
    folder: Path,
    *,
    name: str = "board",
    arch: Arch = "x86_64",
    disk_mb: int = 1024,
    netem: str = "",
    system: bool = False,
    memory_mb: int = 512,
    icount: bool = False,
    lifeline: bool = True,
) -> VirtualBoard:
    """Start a virtual board and wait until SSH works.

    Args:
        folder: directory for this board only, which is removed when the board ends.
        name: the host name.
        arch: the architecture.
        disk_mb: the writable disk space, in MB.
        netem: delay, jitter and loss of the network, such as "delay 20ms 5ms loss 1%".
        system: emulate a machine with a separate kernel under qemu-system-aarch64, which is slower. Only for aarch64.
        memory_mb: memory of the emulated machine, in MB.
        icount: with ``system``, one core whose clock advances by 1 ns per instruction, even slower.
        lifeline: True if the board ends when this process ends for any reason.

    Raises:
        UsageError: this machine cannot run a board. The message gives the reason.
        BoardError: the board did not boot.
    """
    keeper = None
    try:
        host.require()
        network.parse(netem)
        make_private(folder)
        plan = _provide(Plan(name, arch, disk_mb, netem, system, memory_mb, icount, lifeline), folder)
        keeper = host.start_namespaces(folder, *make_module_command("tools.virtual_board.keeper", str(folder)))
        gateway, ip = host.plug_in(keeper.pid)
        replace(plan, ip=ip, gateway=gateway).write(folder)
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"{ip} {' '.join(host_key.split()[:2])}\n")
        _continue_keeper(keeper, folder, lifeline)
        board = VirtualBoard(folder, keeper if lifeline else None)
        board.wait()
    except BaseException:
        if keeper is not None:
            host.end(keeper)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return board


def _provide(plan: Plan, folder: Path) -> Plan:
    """Return the plan with all files that the board needs, but without the addresses."""
    program = cpu = ""
    if plan.system:
        if plan.arch != "aarch64":
            raise UsageError(f"unsupported architecture {plan.arch!r} for a whole machine: expected aarch64")
        machine.prepare()
    elif plan.arch != packages.get_host_arch():
        program, cpu = str(get_emulator(plan.arch)), _CPU[plan.arch]
    rootfs = str(get_root_filesystem(plan.arch))
    for key in ("identity", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"virtual board {plan.name}", "-f"]
        subprocess.run([*command, str(folder / key)], check=True, capture_output=True)
    return replace(plan, rootfs=rootfs, emulator=program, cpu=cpu, files=_own_files(folder, plan.name, cpu))


def _continue_keeper(keeper: subprocess.Popen[bytes], folder: Path, lifeline: bool) -> None:
    """Let the keeper continue, and wait until it accepts requests."""
    assert keeper.stdin is not None
    # The loop below detects a keeper that has already ended.
    with suppress(BrokenPipeError):
        keeper.stdin.write(b"go\n")
        keeper.stdin.flush()
    if not lifeline:
        keeper.stdin.close()
    end = time.monotonic() + _READY_SECONDS
    while not (folder / "control").exists():
        if keeper.poll() is not None or time.monotonic() > end:
            raise BoardError("the virtual board did not start", board=folder.name, detail=_log(folder))
        time.sleep(0.01)


def _own_files(folder: Path, name: str, cpu: str) -> dict[str, tuple[str, int, int]]:
    """Return the files that are specific to this board: text, mode and owner."""
    public = (folder / "identity.pub").read_text()
    config = SSHD_CONFIG + (f"SetEnv QEMU_CPU={cpu}\n" if cpu else "")
    return {
        "etc/hostname": (f"{name}\n", 0o644, 0),
        "etc/hosts": (f"127.0.0.1 localhost\n127.0.1.1 {name}\n", 0o644, 0),
        "etc/machine-id": (f"{uuid.uuid4().hex}\n", 0o444, 0),
        "etc/ssh/sshd_config": (config, 0o644, 0),
        "etc/ssh/ssh_host_ed25519_key": ((folder / "host_key").read_text(), 0o600, 0),
        "root/.ssh/authorized_keys": (public, 0o600, 0),
        "home/tester/.ssh/authorized_keys": (public, 0o600, 1000),
    }


def _log(folder: Path) -> str:
    return "".join(log.read_text(errors="replace") for log in folder.glob("*.log")).strip()
