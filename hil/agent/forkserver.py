"""Fork server: imports a runtime and forks a worker for every program. This module contains the worker as well.

The agent starts the fork server as `python -m hil.agent.forkserver FD MODULE:CLASS MEMORY_LIMIT`. An agent that has
imported the runtime and is still single-threaded forks it instead (:meth:`hil.agent.forks.ForkServer.fork_ahead`). A
fork takes 1 ms and a new interpreter 200 ms, so every program gets a separate process that is never reused. The fork
server starts no threads and opens no devices. When the agent ends, the fork server kills all workers and descendants.
Descendants of a worker end with the worker.

A worker runs one program, so that a crash or a hang affects no other program. The worker receives orders over a socket,
reads inputs from one shared arena and writes outputs to another arena.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.agent import ipc, progress
from hil.agent.confinement import confine, enter_sandbox, prepare, seclude
from hil.agent.device_memory import read_device_memory
from hil.agent.fresh_inputs import FreshInputs
from hil.agent.instructions import CountingFailed, CountLog, InstructionCounter
from hil.agent.ipc import Arena, lay_out
from hil.agent.iterations import AnswerLog
from hil.agent.progress import ProgressLog
from hil.core import tensors
from hil.core.clock import get_time_ns
from hil.core.files import map_file
from hil.core.guarded import format_calls, format_error
from hil.core.instructions import RUNTIME
from hil.core.named import resolve
from hil.core.processes import ExitStatus, adopt_descendants, end_children, get_peak_memory, list_children, signal_group
from hil.core.results import Placement
from hil.core.stepped_program import SteppedProgram
from hil.core.steps import MAX_CALLS, StepCall, StepsPlan
from hil.core.tensors import Array, TensorSpec
from hil.errors import ErrorCode, HilError, LoadFailed, RunFailed, UsageError

# Maximum length of a text in an error response. Three such texts fit into a message in any encoding.
_MAX_TEXT = 1 << 16
_MAX_ERROR = 4000


def _answer_orders(channel: ipc.Channel, inputs: Arena, outputs: Arena) -> None:
    """Execute orders until the agent closes the channel."""
    worker = _ForkedWorker(inputs, outputs)
    asked, order = b"", {}
    said: dict[str, Any] = {}
    text = b""
    while True:
        try:
            # Consecutive runs usually have the same order and the same response, so reuse the last encoding.
            if (body := channel.receive_bytes()) != asked:
                asked, order = body, ipc.decode(body)
            worker.numbers = []
            try:
                reply = {"ok": getattr(worker, f"do_{order['op']}")(order)}
            except HilError as error:
                reply = _build_error(type(error), error.message, error.hint, error.detail, error.code)
            except BaseException as error:  # plugins may raise SystemExit
                failed = LoadFailed if order["op"] in ("prepare", "open", "load") else RunFailed
                reply = _build_error(failed, format_error(error, whole=True), "", format_calls(error))
            if reply != said:
                said, text = reply, ipc.encode(reply)
            channel.send_bytes(ipc.join_message([] if "error" in reply else worker.numbers, text))
        except ipc.Closed:
            return


def _build_error(
    kind: type[HilError], message: str, hint: str, detail: str, code: ErrorCode = ErrorCode.NONE
) -> dict[str, Any]:
    """Build an error response. Cut long texts at the end, and the detail at the start."""
    return {"error": [kind.__name__, message[:_MAX_TEXT], hint[:_MAX_TEXT], detail[-_MAX_TEXT:], code.value]}


class _ForkedWorker:
    def __init__(self, inputs: Arena, outputs: Arena) -> None:
        self._in = inputs
        self._out = outputs
        self._runtime: Any = None
        self.program: Any = None
        # Numbers of the response, sent with the JSON text: see hil.agent.answers.
        self.numbers: list[int] = []
        self._folder = Path()
        self._sandboxed = self._is_open = False
        self._entries: list[dict[str, Any]] | None = None
        self._arrays: list[Array] = []
        self._placed: Placement | None = None
        # Counter of instructions, if the order requests it, or why there is none.
        self._counter: InstructionCounter | None = None
        self._counts_instructions, self._counter_problem = False, ""

    def do_prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        """Create the runtime, and open the device if the order contains it."""
        if order["instructions"]:
            # Open the counter before the runtime starts threads, so that the counter includes them.
            self._counts_instructions = True
            try:
                self._counter = InstructionCounter()
            except CountingFailed as error:
                self._counter_problem = str(error)
        self._sandboxed = "sandbox" in order["options"]
        if self._sandboxed:
            # Enter the sandbox before opening the device, which starts threads.
            enter_sandbox([Path(one) for one in order["options"]["sandbox"]])
        self._runtime = resolve(order["runtime"])(order["options"])
        return self.do_open(order)

    def do_open(self, order: dict[str, Any]) -> dict[str, Any]:
        """Open the device.

        The open order is separate from the load order, because a failure to open the device is never the program's
        fault.
        """
        if order["device"] is not None and not self._is_open:
            self._runtime.prepare(order["device"])
            self._is_open = True
        return {}

    def do_load(self, order: dict[str, Any]) -> dict[str, Any]:
        start = get_time_ns()
        self._folder = Path(order["folder"]).absolute()
        self.program = self._runtime.load(self._folder, order["main"], order["device"], order["function"])
        return {
            "inputs": [_spec_to_json(spec) for spec in self.program.inputs],
            "outputs": [_spec_to_json(spec) for spec in self.program.outputs],
            "function": self.program.function,
            "load_ns": get_time_ns() - start,
        }

    def do_invoke(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run the program and compare the outputs of all runs. Only ``run`` is timed."""
        return self._run_repeatedly(self.program, order)

    def do_generate(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run a decoder with a prompt, like :meth:`do_invoke`. Append the times of all calls to the numbers."""
        plan = StepsPlan.from_json(order["steps"])
        make = getattr(self.program, "stepped", None)  # simulated programs
        stepped = make(plan) if make else SteppedProgram(self.program, plan)
        stepped.note_call = ProgressLog(self._out).note
        calls: list[StepCall] = []
        reply = self._run_repeatedly(stepped, order, lambda: calls.extend(stepped.calls), reserved=progress.SIZE)
        for call in calls[:MAX_CALLS]:
            self.numbers += [call.tokens, call.start_ns, call.end_ns]
        return reply

    def _run_repeatedly(
        self, program: Any, order: dict[str, Any], note: Callable[[], None] = lambda: None, reserved: int = 0
    ) -> dict[str, Any]:
        """Run a program and compare the outputs of all runs.

        Args:
            note: called after each timed run.
            reserved: bytes of the output arena before the outputs.
        """
        warmup = order["warmup"]
        runs = warmup + order["iterations"]
        fresh = FreshInputs(self._in, order["inputs"], order["bytes"]) if runs > 1 else None
        program.bind(self._map_inputs(order["inputs"], order["bytes"], program.inputs, fresh))
        renew = getattr(program, "renew", _do_nothing)
        answers = AnswerLog(self._out, [spec.name for spec in program.outputs], runs, reserved)
        counts = self._begin_counts(program)
        run_ns = getattr(program, "get_run_ns", None)
        starts: list[int] = []
        ends: list[int] = []
        cpu_ns = 0
        for number in range(runs):
            if number and fresh is not None:
                fresh.restore()
            renew()
            cpu_start = time.process_time_ns()
            if counts is not None:
                counts.begin()
            starts.append(get_time_ns())
            program.run()
            ends.append(get_time_ns())
            if run_ns is not None:
                starts[-1], ends[-1] = _place_run(starts[-1], ends[-1], run_ns())
            if counts is not None and number >= warmup:
                counts.end()
            if number >= warmup:
                cpu_ns += time.process_time_ns() - cpu_start
                note()
            answers.add(program.fetch())
        warmup_ns = sum(ends[:warmup]) - sum(starts[:warmup])
        self.numbers = [warmup_ns, cpu_ns, self._get_peak(), *starts[warmup:], *ends[warmup:]]
        reply: dict[str, Any] = {"outputs": answers.outputs, "placement": self._find_new_placement()}
        if device_bytes := self._read_device_memory():
            reply["device_bytes"] = device_bytes
        if counts is not None:
            counted = counts.finish()
            self.numbers += counted.counts
            reply["instructions"] = {"counter": counted.counter, "problem": counted.problem}
        return {**reply, **(answers.record() if runs > 1 else {})}

    def _begin_counts(self, program: Any) -> CountLog | None:
        """Return a log for the instructions of an invocation, or None if they are not requested."""
        if not self._counts_instructions:
            return None
        count = getattr(program, "count_instructions", None)
        own = None if count is None else (getattr(program, "instruction_counter", RUNTIME), count)
        return CountLog(self._counter, self._counter_problem, own)

    def do_profile(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run the program under the runtime's profiler, and return the profiler's files as outputs."""
        profile = getattr(self.program, "profile", None)
        if profile is None:
            hint = "runtimes with a profiler define the method profile: see hil.agent.runtimes.Program"
            raise RunFailed("this runtime cannot profile", hint=hint)
        runs = order["warmup"] + order["iterations"]
        fresh = FreshInputs(self._in, order["inputs"], order["bytes"])
        self.program.bind(self._map_inputs(order["inputs"], order["bytes"], self.program.inputs, fresh))
        # Both the program's directory and the sandbox's files are removed with the program, even if this process
        # crashes.
        where = None if self._sandboxed else self._folder
        with tempfile.TemporaryDirectory(dir=where, prefix="profile-") as place:
            tool = Path(order["tool"]) if order["tool"] else None
            answers = AnswerLog(self._out, [spec.name for spec in self.program.outputs], runs)

            def check(arrays: Sequence[Array]) -> None:
                answers.add(arrays)
                fresh.restore()

            files = profile(order["warmup"], order["iterations"], Path(place), tool, check)
            if answers.runs not in (0, runs):
                what = f"the program's profile method reported the outputs of {answers.runs} runs, expected {runs}"
                raise RunFailed(
                    what, hint="call `check` once per run in the profile method: see hil.agent.runtimes.Program"
                )
            size = sum(file.stat().st_size for file in files)
            if size > order["limit"]:
                what = f"the profile has {size} bytes, more than the board's {order['limit']} bytes of memory"
                raise RunFailed(what, hint="use fewer iterations")
            outputs, _ = lay_out(self._out, ((file.name, _map_file(file)) for file in files), answers.size)
        self.numbers = [0, 0, self._get_peak()]
        return {"outputs": outputs, **answers.record()}

    def _get_peak(self) -> int:
        """Return the peak main memory in bytes: of the program if it reports it, else of this process; 0 if unknown."""
        ask = getattr(self.program, "get_peak_memory", None)
        if ask is None:
            return get_peak_memory(resource.getrusage(resource.RUSAGE_SELF))
        try:
            return int(ask())
        except BaseException:  # a library's error: the outputs are valid, so report an unknown peak
            traceback.print_exc()
            return 0

    def _find_new_placement(self) -> list[dict[str, Any]] | None:
        """Return the devices on which the program ran, or None if the devices are unknown or unchanged."""
        tell = getattr(self.program, "placement", None)
        try:
            placed = tell() if tell is not None else None
        except BaseException:  # a library's error: the outputs are valid, so report an unknown placement
            traceback.print_exc()
            placed = None
        if placed is None or placed == self._placed:
            return None
        self._placed = placed
        return [part.to_json() for part in placed]

    def _read_device_memory(self) -> int:
        try:
            return max(read_device_memory(self.program), 0)
        except Exception:  # a library's error: the outputs are valid, so the memory is unknown
            traceback.print_exc()
            return 0

    def _map_inputs(
        self,
        entries: list[dict[str, Any]],
        size: int,
        specs: Sequence[TensorSpec],
        fresh: FreshInputs | None = None,
    ) -> list[Array]:
        """Return the inputs as views of the shared arena. Calls whose inputs differ only in content reuse the views.

        Args:
            specs: specs of the program's inputs.
            fresh: copy of the inputs to use instead of the arena.
        """
        if fresh is None and entries == self._entries and not any(entry["dtype"] == "string" for entry in entries):
            return self._arrays
        view = self._in.view(size, grow=False) if fresh is None else fresh.view
        arrays = [
            tensors.from_bytes(view[entry["at"] : entry["at"] + entry["bytes"]], entry["dtype"], entry["shape"])
            for entry in entries
        ]
        if len(specs) != len(arrays):
            raise UsageError(f"the program takes {len(specs)} inputs, got {len(arrays)}")
        for spec, entry in zip(specs, entries, strict=True):
            if not spec.accepts(entry["dtype"], entry["shape"]):
                given = tensors.type_text(entry["dtype"], entry["shape"])
                raise UsageError(f"input {spec} does not take a {given} tensor")
        if fresh is None:
            self._entries, self._arrays = entries, arrays
        return arrays


def _place_run(start_ns: int, end_ns: int, run_ns: int) -> tuple[int, int]:
    """Return start and end of a run whose duration the device measured.

    The clock of an emulated device may run faster than this machine's. Then wait, so that runs do not overlap.
    """
    if (early_ns := run_ns - (end_ns - start_ns)) > 0:
        time.sleep(early_ns / 1e9)
        end_ns = max(get_time_ns(), start_ns + run_ns)
    return end_ns - run_ns, end_ns


def _map_file(file: Path) -> Array:
    """Return the file's bytes."""
    return np.frombuffer(map_file(file), np.uint8)


def _do_nothing() -> None:
    """Do nothing between runs, for programs without state."""


def _spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def serve(sock: socket.socket, reference: str, memory_limit: int) -> None:
    """Serve the agent's fork orders over ``sock`` until the agent closes the connection."""
    seclude()
    adopt_descendants()
    control = ipc.Channel(sock)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        control.send(_describe(reference))
    except ipc.Closed:  # the agent has ended
        return
    preload(reference)
    prepare()
    gc.freeze()
    workers: set[int] = set()
    # Child processes that a library started during its import: they run until the fork server ends.
    helpers = list_children()
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.set_wakeup_fd(wake_write.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(control.sock, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    try:
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    wake_read.recv(4096)
                _reap(control, workers, helpers)
            if control.sock in ready:
                _, fds = control.receive_fds(4)
                ours = os.getpid()
                try:
                    pid = os.fork()
                except OSError as error:
                    pid = -1
                    control.send({"failed": error.strerror})
                if pid == 0:
                    selector.close()
                    _become_worker(ours, [control.sock, wake_read, wake_write], fds, memory_limit)
                for fd in fds:
                    os.close(fd)
                if pid > 0:
                    workers.add(pid)
                    control.send({"pid": pid})
    except (ipc.Closed, ipc.Garbled):
        pass
    finally:
        for pid in workers:
            _kill(pid)
        end_children((), {})


def _describe(reference: str) -> dict[str, Any]:
    """Import the runtime here, and query its devices in a child process.

    A driver such as CUDA that is initialized before a fork does not work in the child.
    """
    try:
        runtime = resolve(reference)
    except BaseException as error:
        return _report_error(error)
    ours, theirs = (ipc.Channel(sock) for sock in socket.socketpair())
    pid = os.fork()
    if pid == 0:
        try:
            theirs.send(runtime.describe())
        except BaseException as error:
            theirs.send(_report_error(error))
        finally:
            os._exit(0)
    theirs.close()
    try:
        described: dict[str, Any] = ours.receive(timeout=60)
    except (ipc.Closed, ipc.Garbled, ipc.Late):
        os.kill(pid, signal.SIGKILL)
        described = {"error": "the process died during device discovery"}
    os.waitpid(pid, 0)
    ours.close()
    return described


def _report_error(error: BaseException) -> dict[str, Any]:
    return {"error": format_error(error, whole=True)[:_MAX_ERROR]}


def preload(reference: str) -> None:
    """Import the modules that every worker needs. Errors are ignored here; loading a program reports them."""
    with contextlib.suppress(BaseException):
        getattr(resolve(reference), "preload", lambda: None)()


def _reap(control: ipc.Channel, workers: set[int], helpers: set[int]) -> None:
    """Report workers that have ended, after all their descendants have ended."""
    ended: dict[int, ExitStatus] = {}
    end_children(workers | helpers, ended)
    for pid in workers & ended.keys():
        workers.discard(pid)
        # Without subreaper support, a dead worker's descendants do not become children of this process. So kill the
        # worker's process group.
        signal_group(pid)
        control.send({"exited": pid, "status": ended[pid].code, "peak": ended[pid].peak_bytes})


def _kill(pid: int) -> None:
    # Also kill the process id: a worker that was just forked does not have a group yet.
    signal_group(pid)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _become_worker(parent: int, inherited: list[socket.socket], fds: list[int], memory_limit: int) -> None:
    """Run a worker in a forked child: start a session, redirect stderr to the agent's pipe, then execute orders."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for sock in inherited:
            sock.close()
        sock_fd, in_fd, out_fd, stderr_fd = fds
        os.dup2(stderr_fd, 1)
        os.dup2(stderr_fd, 2)
        os.close(stderr_fd)
        # Adopt orphaned descendants, so that they end with this worker and not before.
        adopt_descendants()
        confine(parent, memory_limit)
        faulthandler.enable()
        _answer_orders(ipc.Channel(socket.socket(fileno=sock_fd)), Arena(in_fd), Arena(out_fd))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # Skip the clean-up of vendor libraries: it may hang, and the kernel frees the memory.
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
    # As in a worker, skip the clean-up of vendor libraries.
    os._exit(0)
