"""Start, control and stop the agent's workers, and explain their crashes."""

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

from hil.agent import answers, ipc, machine
from hil.agent.forks import ForkServer
from hil.agent.ipc import Arena
from hil.agent.progress import describe_progress
from hil.agent.runtimes import is_described_apart, lacking
from hil.core import clock
from hil.core.guarded import find_package, format_plugin, name_package
from hil.core.memory_faults import make_memory_error
from hil.core.processes import ExitStatus, exit_text, signal_group
from hil.core.runtimes import RUNTIME_GROUP, list_known_runtimes
from hil.errors import BoardUnfit, ErrorCode, HilError, LoadFailed, RunCrashed, RunFailed, StageTimeout, did_you_mean
from hil.formats.ort_devices import find_provider, suggest_device
from hil.protocol.wire_errors import WORKER_KINDS

_KEPT_LINES = 2000
_KEPT_CHARACTERS = 4 << 20
_MAX_LINE_LENGTH = 4096
_CUT = " [cut]"
_DETAIL_LINES = 40
_NEWS_SECONDS = 10.0
# Time limit for sending an order. A worker that is not stuck reads orders immediately.
_ORDER_SECONDS = 30.0
# Order -> stage.
_STAGES = {"prepare": "load", "open": "load", "load": "load", "invoke": "run", "generate": "run", "profile": "profile"}
# Exit code -> possible cause.
_DEATHS: dict[int | None, str] = {
    -signal.SIGKILL: "hil did not send the signal: check `dmesg` on the board",
    -signal.SIGILL: "the program uses instructions that this CPU lacks: check the compile target",
}
_PIPE = 1 << 16
# Pause after reading each full pipe buffer: a program that writes endlessly must not keep the agent busy.
_READ_PAUSE_SECONDS = 0.005
# Maximum number of spare workers.
_MAX_SPARES = 2


def explain_step(stepped: answers.ClockStepped, since_ns: tuple[int, int]) -> HilError:
    """Return the error for worker timestamps that run backwards.

    If the board's clock lost a similar time against the wall clock, the board is at fault (BoardUnfit). Otherwise, the
    program forged the timestamps (RunCrashed).

    Args:
        stepped: error with the size of the step.
        since_ns: the board's clock and the wall clock before the step, in nanoseconds.
    """
    clock_ns, wall_ns = since_ns
    behind_ns = (time.time_ns() - wall_ns) - (clock.get_time_ns() - clock_ns)
    if 2 * behind_ns < stepped.ns:
        return RunCrashed(stepped.message, hint=stepped.hint)
    return BoardUnfit(
        f"the board's monotonic clock stepped back by at least {stepped.ns / 1e9:.3g} s",
        hint="times from this board are wrong: check `dmesg` on the board, and select a different clock in "
        "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    )


def _open_error(error: HilError, device: str) -> BoardUnfit:
    """Return the error for a worker that failed to open the device, before reading the program."""
    return BoardUnfit(
        f"the board cannot open {f'device {device!r}' if device else 'the default device'}: {error.message}",
        stage=error.stage,
        hint=error.hint or "check that the device is present and the driver is loaded; reset a hung device",
        detail=error.detail,
    )


class LogBook:
    """Recent stderr lines of a session's workers."""

    def __init__(self) -> None:
        self._lines: collections.deque[tuple[int, int, str, str]] = collections.deque()
        self._count = 0
        self._characters = 0
        self._changed = threading.Condition()

    def add(self, program_id: str, *texts: str) -> None:
        """Add lines and drop the oldest lines above the limits."""
        with self._changed:
            for text in texts:
                self._count += 1
                if len(self._lines) == _KEPT_LINES:
                    self._drop_oldest()
                self._lines.append((self._count, clock.get_time_ns(), program_id, text))
                self._characters += len(text)
            while self._characters > _KEPT_CHARACTERS:
                self._drop_oldest()
            self._changed.notify_all()

    def _drop_oldest(self) -> None:
        self._characters -= len(self._lines.popleft()[3])

    def forget(self) -> None:
        """Delete all lines, because they belong to the ended session."""
        with self._changed:
            self._lines.clear()
            self._characters = 0

    def wait_for_lines(self, number: int, wait_s: float = 0.0) -> list[tuple[int, int, str, str]]:
        """Return the lines after a number as (number, clock_ns, program_id, text).

        Wait up to ``wait_s`` for a new line.
        """
        with self._changed:
            if self._count <= number and wait_s:
                self._changed.wait(wait_s)
            return [line for line in self._lines if line[0] > number]


class WorkerProcess:
    """Worker process, before and after loading a program.

    Args:
        server: fork server of the runtime.
        logs: receives the worker's stderr lines.
        who: name of a plugin's runtime for error messages (see :func:`hil.core.guarded.format_plugin`); "" for hil's
            runtimes.
        kinds: error classes that the worker may report.
    """

    def __init__(
        self,
        server: ForkServer,
        logs: LogBook,
        who: str = "",
        kinds: frozenset[type[HilError]] = WORKER_KINDS,
    ) -> None:
        self._who = who
        self._kinds = kinds
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
        self._ended: ExitStatus | None = None
        self._oom_kills = machine.count_oom_kills()
        # The board's clock and the wall clock at the last order, in nanoseconds.
        self._ordered_ns = (0, 0)
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
        """Whether the process is running."""
        return not self._exited.is_set()

    def view_outputs(self, size: int) -> memoryview:
        """Return the first ``size`` bytes of the output arena."""
        return self._outputs.view(size, grow=False)

    def order(self, message: dict[str, Any], timeout: float = _ORDER_SECONDS) -> None:
        """Send an order without waiting for the response (see :meth:`receive_answer`).

        Raises:
            StageTimeout: the worker did not accept the order within ``timeout`` seconds and was killed.
        """
        try:
            self._channel.send(message, timeout=timeout)
        except ipc.Late:
            raise self._make_timeout_error(_STAGES[message["op"]], timeout) from None
        except ipc.Closed:
            pass  # receiving the response reports the error

    def receive_answer(self, op: str, timeout: float, begun: float, iterations: int = 0) -> answers.Answer:
        """Wait for the response to the oldest pending order.

        Args:
            op: the order's operation.
            timeout: seconds from ``begun`` until the whole response must have arrived.
            begun: start time (monotonic clock, seconds).
            iterations: number of iterations in the order.

        Raises:
            StageTimeout: the timeout expired; the worker was killed.
            RunCrashed: the worker died, or sent an invalid response and was killed.
            BoardUnfit: other processes used up the board's memory, or the clock stepped back.
            HilError: the worker reported this error.
        """
        stage = _STAGES[op]
        try:
            left = begun + timeout - time.monotonic()
            body = self._channel.receive_bytes(left, answers.max_response_bytes(iterations))
        except ipc.Late:
            raise self._make_timeout_error(stage, timeout) from None
        except ipc.Closed:
            raise self._exit_error(stage) from None
        except ipc.Garbled as why:
            self.kill()
            raise answers.make_response_error(str(why)).locate(stage=stage) from None
        try:
            return answers.read(body, op, iterations, self._known, self._kinds)
        except answers.ClockStepped as stepped:
            self.kill()
            raise explain_step(stepped, self._ordered_ns).locate(stage=stage) from None
        except RunCrashed as error:
            self.kill()
            raise error.locate(stage=stage) from None
        except HilError as error:
            name_package(error, self._who)
            error.detail = error.detail or self._get_last_lines()
            raise

    def load(self, order: dict[str, Any], timeout: float, *, meanwhile: Callable[[], None]) -> answers.ProgramSignature:
        """Load a program and wait for the response. Raises the errors of :meth:`receive_answer`.

        Args:
            order: fields of the load order.
            timeout: seconds for preparing the runtime and loading together.
            meanwhile: called when the runtime is ready and the load has started.

        Raises:
            BoardUnfit: preparing the runtime or opening the device failed.
        """
        begun = time.monotonic()
        self._note_clocks()
        self.order({"op": "open", "device": order["device"]}, timeout)
        self.order({"op": "load", **order}, timeout)
        try:
            self.receive_answer("prepare", timeout, begun)
            self.receive_answer("open", timeout, begun)
        except (LoadFailed, RunCrashed) as error:
            # No code of the program has run yet.
            raise _open_error(error, order["device"]) from error
        meanwhile()
        found = self.receive_answer("load", timeout, begun)
        assert isinstance(found, answers.ProgramSignature)
        return found

    def run(self, order: dict[str, Any], timeout: float, *, meanwhile: Callable[[], None]) -> answers.Ran:
        """Run or profile a program and wait for the response. Raises the errors of :meth:`receive_answer`.

        Args:
            order: the complete order.
            timeout: seconds until the whole response must have arrived.
            meanwhile: called after the order was sent, or failed to be sent.
        """
        begun = time.monotonic()
        self._note_clocks()
        try:
            self.order(order, timeout)
        finally:
            meanwhile()
        try:
            found = self.receive_answer(order["op"], timeout, begun, order["iterations"])
        except (RunCrashed, RunFailed, StageTimeout) as error:
            if order["op"] == "generate" and (where := describe_progress(self._outputs)):
                error.add(where)
            raise
        assert isinstance(found, answers.Ran)
        return found

    def kill(self, because: HilError | None = None) -> None:
        """Kill the worker and all its descendants."""
        self.ended_because = self.ended_because or because
        if self._exited.is_set():
            return  # the process id may have been reused
        # Also kill the process id: a worker that was just forked does not have a group yet.
        signal_group(self.pid)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the worker and release the resources."""
        self.kill()
        self._exited.wait(2.0)
        self._reader.join(2.0)
        self._give_back()

    def _give_back(self) -> None:
        self._channel.close()
        self.inputs.close()
        self._outputs.close()

    def _on_exit(self, ended: ExitStatus) -> None:
        self._ended = ended
        self._exited.set()

    def _note_clocks(self) -> None:
        self._ordered_ns = clock.get_time_ns(), time.time_ns()

    def _make_timeout_error(self, stage: str, timeout: float) -> StageTimeout:
        self.kill()
        return StageTimeout(
            f"{stage} exceeded the limit of {timeout:g} s and was stopped",
            stage=stage,
            detail=self._get_last_lines(),
            hint="raise the limit with --timeout, or check the program for a hang",
        )

    def _exit_error(self, stage: str) -> HilError:
        """Return the error for a dead worker."""
        if self.ended_because:
            # The session has ended. Do not wait for details, because the next session waits for this call.
            return self.ended_because
        # The fork server reports the death, which may be delayed on a busy machine.
        self._exited.wait(_NEWS_SECONDS)
        self._reader.join(1.0)
        code = self._ended.code if self._ended is not None else None
        if code is None:
            self.kill()
        if self._ended is not None and code == -signal.SIGKILL and machine.count_oom_kills() > self._oom_kills:
            error = make_memory_error(self._ended.peak_bytes, machine.get_memory_limit())
            error.detail = self._get_last_lines()
            return error.locate(stage=stage)
        how = "closed the connection without exiting" if code is None else exit_text(code)
        hint = _DEATHS.get(code, "")
        cause = ErrorCode.ILLEGAL_INSTRUCTION if code == -signal.SIGILL else ErrorCode.NONE
        message = f"the worker {how} during {stage}"
        error = RunCrashed(message, stage=stage, hint=hint, detail=self._get_last_lines(), code=cause)
        name_package(error, self._who)
        return error

    def _get_last_lines(self) -> str:
        return "\n".join(self._tail)

    def _read_stderr(self) -> None:
        """Store the worker's output within the line limits. Long lines are truncated."""
        rest = b""
        try:
            while piece := os.read(self._stderr, _PIPE):
                # Skip lines above the limit without decoding them.
                *lines, rest = (rest + piece).rsplit(b"\n", _KEPT_LINES)
                self._keep(lines[-_KEPT_LINES:])
                if len(rest) > _MAX_LINE_LENGTH:
                    rest = rest[: _MAX_LINE_LENGTH + 1]
                if len(piece) == _PIPE:
                    time.sleep(_READ_PAUSE_SECONDS)
            if rest:
                self._keep([rest])
        finally:
            os.close(self._stderr)

    def _keep(self, lines: list[bytes]) -> None:
        texts = [
            line[:_MAX_LINE_LENGTH].decode(errors="replace") + (_CUT if len(line) > _MAX_LINE_LENGTH else "")
            for line in lines
        ]
        self._tail.extend(texts)
        self._logs.add(self.program_id, *texts)


@dataclass(eq=False)
class _Spare:
    """Spare worker; None while it is starting."""

    worker: WorkerProcess | None = None


class Supervisor:
    """Source of workers, with a spare worker for every runtime and device that the session used last.

    Between sessions, one spare worker without an open device is ready.

    Args:
        runtimes: runtime name -> ``module:Class``.
        options: passed to each runtime.
        memory_limit: maximum memory of a program in bytes; 0 means the machine's memory.
        kinds: error classes that workers may report.
    """

    def __init__(
        self,
        runtimes: dict[str, str],
        options: dict[str, Any],
        memory_limit: int = 0,
        kinds: frozenset[type[HilError]] = WORKER_KINDS,
    ) -> None:
        known = list_known_runtimes()
        self._servers = {
            name: ForkServer(reference, light=name in known and known[name].light, memory_limit=memory_limit)
            for name, reference in runtimes.items()
        }
        self._references = runtimes
        self._options = options
        self._kinds = kinds
        # (runtime, device) -> spare worker, in the order of the last request. Device None: the worker has not opened a
        # device.
        self._spares: dict[tuple[str, str | None], _Spare] = {}
        self._lock = threading.Lock()
        self._retired = False
        self.logs = LogBook()

    def fork_ahead(self) -> None:
        """Start the fork servers for describing the runtimes. This process must be single-threaded."""
        for name, server in self._servers.items():
            if is_described_apart(name):
                server.fork_ahead()

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the version and devices, or the error, of each installed runtime. Starts missing fork servers."""
        servers = {name: server for name, server in self._servers.items() if not lacking(name)}
        threads = [threading.Thread(target=server.describe) for server in servers.values() if not server.is_known]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {name: server.described for name, server in servers.items()}

    def take(self, runtime: str, device: str, *, instructions: bool = False) -> WorkerProcess:
        """Return a worker with this runtime: a spare worker if available, else a new worker.

        Args:
            instructions: return a new worker that counts instructions. A spare worker does not count.

        Raises:
            LoadFailed: the runtime is unknown or not installed.
            BoardUnfit: the runtime does not work on this board.
        """
        if runtime not in self._servers:
            raise LoadFailed(
                f"runtime {runtime!r} not found on this board",
                hint=f"{did_you_mean(runtime, self._servers)}available runtimes: {', '.join(self._list_installed())}; "
                "install a package's runtime over SSH with `hil board deploy ADDRESS --package DIR`",
            )
        if package := lacking(runtime):
            raise LoadFailed(
                f"the runtime {runtime!r} is not installed on this board: it needs the Python package {package}",
                hint=f"installed runtimes: {', '.join(self._list_installed())}; install {runtime} over SSH with "
                f"`hil board deploy --runtime {runtime}`; a simulated board uses the packages of hil's environment",
            )
        if instructions:
            return self._start(runtime, device, instructions=True)
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
        """Return True if a runtime lists a device. The default device is always available."""
        return not device or device in self._servers[runtime].described.get("devices", ())

    def check_device(self, runtime: str, device: str) -> BoardUnfit | None:
        """Return the error for a missing device, or None if the runtime may have the device."""
        devices = self._servers[runtime].describe().get("devices")
        # A driver lists only the driver name, but opens DRIVER://DEVICE. A provider also has a short name.
        if not device or not devices or {device, device.split("://")[0]} & set(devices):
            return None
        if find_provider(device, devices):
            return None
        return BoardUnfit(
            f"the runtime {runtime!r} cannot find device {device!r} on this board",
            hint=f"{suggest_device(device, devices)}devices found: {', '.join(devices)}; check that the "
            "device's driver is loaded, or use a different device in the board's config",
        )

    def prepare_spare(self, runtime: str) -> None:
        """Prepare a worker in the background for the next session. The device stays closed until then."""
        self.refill(runtime, None)

    def refill(self, runtime: str, device: str | None) -> None:
        """Prepare a spare worker in the background, unless one exists.

        Call this only for a device that exists, or None: clients may request arbitrary device names.
        """
        with self._lock:
            if self._retired:
                return
            known = self._spares.pop((runtime, device), None)
            if known is not None and (known.worker is None or known.worker.alive):
                self._spares[runtime, device] = known
                return
            surplus = [self._spares.pop(key) for key in list(self._spares)[: len(self._spares) + 1 - _MAX_SPARES]]
            spare = self._spares[runtime, device] = _Spare()
        surplus += [known] if known is not None else []
        try:
            threading.Thread(target=self._refill, args=(runtime, device, spare, surplus), daemon=True).start()
        except RuntimeError:  # the system cannot start a thread
            with self._lock:
                self._spares.pop((runtime, device), None)

    def end_spares(self) -> None:
        """Stop all spare workers at the end of their session."""
        with self._lock:
            spares, self._spares = self._spares, {}
        _close(spares.values())

    def stop_spares(self) -> None:
        """Stop spare workers and fork servers to free memory. The next session starts workers and servers on demand."""
        self.end_spares()
        for server in self._servers.values():
            server.pause()

    def retire(self) -> None:
        """Stop preparing spare workers."""
        with self._lock:
            self._retired = True

    def close(self) -> None:
        """Stop all workers and fork servers permanently."""
        self.retire()
        self.end_spares()
        for server in self._servers.values():
            server.close()

    def _list_installed(self) -> list[str]:
        return sorted(name for name in self._servers if not lacking(name))

    def _start(self, runtime: str, device: str | None, *, instructions: bool = False) -> WorkerProcess:
        who = format_plugin("runtime", RUNTIME_GROUP, runtime) if find_package(RUNTIME_GROUP, runtime) else ""
        try:
            worker = WorkerProcess(self._servers[runtime], self.logs, who, self._kinds)
        except BoardUnfit as error:
            name_package(error, who)
            raise
        how = {"runtime": self._references[runtime], "device": device, "options": self._options}
        worker.order({"op": "prepare", **how, "instructions": instructions})
        return worker

    def _refill(self, runtime: str, device: str | None, spare: _Spare, surplus: list[_Spare]) -> None:
        _close(surplus)
        made = None
        # The spare may have been discarded: the session has ended, or other devices were requested.
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
