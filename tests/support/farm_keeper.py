"""Processes that restart when they die, and a connection that can be interrupted, for chaos tests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.sshd import LOOPBACK, descendants, free_port, started_with

MARK = "HIL_CHAOS"
_LOOK_S = 0.1


@dataclass
class SupervisedProcess:
    """Process that restarts when it ends."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    stopped: bool = False
    again_at: float = 0.0

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                list(self.command),
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid


class Keeper:
    """Keep processes running. A context manager, which kills all of them at the end.

    Args:
        mark: a text in the environment of all processes and of their children: see :meth:`get_marked`.
        folder: directory of their logs.
    """

    def __init__(self, mark: str, folder: Path) -> None:
        self.mark = mark
        self.kept: dict[str, SupervisedProcess] = {}
        self._folder = folder
        self._lock = threading.RLock()
        self._looks: list[Callable[[], None]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="keeper")
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        for kept in self.kept.values():
            if kept.process and kept.process.poll() is None:
                for pid in [*descendants(kept.pid), kept.pid]:
                    signalled(pid, signal.SIGKILL)
                kept.process.wait()
        for pid in self.get_marked():
            signalled(pid, signal.SIGKILL)

    def keep(self, name: str, command: Sequence[str], **environment: str) -> None:
        """Start a process. Restart it whenever it ends."""
        with self._lock:
            given = {**os.environ, MARK: self.mark, **environment}
            self.kept[name] = SupervisedProcess(name, command, given, self._folder / f"{name}.log")
            self.kept[name].start()

    def look(self, after: Callable[[], None]) -> None:
        """Call this function in every check, too."""
        self._looks.append(after)

    def stop_looking(self) -> None:
        """Remove all functions of :meth:`look`. A function that runs now has ended when this method returns."""
        with self._lock:
            self._looks.clear()

    def kill(self, name: str) -> None:
        """Send SIGKILL to the process only, not to its children."""
        signalled(self.kept[name].pid, signal.SIGKILL)

    def end(self, name: str) -> None:
        """Send SIGKILL to the process and its descendants. It does not restart before :meth:`begin`."""
        with self._lock:
            self.kept[name].stopped = True
            for pid in [self.kept[name].pid, *descendants(self.kept[name].pid)]:
                signalled(pid, signal.SIGKILL)

    def begin(self, name: str) -> None:
        """Allow an ended process to restart."""
        self.kept[name].stopped = False

    def freeze(self, name: str) -> Callable[[], None]:
        """Send SIGSTOP to the process and its descendants. Return a function that resumes those that still exist."""
        frozen = [self.kept[name].pid, *descendants(self.kept[name].pid)]
        for pid in frozen:
            signalled(pid, signal.SIGSTOP)

        def thaw() -> None:
            for pid in frozen:
                signalled(pid, signal.SIGCONT)

        return thaw

    def children(self, name: str) -> list[int]:
        """Return the children of a process."""
        path = Path(f"/proc/{self.kept[name].pid}/task/{self.kept[name].pid}/children")
        try:
            return [int(pid) for pid in path.read_text().split()]
        except OSError:
            return []

    def stop(self, name: str, wait_s: float = 60.0) -> bool:
        """Stop a process with SIGTERM, without a restart. Return whether it ended in time."""
        with self._lock:
            kept = self.kept[name]
            kept.stopped = True
        signalled(kept.pid, signal.SIGTERM)
        assert kept.process
        try:
            kept.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def get_marked(self) -> dict[int, str]:
        """Return all processes with our mark in their environment, and their command lines."""
        found = {pid: command_line(pid) for pid in started_with(f"{MARK}={self.mark}") if pid != os.getpid()}
        return {pid: line for pid, line in found.items() if line}

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            with self._lock:
                for kept in self.kept.values():
                    if kept.stopped or kept.process is None or kept.process.poll() is None:
                        kept.again_at = 0.0
                    elif not kept.again_at:
                        kept.again_at = time.monotonic() + 0.3
                    elif time.monotonic() >= kept.again_at:
                        kept.start()
                for look in self._looks:
                    look()


def signalled(pid: int, what: signal.Signals) -> bool:
    """Send a signal. Return whether the process exists."""
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return False
    return True


def command_line(pid: int) -> str:
    """Return the command line of a process, or "" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@dataclass
class Relay:
    """Relay TCP to a port of this machine. During a cut, no data passes, and both ends notice nothing."""

    to: int
    port: int = 0
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _transports: weakref.WeakSet[asyncio.WriteTransport] = field(default_factory=weakref.WeakSet)  # until closed

    def __post_init__(self) -> None:
        self._passing = asyncio.Event()
        self._passing.set()
        begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(begun,), daemon=True, name="relay")
        self._thread.start()
        begun.wait()

    def cut(self) -> None:
        """Hold all data."""
        self._loop.call_soon_threadsafe(self._passing.clear)

    def restore(self) -> None:
        """Let data pass again, first the held data."""
        self._loop.call_soon_threadsafe(self._passing.set)

    def drop(self) -> None:
        """Break all connections."""
        self._loop.call_soon_threadsafe(self._abort)

    def close(self) -> None:
        """Stop the relay."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _abort(self) -> None:
        for transport in list(self._transports):
            transport.abort()

    def _run(self, begun: threading.Event) -> None:
        async def listen() -> asyncio.Server:
            server = await asyncio.start_server(self._carry, LOOPBACK, 0)
            self.port = server.sockets[0].getsockname()[1]
            return server

        server = self._loop.run_until_complete(listen())
        begun.set()
        self._loop.run_forever()
        server.close()
        self._passing.set()
        self._abort()
        self._loop.run_until_complete(_ended(asyncio.all_tasks(self._loop)))
        self._abort()  # connections made after the first call
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transports.add(writer.transport)
        await self._passing.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self.to)
        except OSError:
            writer.close()
            return
        self._transports.add(far_writer.transport)
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            writer.close()
            far_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()


async def _ended(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=5)


def free_ports(count: int) -> list[int]:
    """Return different ports that no process listens on."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)
