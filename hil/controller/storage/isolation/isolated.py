"""Run functions in separate processes, so that a crash or hang does not affect the controller.

A worker (:mod:`hil.controller.storage.isolation.isolated_worker`) has a separate process group. It exchanges lines of
JSON over pipes, without pickle and without importing the user's ``__main__``. When the controller ends, the worker's
stdin closes, and the worker ends with all its child processes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import selectors
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.storage.isolation.isolated_worker import ERROR_FIELDS, SCRATCH
from hil.controller.storage.screen import live
from hil.controller.storage.tool_caches import make_tool_environment
from hil.core.cancellation import check_cancelled, hold_lock
from hil.core.files import digest_file, open_file
from hil.core.processes import get_signal_name, make_module_command, signal_group
from hil.core.scratch import make_folder, remove_tree
from hil.errors import ErrorCode, HilError, StageError, StageTimeout

_TAIL_LINES = 20
_TAIL_BYTES = 16 << 10
_REAP_SECONDS = 10.0
# Interval at which a call checks for cancellation, and for new output to display.
_LOOK_SECONDS = 0.2
# Maximum size of a function's result, as JSON.
_MAX_BYTES = 256 << 20
# A function that a worker can call: see :func:`get_function_name`.
IsolatedFunction = Callable[..., Any] | str


def get_function_name(function: IsolatedFunction) -> str:
    """Return ``module:function``, which a worker uses to find a function. Plugins may pass this text directly.

    Raises:
        ValueError: a worker cannot find the function: a lambda, a local function, a method, or a function of
            ``__main__``.
    """
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        raise ValueError(f"cannot call {function!r} in a worker process: not a module-level function")
    return f"{module}:{name}"


def make_function_version(function: IsolatedFunction) -> str:
    """Return the function's name and the digest of its file. This text changes when the function's results may change.

    Raises:
        ValueError: see :func:`get_function_name`.
    """
    name = get_function_name(function)
    return f"{name} {make_file_version(name.partition(':')[0])}".rstrip()


def make_file_version(module: str) -> str:
    """Return the digest of a module's file, for cache keys. The file may change without a new package version.

    Returns "" for a module without a file.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    return _digest_of_file(spec.origin) if spec is not None and spec.has_location and spec.origin else ""


@functools.cache
def _digest_of_file(path: str) -> str:
    """Return the digest of a file.

    hil computes the digest only once per process, because the loaded code does not change.
    """
    return digest_file(Path(path))


class IsolatedError(StageError):
    """A function in an isolated process returned no result."""


class IsolatedFailure(IsolatedError):
    """The function raised an error that is not a HilError; ``detail`` is the traceback."""


class IsolatedCrash(IsolatedError):
    """The process died; ``detail`` is the end of its log."""


class IsolatedTimeout(IsolatedError):
    """The function timed out and was killed with all its child processes."""


@contextlib.contextmanager
def convert_errors(
    stage: str,
    what: str,
    failure: Callable[..., StageError],
    failed: str,
    *,
    crash: type[StageError] | None = None,
    died: str = "",
) -> Iterator[None]:
    """Convert the errors of a call to errors of a stage.

    Args:
        what: Activity for the timeout message, such as "compiling" in "compiling timed out after 60 s".
        failure, failed: Error class, and start of the message ("" uses only the error's own message).
        crash, died: The same for a crash, if different.

    Raises:
        StageTimeout, StageError: ``detail`` is the output of the process.
    """
    try:
        yield
    except IsolatedTimeout as error:
        raise StageTimeout(f"{what} {error.message}", stage=stage, detail=error.detail) from error
    except IsolatedCrash as error:
        text = ": ".join(filter(None, (died or failed, error.message)))
        raise (crash or failure)(text, detail=error.detail) from error
    except IsolatedFailure as error:
        raise failure(": ".join(filter(None, (failed, error.message))), detail=error.detail) from error


class Isolated:
    """Pool of warm worker processes, started on demand. Calls from different threads run in parallel.

    Args:
        folders: directories from which the workers import first, for example another version of a compiler.
    """

    def __init__(self, workers: int | None = None, *, folders: Sequence[str] = ()) -> None:
        self.folders = tuple(folders)
        self.workers = workers if workers is not None else max(2, os.cpu_count() or 1)
        if self.workers < 1:
            raise ValueError("a pool needs at least one worker")
        self._slots = threading.Semaphore(self.workers)
        self._lock = threading.Lock()
        self._idle: list[_IsolatedProcess] = []
        self._busy: set[_IsolatedProcess] = set()
        self.closed = False  # set by :meth:`close`, or by Ctrl-C during a call
        # Runs when the pool is garbage-collected or the interpreter exits.
        weakref.finalize(self, _end_all, self._idle, self._busy)

    def call(self, function: IsolatedFunction, args: Mapping[str, Any], *, timeout: float | None, log: Path) -> Any:
        """Call a function with keyword arguments in a worker.

        Args:
            function: A function of an importable module, or its name (see :func:`get_function_name`).
            timeout: Seconds, or None for no limit. Waiting for a free worker does not count.
            log: The output of the function and the child processes is appended to this file.

        Raises:
            HilError: raised by the function, with its class, message, hint and detail.
            IsolatedFailure: the function raised another error.
            IsolatedCrash: the worker died.
            IsolatedTimeout: the function timed out.
            ValueError: another process cannot find the function.
        """
        name = get_function_name(function)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        request = {"function": name, "args": dict(args), "log": str(log.absolute())}
        with hold_lock(self._slots):
            while True:
                worker, is_new = self._take()
                try:
                    reply = worker.ask(request, timeout, log)
                except _NeverBegun:
                    # The worker died while idle, for example because of an earlier call. The function has not started,
                    # so retry.
                    if is_new:
                        raise
                except BaseException as error:
                    worker.kill()
                    if isinstance(error, KeyboardInterrupt):
                        self.close()
                    raise
                else:
                    return _unpack_result(reply, name)
                finally:
                    self._give_back(worker)

    def close(self) -> None:
        """Kill all workers and their child processes. Running calls end as crashed."""
        with self._lock:
            self.closed = True
            _end_all(self._idle, self._busy)

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self) -> tuple[_IsolatedProcess, bool]:
        """Return a worker, and True if it was just started."""
        with self._lock:
            if self.closed:
                raise IsolatedCrash("the worker processes were stopped")
            worker = None
            while self._idle and worker is None:
                worker = self._idle.pop()
                if not worker.alive:
                    _end_all([worker], ())
                    worker = None
            is_new = worker is None
            if worker is None:
                worker = _IsolatedProcess(self.folders)
            self._busy.add(worker)
            return worker, is_new

    def _give_back(self, worker: _IsolatedProcess) -> None:
        with self._lock:
            self._busy.discard(worker)
            if worker.alive and not self.closed:
                self._idle.append(worker)
            else:
                worker.close_pipes()


def lend_pool(isolated: Isolated | None, workers: int | None = None) -> contextlib.AbstractContextManager[Isolated]:
    """Return a context manager for a pool.

    The caller's pool stays open at the end; without one, a new pool opens and closes.
    """
    return Isolated(workers) if isolated is None else contextlib.nullcontext(isolated)


class _NeverBegun(IsolatedCrash):
    """The process died before it started the call."""


class _IsolatedProcess:
    def __init__(self, folders: Sequence[str]) -> None:
        # A killed worker does not clean up, so the temporary directory is removed here.
        self._scratch = str(make_folder(SCRATCH))
        self._process = subprocess.Popen(
            make_module_command("hil.controller.storage.isolation.isolated_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_make_environment(folders) | {"TMPDIR": self._scratch},
            start_new_session=True,
        )
        self._killed = False
        self._received = bytearray()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], timeout: float | None, log: Path) -> dict[str, Any]:
        log_start = log.stat().st_size
        follower = live.LogFollower(log) if live.is_shown() else None
        try:
            return self._ask(request, timeout, log, log_start, follower)
        finally:
            if follower is not None:
                follower.show_new_lines(end=True)

    def _ask(
        self,
        request: Mapping[str, Any],
        timeout: float | None,
        log: Path,
        log_start: int,
        follower: live.LogFollower | None,
    ) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has just died: reading the reply reports this
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        deadline = None if timeout is None else time.monotonic() + timeout
        begun = False
        while (line := self._read_line(deadline, follower)) is not None:
            if not line:
                raise (IsolatedCrash if begun else _NeverBegun)(self._exit_text(), detail=_tail(log, log_start))
            if begun:
                return _reply(line)
            begun = True
        self.kill()
        raise IsolatedTimeout(f"timed out after {timeout:g} s", detail=_tail(log, log_start))

    def _read_line(self, deadline: float | None, follower: live.LogFollower | None) -> bytes | None:
        """Return the next line, b"" at the end of the stream, or None after the deadline."""
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            seen = 0
            while (end := self._received.find(b"\n", seen)) < 0:
                seen = len(self._received)
                if seen > _MAX_BYTES:
                    raise IsolatedCrash(f"the worker process sent a response of more than {_MAX_BYTES >> 20} MiB")
                check_cancelled()
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if follower is not None:
                    follower.show_new_lines()
                if not selector.select(_LOOK_SECONDS if left is None else min(left, _LOOK_SECONDS)):
                    if left is None or left > _LOOK_SECONDS:
                        continue
                    return None
                piece = os.read(stdout.fileno(), 1 << 16)
                if not piece:
                    return b""
                self._received += piece
        line = bytes(self._received[: end + 1])
        del self._received[: end + 1]
        return line

    def _exit_text(self) -> str:
        killed = self._killed
        try:
            code = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if killed:
            return "the worker process was stopped"
        if code is None:
            return "the worker process closed its pipe without exiting"
        return (
            f"the worker process died of {get_signal_name(-code)}"
            if code < 0
            else f"the worker process exited with code {code}"
        )

    def kill(self) -> None:
        """Kill the worker and all child processes.

        Further calls do nothing, because another process group may have the same id.
        """
        first, self._killed = not self._killed, True
        if first:
            signal_group(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECONDS)
        remove_tree(Path(self._scratch))

    def close_pipes(self) -> None:
        """Close the pipes. Call this only if no thread waits on them: a wait on a closed descriptor never ends."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _end_all(idle: list[_IsolatedProcess], busy: Collection[_IsolatedProcess]) -> None:
    for worker in (*idle, *busy):
        worker.kill()
    for worker in idle:
        worker.close_pipes()
    idle.clear()


def _make_environment(folders: Sequence[str]) -> dict[str, str]:
    """Return the worker's environment variables.

    The worker imports the same hil, and nothing from the working directory.
    """
    root = str(Path(__file__).resolve().parents[4])
    paths = [*folders, root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}
    return os.environ | make_tool_environment() | own


def _tail(log: Path, start: int) -> str:
    with open_file(log) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


def _reply(line: bytes) -> dict[str, Any]:
    """Parse a reply. A reply may be arbitrary data, because the process runs a compiler on an untrusted model."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict) and ("result" in reply or _is_error(reply.get("error"))):
        return reply
    raise IsolatedCrash("the worker process sent an invalid response")


def _is_error(error: Any) -> bool:
    return isinstance(error, dict) and all(isinstance(error.get(key), str) for key in ("class", *ERROR_FIELDS))


def _unpack_result(reply: dict[str, Any], function: str) -> Any:
    error = reply.get("error")
    if error is None:
        return reply["result"]
    raised = _find_error_class(error["class"], function)(error["message"])
    raised.stage, raised.board, raised.hint = error["stage"], error["board"], error["hint"]
    raised.detail, raised.option, raised.code = error["detail"], error["option"], ErrorCode(error["code"])
    raise raised


def _find_error_class(name: str, function: str) -> type[HilError]:
    """Return an error class by name if it belongs to hil or to the function's package, else IsolatedFailure."""
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] not in ("hil", function.partition(":")[0].partition(".")[0]):
        return IsolatedFailure
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except (ImportError, ValueError):
        return IsolatedFailure
    return kind if isinstance(kind, type) and issubclass(kind, HilError) else IsolatedFailure
