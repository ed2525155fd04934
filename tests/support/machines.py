"""Machines in network namespaces, connected by a bridge. Needs root, also of a user namespace.

A machine has its own network, process ids, host name, `/etc` and `/srv`. It shares all other directories.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support.waiting import eventually

TOOLS = ("ip", "unshare", "nsenter", "mount")
_NET = "10.77.0"
_ADDRESSES = f"{_NET}.0/24"
# Directories of a machine that only this machine has.
_OWN = ("etc", "srv")
_BOOT = """
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2/etc" /etc
mount --bind "$2/srv" /srv
exec sleep infinity
"""
_MACHINE = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


def find_problem() -> str:
    """Return why this machine cannot create machines; "" if it can."""
    if os.geteuid() != 0:
        return "needs root: scripts/farm-rehearsal creates a user namespace"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    probe = "mount --bind /etc /etc && ip link add name probe0 type bridge && ip link add p0 type veth peer name p1"
    tried = subprocess.run([*_MACHINE, "sh", "-ec", probe], capture_output=True, text=True)
    return f"cannot create namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Machine:
    """Running machine.

    Attributes:
        address: its address in the network.
    """

    def __init__(self, name: str, folder: Path, number: int) -> None:
        self.name, self._folder = name, folder
        self._started: list[subprocess.Popen[bytes]] = []
        self.address = f"{_NET}.{number}"
        shutil.copytree("/etc", folder / "etc", symlinks=True, ignore=_ignore_special)
        (folder / "srv").mkdir()
        self._holder = subprocess.Popen([*_MACHINE, "sh", "-ec", _BOOT, "sh", name, str(folder)])
        spaces = f"/proc/{self._holder.pid}/ns"
        self._enter = [
            *("nsenter", f"--net={spaces}/net", f"--mount={spaces}/mnt", f"--uts={spaces}/uts"),
            f"--pid={spaces}/pid_for_children",
        ]
        eventually(self._has_started, process=self._holder)

    @property
    def pid(self) -> int:
        """Process that holds the machine's network namespace."""
        return self._holder.pid

    def path(self, inside: str | Path) -> Path:
        """Return the path outside the machine of a file in one of its own directories."""
        relative = Path(inside).relative_to("/")
        assert relative.parts[0] in _OWN, inside
        return self._folder / relative

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this machine. Its messages are appended to a file outside the machine.

        A signal to the returned process does not reach the command.
        """
        with log.open("ab") as messages:
            process = subprocess.Popen(
                [*self._enter, *command],
                env=None if environment is None else dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                start_new_session=True,
                cwd="/",
            )
        self._started.append(process)
        return process

    def run(
        self, *command: str, environment: Mapping[str, str] | None = None, timeout_s: float = 240.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine to its end."""
        done = subprocess.run(
            [*self._enter, *command],
            env=None if environment is None else dict(environment),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            cwd="/",
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def set_address_of(self, name: str, address: str) -> None:
        """Set the address of a host name on this machine."""
        hosts = self.path("/etc/hosts")
        lines = [line for line in hosts.read_text().splitlines() if line.split()[1:] != [name]]
        hosts.write_text("\n".join([*lines, f"{address} {name}", ""]))

    def power_off(self) -> None:
        """Kill all processes of the machine at once."""
        for process in (self._holder, *self._started):
            process.kill()
            process.wait()

    def _has_started(self) -> bool:
        """Return True if the last mount of the boot is done."""
        mark = self.path("/srv/started")
        mark.touch()
        has_own_srv = self.run("test", "-e", "/srv/started", check=False).returncode == 0
        mark.unlink()
        return has_own_srv


class Network:
    """Bridge between machines, in its own namespace."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machines: list[Machine] = []
        self._switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        own = Path("/proc/self/ns/net").readlink()
        eventually(lambda: Path(f"/proc/{self._switch.pid}/ns/net").readlink() != own, process=self._switch)
        self._ip(self._switch.pid, "link add name br0 type bridge")
        self._ip(self._switch.pid, "link set br0 up")

    def add(self, name: str) -> Machine:
        """Start a machine and connect it. It knows the names of the machines before it."""
        number = len(self._machines) + 1
        folder = self._folder / name
        folder.mkdir()
        machine = Machine(name, folder, number)
        self._ip(self._switch.pid, f"link add port{number} type veth peer name eth0 netns {machine.pid}")
        self._ip(self._switch.pid, f"link set port{number} master br0 up")
        self._ip(machine.pid, "link set lo up")
        self._ip(machine.pid, f"addr add {machine.address}/24 dev eth0")
        self._ip(machine.pid, "link set eth0 up")
        self._machines.append(machine)
        for one in self._machines:
            one.set_address_of(name, machine.address)
            machine.set_address_of(one.name, one.address)
        return machine

    def end(self) -> None:
        """Power off all machines."""
        for machine in self._machines:
            machine.power_off()
        self._switch.kill()
        self._switch.wait()

    def _ip(self, pid: int, command: str) -> None:
        subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *command.split()], check=True)


@contextlib.contextmanager
def running_network(folder: Path) -> Iterator[Network]:
    network = Network(folder)
    try:
        yield network
    finally:
        network.end()


def _ignore_special(folder: str, names: list[str]) -> list[str]:
    """Return the entries that are no file, directory or link, or that this user cannot read."""
    paths = {name: Path(folder, name) for name in names}
    return [
        name
        for name, path in paths.items()
        if not path.is_symlink() and not ((path.is_file() or path.is_dir()) and os.access(path, os.R_OK))
    ]
