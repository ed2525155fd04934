"""Manage the fork servers from the agent (see :mod:`hil.agent.forkserver`). Fork servers start the workers."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.agent import ipc
from hil.core.disk_faults import find_noexec_folder, make_noexec_error
from hil.core.named import resolve
from hil.core.processes import (
    ExitStatus,
    ForkedChild,
    adopt_descendants,
    end_children,
    make_module_command,
    signal_group,
    wait_or_kill,
)
from hil.errors import BoardError, BoardUnfit, HilError

# Seconds before a failed runtime is retried.
_RETRY_SECONDS = 30.0
_FORK_SECONDS = 30.0
# The first worker waits until the runtime's library is imported. Importing PyTorch takes a minute on a small board.
_PRELOAD_SECONDS = 300.0
_STOP_SECONDS = 5.0
_MAX_DEVICES = 1000
_MAX_TEXT = 4096
# Keys of a device in a description, and the number of its properties.
_DEVICE_TEXTS = frozenset({"id", "name", "type", "driver"})
_MAX_PROPERTIES = 100
_NEWS_BYTES = 16 << 10
# This process's fork servers. All other children are orphans of a dead fork server and are killed.
_starting = threading.Lock()
_servers: set[int] = set()
_adopts = False


def adopt_orphans() -> None:
    """Adopt and kill the descendants of fork servers that died.

    This process must not have any children except fork servers.
    """
    global _adopts
    _adopts = adopt_descendants()


def _end_orphans(pid: int) -> None:
    with _starting:
        _servers.discard(pid)
        if _adopts:
            end_children(_servers)


@dataclass(eq=False)
class _News:
    """Messages from one fork server."""

    pids: collections.deque[int | str] = field(
        default_factory=collections.deque
    )  # new worker ids, or the error of a failed fork
    watching: dict[int, Callable[[ExitStatus], None]] = field(default_factory=dict)
    ended: dict[int, ExitStatus] = field(
        default_factory=dict
    )  # exit status of workers that ended before on_exit was registered


def read_description(described: Any) -> dict[str, Any]:
    """Validate a runtime's description. Return ``{"error": ...}`` if it is malformed or too long."""
    texts = ("version", "error", "profile_tool")
    devices = described.get("devices", []) if isinstance(described, dict) else None
    if not isinstance(devices, (list, tuple)) or len(devices) > _MAX_DEVICES:
        return {"error": "invalid runtime description"}
    if not all(_is_text(one) for one in (*devices, *(described.get(key, "") for key in texts))):
        return {"error": "invalid or oversized text in the runtime description"}
    details = described.get("device_details", [])
    if not isinstance(details, list) or len(details) > _MAX_DEVICES or not all(map(_is_device, details)):
        return {"error": "invalid device in the runtime description"}
    return dict(described)


def _is_device(details: Any) -> bool:
    if not isinstance(details, dict) or details.keys() - {"properties"} - _DEVICE_TEXTS:
        return False
    properties = details.get("properties", {})
    if not isinstance(properties, dict) or len(properties) > _MAX_PROPERTIES:
        return False
    texts = [*(details.get(key, "") for key in _DEVICE_TEXTS), *properties, *properties.values()]
    return all(map(_is_text, texts))


def read_news(body: bytes) -> tuple[int | str, ExitStatus | None]:
    """Parse a fork server's message.

    Return the worker's process id, or the error of a failed fork, and the exit status.

    Raises:
        Garbled: the message is invalid.
    """
    news = ipc.decode(body)
    if isinstance(news, dict):
        if _is_text(news.get("failed")):
            return str(news["failed"]), None
        pid, status, peak = news.get("pid", news.get("exited")), news.get("status"), news.get("peak", 0)
        # The agent sends signals to this process id: 1, 0 or a negative number would address other processes.
        if type(pid) is int and 1 < pid < 1 << 31:
            if type(status) is int and type(peak) is int and 0 <= peak < 1 << 62:
                return pid, ExitStatus(status, peak)
            if "pid" in news and status is None:
                return pid, None
    raise ipc.Garbled("missing worker")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT and value.encode(errors="replace").decode() == value


def _become_server(control: socket.socket, reference: str, memory_limit: int) -> None:
    """Run a fork server in a forked child: close the agent's file descriptors, then serve orders until the end."""
    from hil.agent import forkserver

    os.setsid()
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # Close all other file descriptors, including the agent's ends of the channels to earlier fork servers.
    fd = control.fileno()
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    forkserver.serve(control, reference, memory_limit)


def _import_error(reason: str) -> BoardUnfit:
    """Return the error for a runtime that cannot be imported."""
    if folder := find_noexec_folder(sys.path):
        error = make_noexec_error(folder)
        error.detail = reason
        return error
    return BoardUnfit(
        f"the runtime does not work on this board: {reason}",
        hint="reinstall the runtime on the board (hil board deploy ADDRESS --runtime NAME), and test it with "
        "hil board check",
    )


class ForkServer:
    """Process that forks workers for one runtime. A dead process is restarted on demand.

    Args:
        reference: runtime class as ``MODULE:CLASS``.
        light: the class can be imported and described in the agent, so the process starts only on demand.
        memory_limit: maximum memory of a program in bytes; 0 means the machine's memory.
    """

    def __init__(self, reference: str, *, light: bool = False, memory_limit: int = 0) -> None:
        self._reference = reference
        self._light = light
        self._memory_limit = memory_limit
        # Allow one fork at a time: responses arrive in order, but waiting threads do not wake up in order.
        self._forking = threading.Lock()
        self._lock = threading.Lock()
        self._channel: ipc.Channel | None = None
        self._news = _News()
        self._forked = threading.Condition(self._lock)
        self._process: subprocess.Popen[bytes] | ForkedChild | None = None
        # A process that was forked in advance and has not described the runtime yet.
        self._ahead: tuple[ipc.Channel, ForkedChild] | None = None
        # Whether the process has forked a worker; before that, the process may still be importing the runtime.
        self._awake = False
        self.described: dict[str, Any] = {}
        self._failed_at = -math.inf
        self._is_over = False

    def describe(self) -> dict[str, Any]:
        """Return the runtime's description. A runtime that failed is retried after ``_RETRY_SECONDS``."""
        if self.is_known:
            return self.described
        return self._ask_here() if self._light else self.start()

    @property
    def is_known(self) -> bool:
        """Whether :meth:`describe` returns without starting a process."""
        if "error" in self.described:
            return time.monotonic() - self._failed_at < _RETRY_SECONDS
        return bool(self.described)

    def _ask_here(self) -> dict[str, Any]:
        try:
            self.described = read_description(resolve(self._reference).describe())
        except Exception as error:
            self._failed_at = time.monotonic()
            self.described = {"error": f"{type(error).__name__}: {error}"}
        return self.described

    def fork_ahead(self) -> None:
        """Fork the process from the agent, which must have a single thread.

        The forked process inherits the imported modules.
        """
        # If the fork fails, :meth:`start` retries and reports the error.
        with contextlib.suppress(OSError):
            sock, theirs = socket.socketpair()
            with theirs:
                process = ForkedChild(lambda: _become_server(theirs, self._reference, self._memory_limit))
            _servers.add(process.pid)
            self._ahead = ipc.Channel(sock), process

    def start(self) -> dict[str, Any]:
        """Start the process if it is not running. Return the runtime's description, or ``{"error": ...}``."""
        with self._lock:
            if self._is_over:
                return {"error": "the agent is stopping"}
            if self._channel is None:
                self.described = self._launch()
                if "error" in self.described:
                    self._failed_at = time.monotonic()
            return self.described

    def _launch(self) -> dict[str, Any]:
        ahead, self._ahead = self._ahead, None
        try:
            ours, process = ahead or self._execute()
        except OSError as error:
            return {"error": f"cannot start the runtime's process: {error.strerror}"}
        self._process = process
        try:
            described = read_description(ours.receive(timeout=120))
        except ipc.Garbled:
            described = {"error": "oversized runtime description"}
        except (ipc.Closed, ipc.Late):
            described = {"error": "the process died while importing the runtime"}
        if "error" in described:
            ours.close()
            process.kill()
            process.wait()
            _end_orphans(process.pid)
            return described
        self._channel, self._news, self._awake = ours, _News(), False
        listened = (ours, self._news, process)
        threading.Thread(target=self._listen, args=listened, daemon=True, name="forkserver").start()
        return described

    def _execute(self) -> tuple[ipc.Channel, subprocess.Popen[bytes]]:
        """Start the process as a separate program."""
        sock, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), self._reference, str(self._memory_limit)]
        try:
            with theirs, _starting:
                process = subprocess.Popen(
                    make_module_command("hil.agent.forkserver", *arguments),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    # numpy's BLAS would start threads, and a fork does not copy threads.
                    env={key: value for key, value in os.environ.items() if value} | {"OPENBLAS_NUM_THREADS": "1"},
                )
                _servers.add(process.pid)
        except OSError:
            sock.close()
            raise
        return ipc.Channel(sock), process

    def fork(self, fds: list[int], on_exit: Callable[[ExitStatus], None]) -> int:
        """Fork a worker with these file descriptors and return the process id.

        ``on_exit`` is called after the worker has ended.

        Raises:
            BoardUnfit: the runtime cannot be imported, or the system cannot start a process.
            BoardError: the fork server does not respond.
        """
        with self._forking:
            described = self.start()
            if "error" in described:
                raise _import_error(str(described["error"]))
            return self._fork(fds, on_exit)

    def _fork(self, fds: list[int], on_exit: Callable[[ExitStatus], None]) -> int:
        with self._lock:
            if self._channel is None or self._process is None:
                raise self._make_death_error()
            process, news = self._process, self._news
            try:
                self._channel.send({"fork": True}, fds)
            except ipc.Closed as error:
                raise self._make_death_error() from error
            limit = _FORK_SECONDS if self._awake else _PRELOAD_SECONDS

            def is_over() -> bool:
                return self._channel is None or self._news is not news

            has_news = self._forked.wait_for(lambda: news.pids or is_over(), timeout=limit)
            if has_news and not news.pids and not self._awake:
                raise self._make_death_error()
            if is_over() or not news.pids:
                # Kill the process: a late response would be mistaken for the response of the next worker.
                process.kill()
                self._forked.wait_for(is_over, timeout=_FORK_SECONDS)
                raise BoardError("the agent's fork server does not respond")
            self._awake = True
            pid = news.pids.popleft()
            if isinstance(pid, str):
                raise BoardUnfit(
                    f"the board cannot start a new process: {pid}",
                    hint="stop other processes on the board, or raise the limits of hil's user (ulimit -u)",
                )
            ended = news.ended.pop(pid, None)
            if ended is None:
                news.watching[pid] = on_exit
        if ended is not None:
            on_exit(ended)
        return pid

    def _make_death_error(self) -> HilError:
        """Return the error for a dead fork server. Before the first fork, the runtime's import is the cause."""
        if self._awake or self._process is None:
            return BoardError("the agent's fork server died")
        return BoardUnfit(
            "the runtime does not work on this board: the process died while importing the library",
            hint="the board may lack memory, or the CPU may lack instructions that the library uses",
        )

    def pause(self) -> None:
        """Stop the process until a worker is needed, unless a fork is in progress."""
        if self._forking.acquire(blocking=False):
            try:
                self.stop()
            finally:
                self._forking.release()

    def close(self) -> None:
        """Stop the process permanently."""
        with self._lock:
            self._is_over = True
        self.stop()

    def stop(self) -> None:
        """Stop the process and all its workers."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
            channel, process = ahead or (self._channel, self._process)
            self._channel = self._process = None
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)
        if process is not None:
            wait_or_kill(process, _STOP_SECONDS)
        if ahead is not None:  # this channel has no listener thread
            ahead[0].close()
            _end_orphans(ahead[1].pid)

    def _listen(self, channel: ipc.Channel, news: _News, process: subprocess.Popen[bytes] | ForkedChild) -> None:
        try:
            while True:
                pid, ended = read_news(channel.receive_bytes(most_bytes=_NEWS_BYTES))
                on_exit = None
                with self._lock:
                    if isinstance(pid, str) or ended is None:
                        if news.pids:
                            raise ipc.Garbled("the response refers to unknown workers")
                        news.pids.append(pid)
                        self._forked.notify_all()
                    elif (on_exit := news.watching.pop(pid, None)) is None and pid in news.pids:
                        news.ended[pid] = ended
                if on_exit is not None and ended is not None:
                    on_exit(ended)
        except ipc.Garbled:
            process.kill()
        except ipc.Closed:
            pass
        with self._lock:
            if self._channel is channel:
                self._channel = None
            orphans, news.watching = news.watching, {}
            self._forked.notify_all()
        for pid in orphans:
            signal_group(pid)
        wait_or_kill(process, _STOP_SECONDS)
        _end_orphans(process.pid)
        for on_exit in orphans.values():
            # Report these workers as killed, because the dead fork server cannot. Otherwise, hil would consider dead
            # idle workers alive.
            on_exit(ExitStatus(-signal.SIGKILL))
        channel.close()
