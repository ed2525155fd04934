"""The agent's side of the fork servers, which workers come from (see :mod:`hil.agent.forkserver`)."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from hil.agent import framing
from hil.agent.runtimes import resolve
from hil.errors import BoardError, HilError, LoadFailed
from hil.python_module import module_command

# How long a runtime that does not work is taken at its word.
_RETRY_S = 30.0
_FORK_S = 30.0
# The first worker waits until the runtime's library is imported: PyTorch's takes a small board a minute.
_PRELOAD_S = 300.0


class _Told:
    """What one such process has told: the workers that it started, and how those ended that nobody watched yet."""

    def __init__(self) -> None:
        self.pids: collections.deque[int] = collections.deque()
        self.watching: dict[int, Callable[[int], None]] = {}
        self.ended: dict[int, int] = {}


class ForkServer:
    """The process that forks workers for one runtime; started anew if it dies.

    Args:
        reference: the runtime's class, ``module:Class``.
        light: the class can be asked here what it is, and the process waits until it is needed.
    """

    def __init__(self, reference: str, *, light: bool = False) -> None:
        self._reference = reference
        self._light = light
        # One fork at a time: the answers come in order, but whoever waits is not woken in order.
        self._forking = threading.Lock()
        self._lock = threading.Lock()
        self._channel: framing.Channel | None = None
        self._told = _Told()
        self._forked = threading.Condition(self._lock)
        self._process: subprocess.Popen[bytes] | None = None
        # Whether it has forked yet: until then it may still be importing.
        self._awake = False
        self.described: dict[str, Any] = {}
        self._failed_at = -math.inf

    def describe(self) -> dict[str, Any]:
        """What the runtime says of itself. One that did not work is tried again now and then."""
        if self.is_known:
            return self.described
        return self._ask_here() if self._light else self.start()

    @property
    def is_known(self) -> bool:
        """Whether :meth:`describe` starts nothing."""
        if "error" in self.described:
            return time.monotonic() - self._failed_at < _RETRY_S
        return bool(self.described)

    def _ask_here(self) -> dict[str, Any]:
        try:
            self.described = resolve(self._reference).describe()
        except Exception as error:
            self._failed_at = time.monotonic()
            self.described = {"error": f"{type(error).__name__}: {error}"}
        return self.described

    def start(self) -> dict[str, Any]:
        """Start it if it is not running; returns what the runtime says of itself (or ``{"error": ...}``)."""
        with self._lock:
            if self._channel is None:
                sock, theirs = socket.socketpair()
                ours = framing.Channel(sock)
                # numpy's BLAS would start threads, and a fork copies none of them.
                env = {
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
                }
                env = {key: value for key, value in env.items() if value}
                try:
                    self._process = subprocess.Popen(
                        module_command("hil.agent.forkserver", str(theirs.fileno()), self._reference),
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                        env=env,
                    )
                except OSError as error:
                    ours.close()
                    self._failed_at = time.monotonic()
                    self.described = {"error": f"its process cannot be started: {error.strerror}"}
                    return self.described
                finally:
                    theirs.close()
                try:
                    self.described = ours.receive(timeout=120)
                except (framing.Closed, framing.Late):
                    self.described = {"error": "the runtime's process died while importing it"}
                if "error" in self.described:
                    self._failed_at = time.monotonic()
                    ours.close()
                    self._process.kill()
                    self._process.wait()
                    return self.described
                self._channel = ours
                self._told = _Told()
                self._awake = False
                threading.Thread(target=self._listen, args=(ours, self._told), daemon=True, name="forkserver").start()
            return self.described

    def fork(self, fds: list[int], on_exit: Callable[[int], None]) -> int:
        """A new worker that has these descriptors; ``on_exit`` is called with its exit code.

        Raises:
            LoadFailed: the runtime, or its library, cannot be imported here.
            BoardError: no process could be started.
        """
        with self._forking:
            described = self.start()
            if "error" in described:
                raise LoadFailed(f"the runtime does not work on this board: {described['error']}")
            return self._fork(fds, on_exit)

    def _fork(self, fds: list[int], on_exit: Callable[[int], None]) -> int:
        with self._lock:
            if self._channel is None or self._process is None:
                raise self._died()
            process, told = self._process, self._told
            try:
                self._channel.send({"fork": True}, fds)
            except framing.Closed as error:
                raise self._died() from error
            limit = _FORK_S if self._awake else _PRELOAD_S

            def is_over() -> bool:
                return self._channel is None or self._told is not told

            ended = self._forked.wait_for(lambda: told.pids or is_over(), timeout=limit)
            if ended and not told.pids and not self._awake:
                raise self._died()
            if is_over() or not told.pids:
                # An answer that came late would be taken for the next worker's: there must be none.
                process.kill()
                self._forked.wait_for(is_over, timeout=_FORK_S)
                raise BoardError("the agent's fork server does not answer")
            self._awake = True
            pid = told.pids.popleft()
            status = told.ended.pop(pid, None)
            if status is None:
                told.watching[pid] = on_exit
        if status is not None:
            on_exit(status)
        return pid

    def _died(self) -> HilError:
        """Why it is gone: in an import, of the runtime's own; it may also have been stopped."""
        if self._awake or self._process is None:
            return BoardError("the agent's fork server died")
        return LoadFailed(
            "the runtime does not work on this board: its process died while importing its library",
            hint="the memory may be too small for it, or the CPU lacks instructions that it uses",
        )

    def rest(self) -> None:
        """End it, and with it every worker, until one is needed again; not where one is needed just now."""
        if self._forking.acquire(blocking=False):
            try:
                self.stop()
            finally:
                self._forking.release()

    def stop(self) -> None:
        """End it, and with it every worker."""
        with self._lock:
            channel, self._channel = self._channel, None
            process, self._process = self._process, None
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)
        if process is not None:
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _listen(self, channel: framing.Channel, told: _Told) -> None:
        try:
            while True:
                message = channel.receive()
                with self._lock:
                    if "pid" in message:
                        told.pids.append(message["pid"])
                        self._forked.notify_all()
                        continue
                    pid, status = message["exited"], message["status"]
                    on_exit = told.watching.pop(pid, None)
                    if on_exit is None:
                        told.ended[pid] = status
                if on_exit is not None:
                    on_exit(status)
        except framing.Closed:
            with self._lock:
                if self._channel is channel:
                    self._channel = None
                orphans, told.watching = told.watching, {}
                self._forked.notify_all()
            for pid, on_exit in orphans.items():
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                # Nobody else would ever tell: a worker that was kept ready would be taken for one that lives.
                on_exit(-signal.SIGKILL)
            channel.close()
