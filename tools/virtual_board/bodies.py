"""Two implementations of virtual boards: namespaces on this machine's kernel, or an emulated machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tools.virtual_board.plan import Plan, make_mac

_BOOT = Path(__file__).with_name("boot.sh")
_NEW = "--net --mount --uts --ipc --pid --fork --kill-child".split()
_ENTER = "-m -u -i -n -p -T -r -w".split()
# Disk space for the root file system and the file system's tables, in MB.
_SYSTEM_MB = 256
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin", "HOME": "/root"}

#: The main process of a running board.
Live = subprocess.Popen[bytes]


class Body(Protocol):
    """Implementation of a board: boot, access and end the board. The network cable is the device ``port``."""

    def boot(self, bridge: str, cable: str) -> Live:
        """Boot the board, with the cable connected to a bridge. ``cable`` is "up" or "down"."""

    def kill(self, live: Live) -> None:
        """Kill all processes at once, and wait until they have ended."""

    def processes(self, live: Live) -> set[int]:
        """Return the processes that must be stopped to make the board hang."""

    def run(
        self, live: Live, argv: Sequence[str], stdin: str | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the board as root, without the network. The timeout is in seconds.

        Raises:
            OSError: the board is off.
            subprocess.TimeoutExpired: the command timed out.
        """


class Namespaces:
    """A board in separate namespaces on this machine's kernel.

    Args:
        plan: the board's settings.
        root: the root file system.
        folder: the directory for ``boot_id`` and ``console.log``.
    """

    def __init__(self, plan: Plan, root: Path, folder: Path) -> None:
        self._plan = plan
        self._root = root
        self._folder = folder

    def boot(self, bridge: str, cable: str) -> Live:
        """Boot with a new boot_id, and clocks that begin at 0."""
        plan = self._plan
        boot_id = self._folder / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        now = {"boottime": time.CLOCK_BOOTTIME, "monotonic": time.CLOCK_MONOTONIC}
        clocks = [f"--{name}=-{int(time.clock_gettime(clock))}" for name, clock in now.items()]
        words = [plan.name, plan.ip, plan.gateway, make_mac(plan.ip), self._root, boot_id, bridge, cable, plan.cpu]
        with (self._folder / "console.log").open("ab") as console:
            return subprocess.Popen(
                ["unshare", "--time", *clocks, *_NEW, "sh", str(_BOOT), *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )

    def kill(self, live: Live) -> None:
        """Kill the first process. The kernel then kills all other processes, and ``unshare`` waits for them."""
        try:
            os.kill(_find_child(live), signal.SIGKILL)
        except ProcessLookupError:
            live.kill()
        live.wait()

    def processes(self, live: Live) -> set[int]:
        """Return all processes."""
        return set(_iter_inside(_read_namespace(_find_child(live))))

    def run(
        self, live: Live, argv: Sequence[str], stdin: str | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside all namespaces of the board. Wait if it is booting."""
        first = self._wait_for_boot(live, time.monotonic() + timeout)
        environment = {**_ENVIRONMENT, "QEMU_CPU": self._plan.cpu}
        words = ["env", "-i", *(f"{key}={value}" for key, value in environment.items() if value), *argv]
        with subprocess.Popen(
            ["nsenter", "-t", str(first), *_ENTER, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        ) as process:
            try:
                out, err = process.communicate(stdin, timeout)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.kill(_find_child(process), signal.SIGKILL)
                process.kill()
                raise subprocess.TimeoutExpired(list(argv), timeout) from None
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    @staticmethod
    def _wait_for_boot(live: Live, end: float) -> int:
        """Wait until the first process has switched to the board's root, and return it."""
        while Path(f"/proc/{_find_child(live)}/root").samefile("/"):
            if time.monotonic() > end:
                raise TimeoutError("the virtual board did not boot in time")
            time.sleep(0.01)
        return _find_child(live)


class WholeMachine:
    """An emulated board with a separate kernel.

    Args:
        plan: the board's settings.
        root: the root file system, which is copied to the disk.
        folder: the directory for disk and logs. It must be in the working directory, because socket paths must be
            short.
    """

    def __init__(self, plan: Plan, root: Path, folder: Path) -> None:
        from tools.virtual_board import system

        self._image = system.prepare()
        self._machine = system.Machine(
            folder.relative_to(Path.cwd()),
            plan.name,
            f"{plan.ip}/30",
            tap="port",
            gateway=plan.gateway,
            memory_mb=plan.memory_mb,
            cores=1 if plan.icount else 2,
            icount=plan.icount,
        )
        system.make_disk(self._image, self._machine, root, size_mb=plan.disk_mb + _SYSTEM_MB)

    def boot(self, bridge: str, cable: str) -> Live:
        """Start the emulator."""
        from tools.virtual_board import system

        for words in ("tuntap add dev port mode tap", f"link set port master {bridge}", f"link set port {cable}"):
            subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
        return subprocess.Popen(system.start(self._image, self._machine), stdin=subprocess.DEVNULL)

    def kill(self, live: Live) -> None:
        """Kill the emulator, which is the only process."""
        live.kill()
        live.wait()

    def processes(self, live: Live) -> set[int]:
        """Return the emulator's process."""
        return {live.pid}

    def run(
        self, live: Live, argv: Sequence[str], stdin: str | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command over the serial line."""
        from tools.virtual_board.system_serial import run

        return run(self._machine.serial, argv, stdin=stdin or "", timeout=timeout)


def _find_child(process: subprocess.Popen[Any]) -> int:
    """Return the first process of the namespaces that a process created or entered.

    Raises:
        ProcessLookupError: the board is off.
    """
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with suppress(OSError):
        # The child may not exist yet.
        while process.poll() is None:
            for child in children.read_text().split():
                return int(child)
            time.sleep(0.001)
    raise ProcessLookupError("the virtual board is off")


def _iter_inside(namespace: str) -> Iterator[int]:
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and _read_namespace(int(place.name)) == namespace:
            yield int(place.name)


def _read_namespace(process: int) -> str:
    try:
        return str(Path(f"/proc/{process}/ns/pid").readlink())
    except OSError:
        return ""
