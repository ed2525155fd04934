"""Functions run in processes of their own, whose crash or hang costs the controller nothing.

A worker (:mod:`hil.controller.storage.isolated_worker`) has a process group of its own. It speaks lines of JSON over
pipes: no pickle, no import of the user's ``__main__``. It ends, with everything it started, when its controller does:
its standard input is the lifeline.
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
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hil.controller.storage import live
from hil.controller.storage.isolated_worker import ERROR_FIELDS, SCRATCH
from hil.core.digest import digest_file
from hil.core.processes import module_command, signal_group, signal_name
from hil.core.scratch import new_folder, remove_tree
from hil.errors import HilError, StageError, StageTimeout

_TAIL_LINES = 20
_TAIL_BYTES = 16 << 10
_REAP_S = 10.0
# How often what a call prints is looked for, where it is shown as it comes.
_LOOK_S = 0.2
# What a function may return, as JSON.
_MOST_BYTES = 256 << 20
# What a worker can be asked to call: see :func:`function_name`.
IsolatedFunction = Callable[..., Any] | str


def function_name(function: IsolatedFunction) -> str:
    """Return ``module:function``, by which a worker finds a function; a package may give that text itself.

    Raises:
        ValueError: no worker can find it: it is a lambda, local, a method, or of ``__main__``.
    """
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        raise ValueError(f"{function!r} cannot be called in another process: it is no function of a module")
    return f"{module}:{name}"


def function_version(function: IsolatedFunction) -> str:
    """Return what a function's results depend on: its name, and the digest of its file.

    Raises:
        ValueError: as :func:`function_name`.
    """
    name = function_name(function)
    return f"{name} {file_version(name.partition(':')[0])}".rstrip()


def file_version(module: str) -> str:
    """Return the digest of a module's file, for keys of the cache: it may be edited without a new version.

    "" where there is no file.
    """
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    return _digest_of_file(spec.origin) if spec is not None and spec.has_location and spec.origin else ""


@functools.cache
def _digest_of_file(path: str) -> str:
    """Once a process: it goes on with the code that it has."""
    return digest_file(Path(path))


class IsolatedError(StageError):
    """A function in a process of its own gave no result."""


class IsolatedFailure(IsolatedError):
    """The function raised an error that is none of hil's; ``detail`` is its traceback."""


class IsolatedCrash(IsolatedError):
    """The process died; ``detail`` is the end of its log."""


class IsolatedTimeout(IsolatedError):
    """The function outlived its time limit and was killed, with everything it had started."""


@contextlib.contextmanager
def naming_errors(
    stage: str,
    what: str,
    failure: Callable[..., StageError],
    failed: str,
    *,
    crash: type[StageError] | None = None,
    died: str = "",
) -> Iterator[None]:
    """Turn the errors of a call into those of a stage.

    Args:
        what: is done, for the message of a time limit: "compiling gave no result within 60 s".
        failure, failed: the error, and how its message begins ("": with that of the call).
        crash, died: those of a crash, where they differ.

    Raises:
        StageTimeout, StageError: ``detail`` is what the process itself said.
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
    """A pool of warm worker processes. They are started when needed; calls from many threads run side by side."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers if workers is not None else max(2, os.cpu_count() or 1)
        if self.workers < 1:
            raise ValueError("a pool needs at least one worker")
        self._slots = threading.Semaphore(self.workers)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self.closed = False  # by :meth:`close`, or by Ctrl-C during a call
        # Runs when the pool is forgotten or the interpreter ends, whichever is first.
        weakref.finalize(self, _end_all, self._idle, self._busy)

    def call(self, function: IsolatedFunction, args: Mapping[str, Any], *, timeout: float | None, log: Path) -> Any:
        """Call a function with keyword arguments in a worker.

        Args:
            function: of an importable module, or its name (see :func:`function_name`).
            timeout: seconds, or None for no limit; waiting for a free worker does not count.
            log: what the function and its children print is appended here.

        Raises:
            HilError: the function raised it; class, message, hint and detail are the function's own.
            IsolatedFailure: the function raised any other error.
            IsolatedCrash: the worker died.
            IsolatedTimeout: the limit was reached.
            ValueError: the function cannot be found by another process.
        """
        name = function_name(function)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        request = {"function": name, "args": dict(args), "log": str(log.absolute())}
        with self._slots:
            while True:
                worker, is_new = self._take()
                try:
                    reply = worker.ask(request, timeout, log)
                except _NeverBegun:
                    # It died idle, of what an earlier call left behind or by another's hand: nothing was done yet.
                    if is_new:
                        raise
                except BaseException as error:
                    worker.kill()
                    if isinstance(error, KeyboardInterrupt):
                        self.close()
                    raise
                else:
                    return _result_of(reply, name)
                finally:
                    self._give_back(worker)

    def close(self) -> None:
        """Kill every worker and what it started; calls that still run end as crashed."""
        with self._lock:
            self.closed = True
            _end_all(self._idle, self._busy)

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self) -> tuple[_Worker, bool]:
        """A worker, and whether it was started just now."""
        with self._lock:
            if self.closed:
                raise IsolatedCrash("the worker processes have been stopped")
            worker = None
            while self._idle and worker is None:
                worker = self._idle.pop()
                if not worker.alive:
                    _end_all([worker], ())
                    worker = None
            is_new = worker is None
            if worker is None:
                worker = _Worker()
            self._busy.add(worker)
            return worker, is_new

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            self._busy.discard(worker)
            if worker.alive and not self.closed:
                self._idle.append(worker)
            else:
                worker.close_pipes()


def lent(isolated: Isolated | None, workers: int | None = None) -> contextlib.AbstractContextManager[Isolated]:
    """The pool that a caller lends, which stays open; else one of our own, which is closed in the end."""
    return Isolated(workers) if isolated is None else contextlib.nullcontext(isolated)


class _NeverBegun(IsolatedCrash):
    """The process died before it began with the call."""


class _Worker:
    def __init__(self) -> None:
        # What it writes for itself goes with it: one that is killed tidies nothing up.
        self._scratch = str(new_folder(SCRATCH))
        self._process = subprocess.Popen(
            module_command("hil.controller.storage.isolated_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment() | {"TMPDIR": self._scratch},
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
                follower.look(end=True)

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
        with contextlib.suppress(BrokenPipeError):  # it died just now: seen below as the end of its replies
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
        raise IsolatedTimeout(f"gave no result within {timeout:g} s", detail=_tail(log, log_start))

    def _read_line(self, deadline: float | None, follower: live.LogFollower | None) -> bytes | None:
        """The next line, nothing at the end of all of them, None when time is up."""
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            seen = 0
            while (end := self._received.find(b"\n", seen)) < 0:
                seen = len(self._received)
                if seen > _MOST_BYTES:
                    raise IsolatedCrash(f"its process sent more than {_MOST_BYTES >> 20} MiB in one answer")
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if follower is not None:
                    follower.look()
                    if not selector.select(_LOOK_S if left is None else min(left, _LOOK_S)):
                        if left is None or left > _LOOK_S:
                            continue
                        return None
                elif not selector.select(left):
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
            code = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if killed:
            return "its process was stopped"
        if code is None:
            return "its process closed its pipe and went on running"
        return f"its process died of {signal_name(-code)}" if code < 0 else f"its process exited with code {code}"

    def kill(self) -> None:
        """End the worker and all that it started. Once: afterwards its process group may be another's."""
        first, self._killed = not self._killed, True
        if first:
            signal_group(self._process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        remove_tree(Path(self._scratch))

    def close_pipes(self) -> None:
        """Give the pipes back. Only when nobody waits on them: a wait on a closed descriptor never ends."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _end_all(idle: list[_Worker], busy: Collection[_Worker]) -> None:
    for worker in (*idle, *busy):
        worker.kill()
    for worker in idle:
        worker.close_pipes()
    idle.clear()


def _environment() -> dict[str, str]:
    """The worker finds the same hil as we do, and nothing in the folder it happens to be started from."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}


def _tail(log: Path, start: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


def _reply(line: bytes) -> dict[str, Any]:
    """What a process answered, which may be anything: a compiler runs in it on a model that may be anything."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict) and ("result" in reply or _is_error(reply.get("error"))):
        return reply
    raise IsolatedCrash("its process sent an answer that is none")


def _is_error(error: Any) -> bool:
    return isinstance(error, dict) and all(isinstance(error.get(key), str) for key in ("class", *ERROR_FIELDS))


def _result_of(reply: dict[str, Any], function: str) -> Any:
    error = reply.get("error")
    if error is None:
        return reply["result"]
    message, *others = (error[key] for key in ERROR_FIELDS)
    raise _error_class(error["class"], function)(message, **dict(zip(ERROR_FIELDS[1:], others, strict=True)))


def _error_class(name: str, function: str) -> type[HilError]:
    """An error by its name where it is one of hil's, or of the function's package: others are failures."""
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] not in ("hil", function.partition(":")[0].partition(".")[0]):
        return IsolatedFailure
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except (ImportError, ValueError):
        return IsolatedFailure
    return kind if isinstance(kind, type) and issubclass(kind, HilError) else IsolatedFailure
