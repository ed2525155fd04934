"""Workers seen from the agent: started, given orders with a time limit, ended, and their deaths explained."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hil.agent import answers, ipc
from hil.agent.forks import ForkServer
from hil.agent.ipc import Arena
from hil.agent.runtimes import RUNTIME_GROUP, is_described_apart, lacking
from hil.core import clock
from hil.core.guarded import called, name_package, package_of
from hil.core.processes import exit_text, signal_group
from hil.core.runtimes import RUNTIMES
from hil.errors import HilError, LoadFailed, RunCrashed, StageTimeout

_KEPT_LINES = 2000
_KEPT_CHARACTERS = 4 << 20
_LONGEST_LINE = 4096
_CUT = " [cut]"
_DETAIL_LINES = 40
_NEWS_S = 10.0
# An order is read at once by a worker that is what it should be.
_ORDER_S = 30.0
# In which stage an order is carried out.
_STAGES = {"prepare": "load", "load": "load", "invoke": "run", "profile": "profile"}
# Exit code -> what it may mean.
_DEATHS: dict[int | None, str] = {
    -signal.SIGKILL: "nobody here sent it: the system may have run out of memory",
    -signal.SIGILL: "the program uses instructions this CPU lacks: check the compile target",
}
_PIPE = 1 << 16
# After as much as a pipe holds: a program that writes without end does not keep the agent busy.
_BREATH_S = 0.005
# Of more runtimes and devices than these in turn, each load starts its own worker.
_MOST_SPARES = 2


class LogBook:
    """The last lines that a session's workers wrote to stderr, for whoever wants to read along."""

    def __init__(self) -> None:
        self._lines: collections.deque[tuple[int, int, str, str]] = collections.deque()
        self._count = 0
        self._characters = 0
        self._changed = threading.Condition()

    def add(self, program_id: str, *texts: str) -> None:
        """Keep lines, and let the oldest go."""
        with self._changed:
            for text in texts:
                self._count += 1
                if len(self._lines) == _KEPT_LINES:
                    self._let_go()
                self._lines.append((self._count, clock.now_ns(), program_id, text))
                self._characters += len(text)
            while self._characters > _KEPT_CHARACTERS:
                self._let_go()
            self._changed.notify_all()

    def _let_go(self) -> None:
        self._characters -= len(self._lines.popleft()[3])

    def forget(self) -> None:
        """Let all lines go: they are nobody's but the session's that they are of."""
        with self._changed:
            self._lines.clear()
            self._characters = 0

    def after(self, number: int, wait_s: float = 0.0) -> list[tuple[int, int, str, str]]:
        """Lines after a line's number: (number, clock_ns, program_id, text); waits for one if there is none."""
        with self._changed:
            if self._count <= number and wait_s:
                self._changed.wait(wait_s)
            return [line for line in self._lines if line[0] > number]


class Worker:
    """One worker process, before and after its program is loaded.

    Args:
        who: names the runtime in errors where it is a package's: see :func:`hil.core.guarded.called`; "" of hil's own.
    """

    def __init__(self, server: ForkServer, logs: LogBook, who: str = "") -> None:
        self._who = who
        self.program_id = ""
        self.inputs = Arena()
        self._outputs = Arena()
        ours, theirs = socket.socketpair()
        self._channel = ipc.Channel(ours)
        self._stderr, their_stderr = os.pipe()
        self._known = answers.Known()
        self._tail: collections.deque[str] = collections.deque(maxlen=_DETAIL_LINES)
        self._logs = logs
        self._exited = threading.Event()
        self._exit_code: int | None = None
        self.ended_because: HilError | None = None
        try:
            self.pid = server.fork([theirs.fileno(), self.inputs.fd, self._outputs.fd, their_stderr], self._on_exit)
        except BaseException:
            os.close(self._stderr)
            self._give_back()
            raise
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

    def order(self, message: dict[str, Any], timeout: float = _ORDER_S) -> None:
        """Send an order without waiting for the answer (see :meth:`answer`).

        Raises:
            StageTimeout: the worker did not take it within ``timeout`` seconds, and was killed.
        """
        try:
            self._channel.send(message, timeout=timeout)
        except ipc.Late:
            raise self._late(_STAGES[message["op"]], timeout) from None
        except ipc.Closed:
            pass  # the answer says so

    def answer(self, op: str, timeout: float, begun: float, iterations: int = 0) -> answers.Answer:
        """The answer to the oldest order not yet answered.

        Args:
            timeout: most seconds, from ``begun`` by the monotonic clock on, until all of it is there.

        Raises:
            StageTimeout: it took longer than ``timeout`` seconds; the worker was killed.
            RunCrashed: the worker died, or answered what is no answer and was killed.
            HilError: what the worker itself reported.
        """
        stage = _STAGES[op]
        try:
            left = begun + timeout - time.monotonic()
            body = self._channel.receive_bytes(left, answers.most_bytes(iterations))
        except ipc.Late:
            raise self._late(stage, timeout) from None
        except ipc.Closed:
            raise self._exit_error(stage) from None
        except ipc.Garbled as why:
            self.kill()
            raise answers.nonsense(str(why)).located(stage=stage) from None
        try:
            return answers.read(body, op, iterations, self._known)
        except RunCrashed as error:
            self.kill()
            raise error.located(stage=stage) from None
        except HilError as error:
            name_package(error, self._who)
            error.detail = error.detail or self._last_lines()
            raise

    def load(self, order: dict[str, Any], timeout: float, *, meanwhile: Callable[[], None]) -> answers.Signature:
        """Order a load and wait for its answer; raises as :meth:`answer`.

        Args:
            timeout: most seconds for the runtime's getting ready and the load together.
            meanwhile: called when the runtime is ready and the load has begun.
        """
        begun = time.monotonic()
        self.order({"op": "load", **order}, timeout)
        self.answer("prepare", timeout, begun)
        meanwhile()
        found = self.answer("load", timeout, begun)
        assert isinstance(found, answers.Signature)
        return found

    def run(self, order: dict[str, Any], timeout: float, *, meanwhile: Callable[[], None]) -> answers.Ran:
        """Order a run or a profiling pass and wait for its answer; raises as :meth:`answer`.

        Args:
            meanwhile: called once the order is given, or could not be.
        """
        begun = time.monotonic()
        try:
            self.order(order, timeout)
        finally:
            meanwhile()
        found = self.answer(order["op"], timeout, begun, order["iterations"])
        assert isinstance(found, answers.Ran)
        return found

    def kill(self, because: HilError | None = None) -> None:
        """End the worker and everything it started, now."""
        self.ended_because = self.ended_because or because
        if self._exited.is_set():
            return  # its number may be another process's by now
        # By its own number too: one that was forked just now has no group of its own yet.
        signal_group(self.pid)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the worker and give back what it held."""
        self.kill()
        self._exited.wait(2.0)
        self._reader.join(2.0)
        self._give_back()

    def _give_back(self) -> None:
        self._channel.close()
        self.inputs.close()
        self._outputs.close()

    def _on_exit(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._exited.set()

    def _late(self, stage: str, timeout: float) -> StageTimeout:
        self.kill()
        return StageTimeout(
            f"{stage} took longer than its limit of {timeout:g} s and was ended",
            stage=stage,
            detail=self._last_lines(),
            hint="raise the limit with --timeout, or see whether the program hangs",
        )

    def _exit_error(self, stage: str) -> HilError:
        """Why the worker is gone."""
        # The news of its death comes by way of the fork server, which a busy machine may keep waiting.
        self._exited.wait(_NEWS_S)
        self._reader.join(1.0)
        if self.ended_because:
            return self.ended_because
        code = self._exit_code
        if code is None:
            self.kill()
        how = "hung up without ending" if code is None else exit_text(code)
        hint = _DEATHS.get(code, "")
        error = RunCrashed(f"the worker {how} during {stage}", stage=stage, hint=hint, detail=self._last_lines())
        name_package(error, self._who)
        return error

    def _last_lines(self) -> str:
        return "\n".join(self._tail)

    def _read_stderr(self) -> None:
        """Keep what it writes: as many lines as there is room for, and of each its beginning."""
        rest = b""
        try:
            while piece := os.read(self._stderr, _PIPE):
                # More lines than are kept are not even looked at.
                *lines, rest = (rest + piece).rsplit(b"\n", _KEPT_LINES)
                self._keep(lines[-_KEPT_LINES:])
                if len(rest) > _LONGEST_LINE:
                    rest = rest[: _LONGEST_LINE + 1]
                if len(piece) == _PIPE:
                    time.sleep(_BREATH_S)
            if rest:
                self._keep([rest])
        finally:
            os.close(self._stderr)

    def _keep(self, lines: list[bytes]) -> None:
        texts = [
            line[:_LONGEST_LINE].decode(errors="replace") + (_CUT if len(line) > _LONGEST_LINE else "")
            for line in lines
        ]
        self._tail.extend(texts)
        self._logs.add(self.program_id, *texts)


@dataclass(eq=False)
class _Spare:
    """A worker kept ready; None while it is being made."""

    worker: Worker | None = None


class Supervisor:
    """Workers by runtime, with one kept ready for each runtime and device that a session used last.

    Between sessions one stands by that has opened no device.

    Args:
        memory_limit: most bytes that a program may take; 0 is the machine's memory.
    """

    def __init__(self, runtimes: dict[str, str], options: dict[str, Any], memory_limit: int = 0) -> None:
        self._servers = {
            name: ForkServer(reference, light=name in RUNTIMES and RUNTIMES[name].light, memory_limit=memory_limit)
            for name, reference in runtimes.items()
        }
        self._references = runtimes
        self._options = options
        # By runtime and device, None for one that has opened none; the one that was asked for last is the last.
        self._spares: dict[tuple[str, str | None], _Spare] = {}
        self._lock = threading.Lock()
        self._retired = False
        self.logs = LogBook()

    def fork_ahead(self) -> None:
        """Fork what describing the runtimes would start, from this process, which must have one thread."""
        for name, server in self._servers.items():
            if is_described_apart(name):
                server.fork_ahead()

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
        """A worker with this runtime prepared: one that :meth:`refill` or :meth:`stand_by` made, if they did.

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
            for key in ((runtime, device), (runtime, None)):
                spare = self._spares.get(key)
                if spare is not None and spare.worker is not None:
                    del self._spares[key]
                    if spare.worker.alive:
                        return spare.worker
                    spare.worker.close()
        return self._start(runtime, device)

    def has(self, runtime: str, device: str) -> bool:
        """Whether a runtime lists a device; its default one it always has."""
        return not device or device in self._servers[runtime].described.get("devices", ())

    def stand_by(self, runtime: str) -> None:
        """Make a worker ready in the background for whoever has the board next. The devices stay free until then."""
        self.refill(runtime, None)

    def refill(self, runtime: str, device: str | None) -> None:
        """Make another worker ready in the background, unless there is one.

        Only for a device that there is (or for none): anybody may ask for any other.
        """
        with self._lock:
            if self._retired:
                return
            known = self._spares.pop((runtime, device), None)
            if known is not None and (known.worker is None or known.worker.alive):
                self._spares[runtime, device] = known
                return
            surplus = [self._spares.pop(key) for key in list(self._spares)[: len(self._spares) + 1 - _MOST_SPARES]]
            spare = self._spares[runtime, device] = _Spare()
        surplus += [known] if known is not None else []
        try:
            threading.Thread(target=self._refill, args=(runtime, device, spare, surplus), daemon=True).start()
        except RuntimeError:  # no room for another thread
            with self._lock:
                self._spares.pop((runtime, device), None)

    def end_spares(self) -> None:
        """End what is kept ready: the session that it was for is over."""
        with self._lock:
            spares, self._spares = self._spares, {}
        _close(spares.values())

    def rest(self) -> None:
        """Give back the memory of what is kept ready; it is made again when it is needed."""
        self.end_spares()
        for server in self._servers.values():
            server.rest()

    def retire(self) -> None:
        """Make no worker ready any more."""
        with self._lock:
            self._retired = True

    def close(self) -> None:
        """End every worker and fork server, for good."""
        self.retire()
        self.end_spares()
        for server in self._servers.values():
            server.close()

    def _installed(self) -> list[str]:
        return sorted(name for name in self._servers if not lacking(name))

    def _start(self, runtime: str, device: str | None) -> Worker:
        who = called("runtime", RUNTIME_GROUP, runtime) if package_of(RUNTIME_GROUP, runtime) else ""
        try:
            worker = Worker(self._servers[runtime], self.logs, who)
        except LoadFailed as error:
            name_package(error, who)
            raise
        worker.order(
            {"op": "prepare", "runtime": self._references[runtime], "device": device, "options": self._options}
        )
        return worker

    def _refill(self, runtime: str, device: str | None, spare: _Spare, surplus: list[_Spare]) -> None:
        _close(surplus)
        made = None
        # It may be given up at any time: its session has ended, or others were asked for.
        if self._spares.get((runtime, device)) is spare:
            with contextlib.suppress(HilError, OSError, RuntimeError):
                made = self._start(runtime, device)
        with self._lock:
            if self._spares.get((runtime, device)) is spare:
                spare.worker, made = made, None
                if spare.worker is None:
                    del self._spares[runtime, device]
        if made is not None:
            made.close()


def _close(spares: Iterable[_Spare]) -> None:
    workers = [spare.worker for spare in spares if spare.worker is not None]
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.close()
