"""Create a virtual board's resources on this machine: namespaces, and one end of the network cable."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hil.errors import UsageError
from tools.virtual_board.plan import make_mac

_TOOLS = ("ip", "unshare", "nsenter", "mount", "ssh-keygen")
_SBIN = ":/usr/sbin:/sbin"
# A board has a network with four addresses: the board, the host, network and broadcast.
_NETWORK = "10.231"
_NETWORKS = 1 << 14
_TRIES = 20
_PRIVILEGED = "run as root, in a container with --privileged; HIL_NO_BOARDS=1 skips the tests that require a board"
_GREETING_SECONDS = 10.0
# The process must wait until the users are mapped. Only then can the process mount file systems, and only programs that
# start later have root's capabilities.
_BEGIN = 'read -r go && mount -t proc proc /proc && exec "$@"'
_NEW = "--user --net --mount --pid --fork --kill-child".split()
# The checkout's root for PYTHONPATH, because an installed hil lacks this package.
_ROOT = str(Path(__file__).resolve().parents[2])


def require() -> None:
    """Raise an error if this machine cannot run virtual boards.

    Raises:
        UsageError: a requirement is missing. The message names it.
    """
    if sys.platform != "linux":
        raise UsageError("virtual boards require Linux", hint="set HIL_NO_BOARDS=1 to skip their tests")
    path = os.environ.get("PATH", os.defpath)
    if not path.endswith(_SBIN):
        os.environ["PATH"] = path + _SBIN
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if missing:
        raise UsageError(
            f"virtual boards require {', '.join(missing)}: not found on PATH",
            hint="Debian and Ubuntu: apt-get install iproute2 util-linux mount openssh-client",
        )
    if os.geteuid() != 0:
        raise UsageError(
            "virtual boards require root for the network",
            hint=_PRIVILEGED,
        )


def start_namespaces(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start a process in new namespaces. The process waits for a line on stdin, and then runs the command.

    When the process ends, the kernel ends all processes in the namespaces. The output is written to ``keeper.log`` in
    the directory.

    Raises:
        UsageError: this machine does not allow such namespaces.
    """
    log = folder / "keeper.log"
    with log.open("wb") as messages:
        process = subprocess.Popen(
            ["unshare", *_NEW, "sh", "-c", _BEGIN, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=messages,
            stderr=messages,
            env={**os.environ, "PYTHONPATH": _ROOT},
            # Ctrl-C must interrupt only the caller, which then ends this process.
            start_new_session=True,
        )
    try:
        _map_users(process)
    except OSError:
        end(process)
        raise UsageError(
            "virtual boards require user namespaces: unsupported on this machine",
            hint=_PRIVILEGED,
            detail=log.read_text().strip(),
        ) from None
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process of :func:`start_namespaces`, independent of its state."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with suppress(OSError):
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
    process.kill()
    process.communicate()


def _map_users(process: subprocess.Popen[bytes]) -> None:
    """Map all users and groups of this machine to the same numbers in the namespace.

    Raises:
        OSError: the process has no separate namespaces.
    """
    inside, outside = Path(f"/proc/{process.pid}"), Path("/proc/self")
    while process.poll() is None and (inside / "ns/user").readlink() == (outside / "ns/user").readlink():
        time.sleep(0.001)
    for kind in ("uid_map", "gid_map"):
        lines = (outside / kind).read_text().splitlines()
        (inside / kind).write_text("".join(f"{here} {here} {count}\n" for here, _, count in map(str.split, lines)))


def plug_in(process: int) -> tuple[str, str]:
    """Create a network cable from this machine to a process's namespaces. The device there is ``uplink``.

    Returns:
        This machine's address on the cable, and the address for the other side.

    Raises:
        UsageError: this machine does not allow new network devices.
    """
    for _ in range(_TRIES):
        number = random.randrange(_NETWORKS)
        gateway, address = (f"{_NETWORK}.{number >> 6}.{(number & 63) * 4 + side}" for side in (1, 2))
        # Device names are unique, so creating the device also reserves the addresses.
        link = f"{link_name(address)} type veth peer name uplink netns {process}"
        done = _run_ip(f"link add name {link}")
        if not done.returncode:
            _run_ip(f"address add {gateway}/30 dev {link_name(address)}").check_returncode()
            _run_ip(f"link set {link_name(address)} up").check_returncode()
            # Add the neighbour here, because the kernel would repeat an ARP request to a booting board only after a
            # second.
            _run_ip(
                f"neighbour add {address} lladdr {make_mac(address)} dev {link_name(address)} nud stale"
            ).check_returncode()
            return gateway, address
        if "exists" not in done.stderr:
            break
    raise UsageError("cannot create a network for a virtual board", hint=_PRIVILEGED, detail=done.stderr.strip())


def unplug(address: str) -> None:
    """Remove the cable of the board with that address, if it exists."""
    _run_ip(f"link delete {link_name(address)}")


def link_name(address: str) -> str:
    """Return the device name for this machine's end of the cable, for the board with that address."""
    third, fourth = map(int, address.split(".")[2:])
    return f"hilboard{(third << 6) + fourth // 4}"


def _run_ip(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True)


def is_ssh_responding(address: str, patience: float) -> bool:
    """Return True if an SSH server responds at an address. ``patience`` is the connection timeout in seconds."""
    try:
        with socket.create_connection((address, 22), timeout=patience) as connection:
            connection.settimeout(_GREETING_SECONDS)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
