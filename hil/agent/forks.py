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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.agent import ipc
from hil.core.named import resolve
from hil.core.processes import (
    ForkedChild,
    adopt_descendants,
    end_children,
    module_command,
    signal_group,
    wait_or_kill,
)
from hil.errors import BoardError, HilError, LoadFailed

# How long a runtime that does not work is taken at its word.
_RETRY_S = 30.0
_FORK_S = 30.0
# The first worker waits until the runtime's library is imported: PyTorch's takes a small board a minute.
_PRELOAD_S = 300.0
_STOP_S = 5.0
_MOST_DEVICES = 1000
_MOST_TEXT = 4096
_NEWS_BYTES = 16 << 10
# The fork servers of this process: of its other children those are ended that came to it when one died.
_starting = threading.Lock()
_servers: set[int] = set()
_adopts = False


def adopt() -> None:
    """Have this process end what a fork server that died left behind. It must have no children of its own making but
    fork servers."""
    global _adopts
    _adopts = adopt_descendants()


def _end_orphans(pid: int) -> None:
    with _starting:
        _servers.discard(pid)
        if _adopts:
            end_children(_servers)


@dataclass(eq=False)
class _News:
    """What a fork server has reported."""

    pids: collections.deque[int | str] = field(default_factory=collections.deque)  # workers, or why there is none
    watching: dict[int, Callable[[int], None]] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)  # how workers ended that nobody watched yet


def read_description(described: Any) -> dict[str, Any]:
    """What a runtime says of itself, or as an error that it says nothing that can be passed on."""
    texts = ("version", "error", "profile_tool")
    devices = described.get("devices", []) if isinstance(described, dict) else None
    if not isinstance(devices, (list, tuple)) or len(devices) > _MOST_DEVICES:
        return {"error": "it describes itself in another way than runtimes do"}
    if not all(_is_text(one) for one in (*devices, *(described.get(key, "") for key in texts))):
        return {"error": "it describes itself in texts that are none, or are far too long"}
    return dict(described)


def read_news(body: bytes) -> tuple[int | str, int | None]:
    """A fork server's message: a worker's number (or why there is none), and the status that it ended with, if it did.

    Raises:
        Garbled: it is no such message.
    """
    news = ipc.decode(body)
    if isinstance(news, dict):
        if _is_text(news.get("failed")):
            return str(news["failed"]), None
        pid, status = news.get("pid", news.get("exited")), news.get("status")
        # Signals go to it: a small number, or none above 0, would be somebody else's or everybody's.
        if type(pid) is int and 1 < pid < 1 << 31 and (type(status) is int or ("pid" in news and status is None)):
            return pid, status
    raise ipc.Garbled("it tells of no worker")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT and value.encode(errors="replace").decode() == value


def _become_server(control: socket.socket, reference: str, memory_limit: int) -> None:
    """In a child that was forked ahead: what the agent has open is closed, then orders are served until the end."""
    from hil.agent import forkserver

    os.setsid()
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    # Among it are the other ends of the channels to fork servers that were forked before this one.
    fd = control.fileno()
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    forkserver.serve(control, reference, memory_limit)


class ForkServer:
    """The process that forks workers for one runtime; started anew if it dies.

    Args:
        light: the class can be asked here what it is, and the process waits until it is needed.
        memory_limit: most bytes that a program may take; 0 is the machine's memory.
    """

    def __init__(self, reference: str, *, light: bool = False, memory_limit: int = 0) -> None:
        self._reference = reference
        self._light = light
        self._memory_limit = memory_limit
        # One fork at a time: the answers come in order, but whoever waits is not woken in order.
        self._forking = threading.Lock()
        self._lock = threading.Lock()
        self._channel: ipc.Channel | None = None
        self._news = _News()
        self._forked = threading.Condition(self._lock)
        self._process: subprocess.Popen[bytes] | ForkedChild | None = None
        # One that was forked ahead, and has not said yet what its runtime is.
        self._ahead: tuple[ipc.Channel, ForkedChild] | None = None
        # Whether it has forked yet: until then it may still be importing.
        self._awake = False
        self.described: dict[str, Any] = {}
        self._failed_at = -math.inf
        self._is_over = False

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
            self.described = read_description(resolve(self._reference).describe())
        except Exception as error:
            self._failed_at = time.monotonic()
            self.described = {"error": f"{type(error).__name__}: {error}"}
        return self.described

    def fork_ahead(self) -> None:
        """Fork it from this process, which must have one thread: what is imported here it need not import."""
        # Where there is no room for it, :meth:`start` tries again, and tells.
        with contextlib.suppress(OSError):
            sock, theirs = socket.socketpair()
            with theirs:
                process = ForkedChild(lambda: _become_server(theirs, self._reference, self._memory_limit))
            _servers.add(process.pid)
            self._ahead = ipc.Channel(sock), process

    def start(self) -> dict[str, Any]:
        """Start it if it is not running; returns what the runtime says of itself (or ``{"error": ...}``)."""
        with self._lock:
            if self._is_over:
                return {"error": "the agent ends"}
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
            return {"error": f"its process cannot be started: {error.strerror}"}
        self._process = process
        try:
            described = read_description(ours.receive(timeout=120))
        except ipc.Garbled:
            described = {"error": "it describes itself at far too great length"}
        except (ipc.Closed, ipc.Late):
            described = {"error": "the runtime's process died while importing it"}
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
        """Start its process as a program of its own."""
        sock, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), self._reference, str(self._memory_limit)]
        try:
            with theirs, _starting:
                process = subprocess.Popen(
                    module_command("hil.agent.forkserver", *arguments),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    # numpy's BLAS would start threads, and a fork copies none of them.
                    env={key: value for key, value in os.environ.items() if value} | {"OPENBLAS_NUM_THREADS": "1"},
                )
                _servers.add(process.pid)
        except OSError:
            sock.close()
            raise
        return ipc.Channel(sock), process

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
            process, news = self._process, self._news
            try:
                self._channel.send({"fork": True}, fds)
            except ipc.Closed as error:
                raise self._died() from error
            limit = _FORK_S if self._awake else _PRELOAD_S

            def is_over() -> bool:
                return self._channel is None or self._news is not news

            ended = self._forked.wait_for(lambda: news.pids or is_over(), timeout=limit)
            if ended and not news.pids and not self._awake:
                raise self._died()
            if is_over() or not news.pids:
                # An answer that came late would be taken for the next worker's: there must be none.
                process.kill()
                self._forked.wait_for(is_over, timeout=_FORK_S)
                raise BoardError("the agent's fork server does not answer")
            self._awake = True
            pid = news.pids.popleft()
            if isinstance(pid, str):
                raise BoardError(f"the board has no room for another process: {pid}")
            status = news.ended.pop(pid, None)
            if status is None:
                news.watching[pid] = on_exit
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
        """End it until a worker is needed again; not where one is needed just now."""
        if self._forking.acquire(blocking=False):
            try:
                self.stop()
            finally:
                self._forking.release()

    def close(self) -> None:
        """End it for good."""
        with self._lock:
            self._is_over = True
        self.stop()

    def stop(self) -> None:
        """End it, and with it every worker."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
            channel, process = ahead or (self._channel, self._process)
            self._channel = self._process = None
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.sock.shutdown(socket.SHUT_RDWR)
        if process is not None:
            wait_or_kill(process, _STOP_S)
        if ahead is not None:  # nobody listens to it
            ahead[0].close()
            _end_orphans(ahead[1].pid)

    def _listen(self, channel: ipc.Channel, news: _News, process: subprocess.Popen[bytes] | ForkedChild) -> None:
        try:
            while True:
                pid, status = read_news(channel.receive_bytes(most_bytes=_NEWS_BYTES))
                on_exit = None
                with self._lock:
                    if isinstance(pid, str) or status is None:
                        if news.pids:
                            raise ipc.Garbled("it tells of workers that nobody asked for")
                        news.pids.append(pid)
                        self._forked.notify_all()
                    elif (on_exit := news.watching.pop(pid, None)) is None and pid in news.pids:
                        news.ended[pid] = status
                if on_exit is not None and status is not None:
                    on_exit(status)
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
        wait_or_kill(process, _STOP_S)
        _end_orphans(process.pid)
        for on_exit in orphans.values():
            # Nobody else would ever tell: a worker that was kept ready would be taken for one that lives.
            on_exit(-signal.SIGKILL)
        channel.close()
