"""Starting a virtual board: what it needs is fetched, its keys are made, and its keeper begins."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hil.core.processes import module_command
from hil.errors import BoardError, UsageError
from tools.virtual_board import host, packages
from tools.virtual_board import netem as network
from tools.virtual_board import system as machine
from tools.virtual_board.board import VirtualBoard
from tools.virtual_board.places import made
from tools.virtual_board.plan import Plan
from tools.virtual_board.rootfs import SSHD_CONFIG, emulator, root_filesystem

Arch = Literal["x86_64", "aarch64"]

_READY_S = 60.0
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
    lifeline: bool = True,
) -> VirtualBoard:
    """Start a virtual board and wait until it can be logged into.

    Args:
        folder: a folder for it alone, which it removes at its end.
        name: its host name.
        arch: its architecture.
        disk_mb: how much it can write, in MB.
        netem: delay, jitter and loss of its network, such as "delay 20ms 5ms loss 1%".
        system: a whole machine with a kernel of its own, under qemu-system-aarch64: slower. Only for aarch64.
        memory_mb: the memory of such a machine, in MB.
        lifeline: whether it ends with this process, however that ends.

    Raises:
        UsageError: this machine cannot run one, and why.
        BoardError: it did not boot.
    """
    keeper = None
    try:
        host.require()
        network.parse(netem)
        made(folder)
        plan = _provide(Plan(name, arch, disk_mb, netem, system, memory_mb, lifeline), folder)
        keeper = host.new_namespaces(folder, *module_command("tools.virtual_board.keeper", str(folder)))
        gateway, ip = host.plug_in(keeper.pid)
        replace(plan, ip=ip, gateway=gateway).write(folder)
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"{ip} {' '.join(host_key.split()[:2])}\n")
        _go(keeper, folder, lifeline)
        board = VirtualBoard(folder, keeper if lifeline else None)
        board.wait()
    except BaseException:
        if keeper is not None:
            host.end(keeper)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return board


def _provide(plan: Plan, folder: Path) -> Plan:
    """The plan with what its board needs: all but its addresses."""
    program = cpu = ""
    if plan.system:
        if plan.arch != "aarch64":
            raise UsageError("a virtual board that is a whole machine has the architecture aarch64")
        machine.prepare()
    elif plan.arch != packages.host_arch():
        program, cpu = str(emulator(plan.arch)), _CPU[plan.arch]
    rootfs = str(root_filesystem(plan.arch))
    for key in ("identity", "host_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"virtual board {plan.name}", "-f"]
        subprocess.run([*command, str(folder / key)], check=True, capture_output=True)
    return replace(plan, rootfs=rootfs, emulator=program, cpu=cpu, files=_own_files(folder, plan.name, cpu))


def _go(keeper: subprocess.Popen[bytes], folder: Path, lifeline: bool) -> None:
    """Have the keeper begin, and wait until it can be asked."""
    assert keeper.stdin is not None
    # One that has ended already is found out below.
    with suppress(BrokenPipeError):
        keeper.stdin.write(b"go\n")
        keeper.stdin.flush()
    if not lifeline:
        keeper.stdin.close()
    end = time.monotonic() + _READY_S
    while not (folder / "control").exists():
        if keeper.poll() is not None or time.monotonic() > end:
            raise BoardError("the virtual board did not start", board=folder.name, detail=_log(folder))
        time.sleep(0.01)


def _own_files(folder: Path, name: str, cpu: str) -> dict[str, tuple[str, int, int]]:
    """What sets this board apart from others: text, mode and owner."""
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
