"""Workers seen from the agent: started, given orders with a time limit, ended, and their deaths explained."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import threading
from typing import Any

from hil import clock
from hil.agent import framing
from hil.agent.forks import ForkServer
from hil.agent.runtimes import is_light, lacking
from hil.agent.shm import Arena
from hil.errors import HilError, LoadFailed, RunCrashed, RunFailed, StageTimeout
from hil.wire_errors import WORKER_KINDS, from_parts

_KEPT_LINES = 2000
_DETAIL_LINES = 40
_NEWS_S = 10.0


class LogBook:
    """The last lines that workers wrote to stderr, for whoever wants to read along."""

    def __init__(self) -> None:
        self._lines: collections.deque[tuple[int, int, str, str]] = collections.deque(maxlen=_KEPT_LINES)
        self._count = 0
        self._changed = threading.Condition()

    def add(self, program_id: str, text: str) -> None:
        """Keep a line."""
        with self._changed:
            self._count += 1
            self._lines.append((self._count, clock.now_ns(), program_id, text))
            self._changed.notify_all()

    def after(self, number: int, wait_s: float = 0.0) -> list[tuple[int, int, str, str]]:
        """Lines after a line's number: (number, clock_ns, program_id, text); waits for one if there is none."""
        with self._changed:
            if self._count <= number and wait_s:
                self._changed.wait(wait_s)
            return [line for line in self._lines if line[0] > number]


class Worker:
    """One worker process, before and after its program is loaded."""

    def __init__(self, server: ForkServer, logs: LogBook) -> None:
        self.program_id = ""
        self.inputs = Arena()
        self._outputs = Arena()
        ours, theirs = socket.socketpair()
        self._channel = framing.Channel(ours)
        self._stderr, their_stderr = os.pipe()
        self._tail: collections.deque[str] = collections.deque(maxlen=_DETAIL_LINES)
        self._logs = logs
        self._exited = threading.Event()
        self._exit_code: int | None = None
        self.ended_because: HilError | None = None
        try:
            self.pid = server.fork([theirs.fileno(), self.inputs.fd, self._outputs.fd, their_stderr], self._on_exit)
        finally:
            theirs.close()
            os.close(their_stderr)
        self._reader = threading.Thread(target=self._read_stderr, daemon=True, name=f"stderr-{self.pid}")
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        return not self._exited.is_set()

    def output_view(self, size: int) -> memoryview:
        """The first ``size`` bytes that the worker wrote as outputs."""
        return self._outputs.view(size, grow=False)

    def order(self, message: dict[str, Any]) -> None:
        """Send an order without waiting for the answer (see :meth:`answer`)."""
        with contextlib.suppress(framing.Closed):
            self._channel.send(message)

    def answer(self, stage: str, timeout: float | None) -> dict[str, Any]:
        """The answer to the oldest order not yet answered.

        Raises:
            StageTimeout: it took longer than ``timeout`` seconds; the worker was killed.
            RunCrashed: the worker died.
            HilError: what the worker itself reported.
        """
        try:
            reply = self._channel.receive(timeout)
        except framing.Late:
            self.kill()
            raise StageTimeout(
                f"{stage} took longer than its limit of {timeout:g} s and was ended",
                stage=stage,
                detail=self._last_lines(),
                hint="raise the limit with --timeout, or see whether the program hangs",
            ) from None
        except framing.Closed:
            raise self._obituary(stage) from None
        if "error" in reply:
            kind, message, hint, detail = reply["error"]
            failed = LoadFailed if stage == "load" else RunFailed
            raise from_parts(kind, message, hint, detail or self._last_lines(), among=WORKER_KINDS, otherwise=failed)
        result: dict[str, Any] = reply["ok"]
        return result

    def call(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        """Send an order and wait for its answer; raises as :meth:`answer`."""
        self.order(message)
        return self.answer(str(message["op"]).replace("invoke", "run"), timeout)

    def kill(self, because: HilError | None = None) -> None:
        """End the worker and everything it started, now."""
        self.ended_because = self.ended_because or because
        if self._exited.is_set():
            return  # its number may be another process's by now
        # By its own number too: one that was forked just now has no group of its own yet.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the worker and give back what it held."""
        self.kill()
        self._exited.wait(2.0)
        self._reader.join(2.0)
        self._channel.close()
        self.inputs.close()
        self._outputs.close()

    def _on_exit(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._exited.set()

    def _obituary(self, stage: str) -> HilError:
        """Why the worker is gone."""
        # The news of its death comes by way of the fork server, which a busy machine may keep waiting.
        self._exited.wait(_NEWS_S)
        self._reader.join(1.0)
        if self.ended_because:
            return self.ended_because
        code = self._exit_code
        hint = ""
        if code is None:
            how = "hung up without ending"
            self.kill()
        elif code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            how = f"was killed by {name}"
            if -code == signal.SIGKILL:
                hint = "nobody here sent it: the system may have run out of memory"
            elif -code == signal.SIGILL:
                hint = "the program uses instructions this CPU lacks: check the compile target"
        else:
            how = f"ended with exit code {code}"
        return RunCrashed(f"the worker {how} during {stage}", stage=stage, hint=hint, detail=self._last_lines())

    def _last_lines(self) -> str:
        return "\n".join(self._tail)

    def _read_stderr(self) -> None:
        with os.fdopen(self._stderr, "r", errors="replace", buffering=1) as stream:
            for line in stream:
                self._tail.append(line.rstrip("\n"))
                self._logs.add(self.program_id, line.rstrip("\n"))


class Supervisor:
    """Workers by runtime, with one kept ready for each runtime and device that was used last."""

    def __init__(self, runtimes: dict[str, str], options: dict[str, Any]) -> None:
        self._servers = {name: ForkServer(reference, light=is_light(name)) for name, reference in runtimes.items()}
        self._references = runtimes
        self._options = options
        self._spares: dict[tuple[str, str], Worker] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.logs = LogBook()

    def describe(self) -> dict[str, dict[str, Any]]:
        """The version and devices of each runtime that is installed, or its error; starts what has not been started."""
        servers = {name: server for name, server in self._servers.items() if not lacking(name)}
        threads = [threading.Thread(target=server.describe) for server in servers.values() if not server.is_known]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {name: server.described for name, server in servers.items()}

    def take(self, runtime: str, device: str) -> Worker:
        """A worker with this runtime and device prepared: the one that :meth:`refill` made, if it did.

        Raises:
            LoadFailed: there is no such runtime, or it does not work here.
        """
        if runtime not in self._servers:
            raise LoadFailed(f"this board has no runtime {runtime!r}", hint=f"it has {', '.join(self._installed())}")
        if package := lacking(runtime):
            raise LoadFailed(
                f"the runtime {runtime!r} is not installed on this board: it needs the Python package {package}",
                hint=f"it has {', '.join(self._installed())}; `hil board deploy --runtime {runtime}` brings it to one "
                "over SSH, a simulated one has what is installed beside hil",
            )
        with self._lock:
            spare = self._spares.pop((runtime, device), None)
        return spare if spare and spare.alive else self._start(runtime, device)

    def refill(self, runtime: str, device: str) -> None:
        """Make another worker ready in the background."""
        threading.Thread(target=self._refill, args=(runtime, device), daemon=True).start()

    def rest(self) -> None:
        """Give back the memory of what is kept ready; it is made again when it is needed."""
        with self._lock:
            spares, self._spares = self._spares, {}
        for worker in spares.values():
            worker.close()
        for server in self._servers.values():
            server.rest()

    def close(self) -> None:
        """End every worker and fork server."""
        with self._lock:
            self._closed = True
            spares, self._spares = self._spares, {}
        for worker in spares.values():
            worker.close()
        for server in self._servers.values():
            server.stop()

    def _installed(self) -> list[str]:
        return sorted(name for name in self._servers if not lacking(name))

    def _start(self, runtime: str, device: str) -> Worker:
        worker = Worker(self._servers[runtime], self.logs)
        worker.order(
            {"op": "prepare", "runtime": self._references[runtime], "device": device, "options": self._options}
        )
        return worker

    def _refill(self, runtime: str, device: str) -> None:
        try:
            worker = self._start(runtime, device)
        except HilError:
            return
        with self._lock:
            surplus: Worker | None = worker
            if not self._closed:
                surplus = self._spares.get((runtime, device))
                self._spares[runtime, device] = worker
        if surplus:
            surplus.close()
