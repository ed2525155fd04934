"""What a virtual board is made of: namespaces on this machine's kernel, or a whole machine with its own kernel."""

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

from tools.virtual_board.plan import Plan, card

_BOOT = Path(__file__).with_name("boot.sh")
_NEW = "--net --mount --uts --ipc --pid --fork --kill-child".split()
_ENTER = "-m -u -i -n -p -T -r -w".split()
# What the root file system and the file system's own tables take of a machine's disk.
_SYSTEM_MB = 256
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin", "HOME": "/root"}

#: A board with its power on: the process that it lives and dies with.
Live = subprocess.Popen[bytes]


class Body(Protocol):
    """A board's body: how it is switched on, looked into and ended. Its network cable is a device called ``port``."""

    def boot(self, bridge: str, cable: str) -> Live:
        """Switch it on, with its cable on that bridge, "up" or "down"."""

    def kill(self, live: Live) -> None:
        """End all of it at once, and wait for that."""

    def processes(self, live: Live) -> set[int]:
        """The processes to stop for it to hang."""

    def run(
        self, live: Live, argv: Sequence[str], stdin: str | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on it as root, not through its network; timeout in seconds.

        Raises:
            OSError: it is off.
            subprocess.TimeoutExpired: the command took longer.
        """


class Namespaces:
    """A board in namespaces of its own, on this machine's kernel.

    Args:
        plan: what it is to be.
        root: its root file system.
        folder: where its ``boot_id`` and ``console.log`` go.
    """

    def __init__(self, plan: Plan, root: Path, folder: Path) -> None:
        self._plan = plan
        self._root = root
        self._folder = folder

    def boot(self, bridge: str, cable: str) -> Live:
        """Another boot_id, and clocks that begin again."""
        plan = self._plan
        boot_id = self._folder / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        now = {"boottime": time.CLOCK_BOOTTIME, "monotonic": time.CLOCK_MONOTONIC}
        clocks = [f"--{name}=-{int(time.clock_gettime(clock))}" for name, clock in now.items()]
        words = [plan.name, plan.ip, plan.gateway, card(plan.ip), self._root, boot_id, bridge, cable, plan.cpu]
        with (self._folder / "console.log").open("ab") as console:
            return subprocess.Popen(
                ["unshare", "--time", *clocks, *_NEW, "sh", str(_BOOT), *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )

    def kill(self, live: Live) -> None:
        """With its first process the kernel ends all the others; ``unshare`` waits for them."""
        try:
            os.kill(_child(live), signal.SIGKILL)
        except ProcessLookupError:
            live.kill()
        live.wait()

    def processes(self, live: Live) -> set[int]:
        """All that there are."""
        return set(_inside(_namespace(_child(live))))

    def run(
        self, live: Live, argv: Sequence[str], stdin: str | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Inside all its namespaces; while it boots, this waits for it."""
        first = self._booted(live, time.monotonic() + timeout)
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
                    os.kill(_child(process), signal.SIGKILL)
                process.kill()
                raise subprocess.TimeoutExpired(list(argv), timeout) from None
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    @staticmethod
    def _booted(live: Live, end: float) -> int:
        """Its first process, once that sees the board's files and no longer this machine's."""
        while Path(f"/proc/{_child(live)}/root").samefile("/"):
            if time.monotonic() > end:
                raise TimeoutError("the virtual board does not boot")
            time.sleep(0.01)
        return _child(live)


class WholeMachine:
    """A board with a kernel of its own.

    Args:
        plan: what it is to be.
        root: its root file system, which is copied to its disk.
        folder: where its disk and messages go; the working folder, for a socket's name has to be short.
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
        )
        system.make_disk(self._image, self._machine, root, size_mb=plan.disk_mb + _SYSTEM_MB)

    def boot(self, bridge: str, cable: str) -> Live:
        """Start the emulator."""
        from tools.virtual_board import system

        for words in ("tuntap add dev port mode tap", f"link set port master {bridge}", f"link set port {cable}"):
            subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
        return subprocess.Popen(system.start(self._image, self._machine), stdin=subprocess.DEVNULL)

    def kill(self, live: Live) -> None:
        """The emulator is all there is."""
        live.kill()
        live.wait()

    def processes(self, live: Live) -> set[int]:
        """The emulator."""
        return {live.pid}

    def run(
        self, live: Live, argv: Sequence[str], stdin: str | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Over its serial line."""
        from tools.virtual_board.system_serial import run

        return run(self._machine.serial, argv, stdin=stdin or "", timeout=timeout)


def _child(process: subprocess.Popen[Any]) -> int:
    """The first process of the namespaces that a process began or entered.

    Raises:
        ProcessLookupError: there is none, for the board is off.
    """
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    with suppress(OSError):
        # It may not have come to that yet.
        while process.poll() is None:
            for child in children.read_text().split():
                return int(child)
            time.sleep(0.001)
    raise ProcessLookupError("the virtual board is off")


def _inside(namespace: str) -> Iterator[int]:
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and _namespace(int(place.name)) == namespace:
            yield int(place.name)


def _namespace(process: int) -> str:
    try:
        return str(Path(f"/proc/{process}/ns/pid").readlink())
    except OSError:
        return ""
