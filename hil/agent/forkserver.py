"""A process that has a runtime imported and forks a worker for each program; and what the worker does.

Started as `python -m hil.agent.forkserver FD MODULE:CLASS MEMORY_LIMIT`, or forked from an agent that has the runtime
imported and has no thread yet (:meth:`hil.agent.forks.ForkServer.fork_ahead`). A fork takes a millisecond where a fresh
interpreter takes 200, so every program gets a process of its own and none is ever used twice. The fork server starts no
thread and opens no device. It ends when the agent does, and kills its workers and whatever they started; what a worker
leaves behind ends with the worker.

A worker runs one program, so that a crash or a hang ends nothing else. It gets orders over a socket, reads inputs from
one shared arena and writes outputs into another.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.agent import ipc
from hil.agent.confinement import confine, enter_sandbox, prepare, seclude
from hil.agent.fresh_inputs import FreshInputs
from hil.agent.ipc import Arena, lay_out
from hil.agent.iterations import AnswerLog
from hil.core import tensors
from hil.core.clock import now_ns
from hil.core.guarded import calls_text, error_text
from hil.core.named import resolve
from hil.core.processes import adopt_descendants, children, end_children, signal_group
from hil.core.results import Placement
from hil.core.tensors import Array, TensorSpec
from hil.errors import HilError, LoadFailed, RunFailed, UsageError

# Three such texts fit into a message, whatever they are made of.
_MOST_TEXT = 1 << 16
_MOST_ERROR = 4000


def _answer_orders(channel: ipc.Channel, inputs: Arena, outputs: Arena) -> None:
    """Answer orders until the agent hangs up."""
    worker = _Worker(inputs, outputs)
    asked, order = b"", {}
    said: dict[str, Any] = {}
    text = b""
    while True:
        try:
            # Runs follow each other, and are mostly ordered and answered in the same words.
            if (body := channel.receive_bytes()) != asked:
                asked, order = body, ipc.decode(body)
            worker.numbers = []
            try:
                reply = {"ok": getattr(worker, f"do_{order['op']}")(order)}
            except HilError as error:
                reply = _error(type(error), error.message, error.hint, error.detail)
            except BaseException as error:  # a package's runtime may raise SystemExit too
                failed = LoadFailed if order["op"] in ("prepare", "load") else RunFailed
                reply = _error(failed, error_text(error, whole=True), "", calls_text(error))
            if reply != said:
                said, text = reply, ipc.encode(reply)
            channel.send_bytes(ipc.joined([] if "error" in reply else worker.numbers, text))
        except ipc.Closed:
            return


def _error(kind: type[HilError], message: str, hint: str, detail: str) -> dict[str, Any]:
    """The answer that tells an error: of a text that is too long for one the beginning, of a detail the end."""
    return {"error": [kind.__name__, message[:_MOST_TEXT], hint[:_MOST_TEXT], detail[-_MOST_TEXT:]]}


class _Worker:
    def __init__(self, inputs: Arena, outputs: Arena) -> None:
        self._in = inputs
        self._out = outputs
        self._runtime: Any = None
        self.program: Any = None
        # What the answer to an order tells beside its text: see hil.agent.answers.
        self.numbers: list[int] = []
        self._folder = Path()
        self._sandboxed = self._is_open = False
        self._entries: list[dict[str, Any]] | None = None
        self._arrays: list[Array] = []
        self._placed: Placement | None = None

    def do_prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make the runtime, and open its device ahead of the load where it is known."""
        self._sandboxed = "sandbox" in order["options"]
        if self._sandboxed:
            # Before the device is opened: that starts threads.
            enter_sandbox([Path(one) for one in order["options"]["sandbox"]])
        self._runtime = resolve(order["runtime"])(order["options"])
        self._open(order["device"])
        return {}

    def _open(self, device: str | None) -> None:
        if device is not None and not self._is_open:
            self._runtime.prepare(device)
            self._is_open = True

    def do_load(self, order: dict[str, Any]) -> dict[str, Any]:
        self._open(order["device"])
        start = now_ns()
        self._folder = Path(order["folder"]).absolute()
        self.program = self._runtime.load(self._folder, order["main"], order["device"], order["function"])
        return {
            "inputs": [_spec_to_json(spec) for spec in self.program.inputs],
            "outputs": [_spec_to_json(spec) for spec in self.program.outputs],
            "function": self.program.function,
            "load_ns": now_ns() - start,
        }

    def do_invoke(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run, and compare the answers of all runs. Only ``run`` is timed."""
        program, warmup = self.program, order["warmup"]
        runs = warmup + order["iterations"]
        fresh = FreshInputs(self._in, order["inputs"], order["bytes"]) if runs > 1 else None
        program.bind(self._given(order["inputs"], order["bytes"], fresh))
        renew = getattr(program, "renew", _nothing)
        answers = AnswerLog(self._out, [spec.name for spec in program.outputs], runs)
        starts: list[int] = []
        ends: list[int] = []
        cpu_ns = 0
        for number in range(runs):
            if number and fresh is not None:
                fresh.restore()
            renew()
            cpu_start = time.process_time_ns()
            starts.append(now_ns())
            program.run()
            ends.append(now_ns())
            if number >= warmup:
                cpu_ns += time.process_time_ns() - cpu_start
            answers.add(program.fetch())
        warmup_ns = sum(ends[:warmup]) - sum(starts[:warmup])
        self.numbers = [warmup_ns, cpu_ns, _peak_memory(), *starts[warmup:], *ends[warmup:]]
        repetition = answers.record() if runs > 1 else {}
        return {"outputs": answers.outputs, "placement": self._news_of_placement(), **repetition}

    def do_profile(self, order: dict[str, Any]) -> dict[str, Any]:
        """A pass under the runtime's profiler: what it wrote goes where outputs do."""
        profile = getattr(self.program, "profile", None)
        if profile is None:
            hint = "one that can has a method for it: see hil.agent.runtimes.Program"
            raise RunFailed("this runtime cannot profile", hint=hint)
        runs = order["warmup"] + order["iterations"]
        fresh = FreshInputs(self._in, order["inputs"], order["bytes"])
        self.program.bind(self._given(order["inputs"], order["bytes"], fresh))
        # In the program's folder, or a sandbox's own: they go with the program, whatever becomes of this process.
        where = None if self._sandboxed else self._folder
        with tempfile.TemporaryDirectory(dir=where, prefix="profile-") as place:
            tool = Path(order["tool"]) if order["tool"] else None
            answers = AnswerLog(self._out, [spec.name for spec in self.program.outputs], runs)

            def check(arrays: Sequence[Array]) -> None:
                answers.add(arrays)
                fresh.restore()

            files = profile(order["warmup"], order["iterations"], Path(place), tool, check)
            if answers.runs not in (0, runs):
                what = f"its profile method reported the outputs of {answers.runs} runs, and there were {runs}"
                raise RunFailed(what, hint="it calls check once a run: see hil.agent.runtimes.Program")
            size = sum(file.stat().st_size for file in files)
            if size > order["limit"]:
                what = f"the profile has {size} bytes and the board {order['limit']} of memory"
                raise RunFailed(what, hint="fewer iterations")
            outputs, _ = lay_out(self._out, ((file.name, _mapped(file)) for file in files), answers.size)
        self.numbers = [0, 0, _peak_memory()]
        return {"outputs": outputs, **answers.record()}

    def _news_of_placement(self) -> list[dict[str, Any]] | None:
        """Where the program ran; None where that is not known, or has been told."""
        tell = getattr(self.program, "placement", None)
        try:
            placed = tell() if tell is not None else None
        except BaseException:  # of a library: the answer itself is there, and that this is not known is told as well
            traceback.print_exc()
            placed = None
        if placed is None or placed == self._placed:
            return None
        self._placed = placed
        return [part.to_json() for part in placed]

    def _given(self, entries: list[dict[str, Any]], size: int, fresh: FreshInputs | None = None) -> list[Array]:
        """Return the inputs as views of the shared arena, made and checked once for calls that differ in content only.

        Args:
            fresh: where they are to be instead.
        """
        if fresh is None and entries == self._entries and not any(entry["dtype"] == "string" for entry in entries):
            return self._arrays
        view = self._in.view(size, grow=False) if fresh is None else fresh.view
        arrays = [
            tensors.from_bytes(view[entry["at"] : entry["at"] + entry["bytes"]], entry["dtype"], entry["shape"])
            for entry in entries
        ]
        specs = self.program.inputs
        if len(specs) != len(arrays):
            raise UsageError(f"the program takes {len(specs)} inputs, got {len(arrays)}")
        for spec, entry in zip(specs, entries, strict=True):
            if not spec.accepts(entry["dtype"], entry["shape"]):
                given = tensors.type_text(entry["dtype"], entry["shape"])
                raise UsageError(f"input {spec} does not take a {given} tensor")
        if fresh is None:
            self._entries, self._arrays = entries, arrays
        return arrays


def _mapped(file: Path) -> Array:
    """A file's bytes."""
    return np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)


def _nothing() -> None:
    """What a program without state does between its runs."""


def _spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def serve(sock: socket.socket, reference: str, memory_limit: int) -> None:
    """Serve the agent's fork orders until it hangs up; it has the other end of ``sock``."""
    seclude()
    adopt_descendants()
    control = ipc.Channel(sock)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        control.send(_describe(reference))
    except ipc.Closed:  # the agent has ended meanwhile
        return
    preload(reference)
    prepare()
    gc.freeze()
    workers: set[int] = set()
    # A library's own, which it started as it was imported: they stay as long as we do.
    helpers = children()
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
    """Import the runtime here and let a child ask it for its devices: looking at a driver (CUDA's, say) before a fork
    would leave it unusable after."""
    try:
        runtime = resolve(reference)
    except BaseException as error:
        return _wrong(error)
    ours, theirs = (ipc.Channel(sock) for sock in socket.socketpair())
    pid = os.fork()
    if pid == 0:
        try:
            theirs.send(runtime.describe())
        except BaseException as error:
            theirs.send(_wrong(error))
        finally:
            os._exit(0)
    theirs.close()
    try:
        described: dict[str, Any] = ours.receive(timeout=60)
    except (ipc.Closed, ipc.Garbled, ipc.Late):
        os.kill(pid, signal.SIGKILL)
        described = {"error": "it died while looking for devices"}
    os.waitpid(pid, 0)
    ours.close()
    return described


def _wrong(error: BaseException) -> dict[str, Any]:
    return {"error": error_text(error, whole=True)[:_MOST_ERROR]}


def preload(reference: str) -> None:
    """Import what every worker would: once for all. What is wrong with it, loading a program will say."""
    with contextlib.suppress(BaseException):
        getattr(resolve(reference), "preload", lambda: None)()


def _reap(control: ipc.Channel, workers: set[int], helpers: set[int]) -> None:
    """Tell of workers that have ended, once all that they started has ended as well."""
    ended: dict[int, int] = {}
    end_children(workers | helpers, ended)
    for pid in workers & ended.keys():
        workers.discard(pid)
        # Where nobody tells of those that have left their parents: what is left of its group.
        signal_group(pid)
        control.send({"exited": pid, "status": os.waitstatus_to_exitcode(ended[pid])})


def _kill(pid: int) -> None:
    # By its own number too: a worker that was forked just now has no group of its own yet.
    signal_group(pid)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _become_worker(parent: int, inherited: list[socket.socket], fds: list[int], memory_limit: int) -> None:
    """In the forked child: a session of its own, stderr into the agent's pipe, then orders until the end."""
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
        # What loses its parent while this worker lives comes to it, and ends with it, not before.
        adopt_descendants()
        confine(parent, memory_limit)
        faulthandler.enable()
        _answer_orders(ipc.Channel(socket.socket(fileno=sock_fd)), Arena(in_fd), Arena(out_fd))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # No clean-up of a vendor's library: it may hang, and the memory goes with the process.
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))
    # As in a worker: no clean-up of a vendor's library.
    os._exit(0)
