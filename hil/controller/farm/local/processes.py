"""Supervise processes: restart commands, and children forked from a parent that has imported all modules.

The forking process creates neither threads nor gRPC objects, which do not survive a fork. Each child's stdin is a
pipe from the parent. The pipe closes when the parent ends for any reason.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.core.files import MAX_LOG_BYTES, read_end, read_file, write_atomic
from hil.core.processes import ForkedChild, exit_text, signal_group
from hil.errors import EXIT_USAGE

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# After this uptime, a crash resets the restart delay.
_STEADY_SECONDS = 60.0
_STOP_SECONDS = 15.0
_MAX_LOG = 10 << 20


class SupervisedProcess:
    """Process that is restarted when it dies, with a growing delay after early crashes.

    ``folder`` contains a log and a PID file, which identifies a leftover process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._note = folder / f"{name}.pid"
        self._command, self._environment, self._say = list(command), dict(environment), say
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._next = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._log_start = 0
        self.usage_error = ""  # message of a process that ended because of invalid settings

    @property
    def pid(self) -> int | None:
        """PID of the process, or None if the process does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start the process. A leftover process of an earlier supervisor is ended first."""
        end_noted(self._note)
        if self.log.exists() and self.log.stat().st_size > _MAX_LOG:
            self.log.replace(self.log.with_suffix(".old"))
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            # Start a separate session, so that Ctrl-C reaches only this process, which then stops the children in
            # order.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._began = time.monotonic()
        pid = self._process.pid
        write_atomic(self._note, json.dumps({"pid": pid, "born": start_time(pid)}))

    def check(self) -> bool:
        """Restart a dead process after the delay. Returns True if it runs."""
        if self._process is None:
            if time.monotonic() >= self._next:
                self._try_restart()
        elif (code := self._process.poll()) is not None:
            lived = time.monotonic() - self._began
            self._pause_s = _FIRST_PAUSE_S if lived > _STEADY_SECONDS else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._say(f"the {self.name} {exit_text(code)}; restarting in {self._pause_s:g} s (see {self.log})")
            self._process, self._next = None, time.monotonic() + self._pause_s
            if code == EXIT_USAGE:
                self.usage_error = self._read_last_log()
                self._say(self.usage_error)
        elif time.monotonic() - self._began > _STEADY_SECONDS:
            self.usage_error = ""
        return self.pid is not None

    def _try_restart(self) -> None:
        try:
            self.start()
        except OSError as error:  # disk full or too many processes: temporary
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._next = time.monotonic() + self._pause_s
            self._say(f"the {self.name} failed to start: {error}; retrying in {self._pause_s:g} s")

    def stop(self) -> None:
        """Stop the process and all children."""
        if self._process is not None:
            _terminate_session(self._process.pid, self._process.poll)
            self._process = None
        self._note.unlink(missing_ok=True)

    def _read_last_log(self) -> str:
        """Return the end of the output of the last process."""
        with contextlib.suppress(OSError):
            size = max(0, self.log.stat().st_size - self._log_start)
            return read_end(self.log, min(size, MAX_LOG_BYTES)).strip()
        return ""

    def tail(self, lines: int = 12) -> str:
        """Return the last lines of the log."""
        with contextlib.suppress(OSError):
            return "\n".join(read_end(self.log).splitlines()[-lines:])
        return ""


def end_noted(note: Path) -> None:
    """End the process of a PID file, unless the PID was reused."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads(read_file(note))
        pid, was = int(noted["pid"]), str(noted["born"])
        if was and start_time(pid) == was:
            _terminate_session(pid, lambda: None if start_time(pid) == was else 0)
    note.unlink(missing_ok=True)


def start_time(pid: int) -> str:
    """Return the start time of a process, which detects a reused PID; "" if the process does not exist or has ended."""
    if Path("/proc/self/stat").exists():
        try:
            words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return ""
        return "" if words[0] in (b"Z", b"X") else words[19].decode()
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()


def _terminate_session(pid: int, poll: Callable[[], int | None]) -> None:
    """Terminate a session's leader, then kill the process group."""
    for how, wait_s in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if how is signal.SIGTERM:
                # A stopped process would not handle SIGTERM.
                os.killpg(pid, signal.SIGCONT)
                os.kill(pid, how)
            else:
                os.killpg(pid, how)
        deadline = time.monotonic() + wait_s
        while poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if poll() is not None:
            break
    signal_group(pid)


_FORK_PAUSE_S, _FORK_LONGEST_PAUSE_S = 0.2, 10.0
# After this uptime, a crash resets the restart delay.
_FORK_STEADY_SECONDS = 20.0
# Above this number, children start one after another. Starting all at the same time would block the machine.
_AT_ONCE, _CPU_S = 16, 0.3
_COMM = 15
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class ForkedProcess:
    """Child process of a supervisor."""

    name: str
    main: Callable[[], None]
    log: Path | None = None  # file for stdout and stderr; None inherits the parent's
    rank: int = 0  # shutdown order: children of a lower rank stop first
    most_pause_s: float = _FORK_LONGEST_PAUSE_S  # limit of the restart delay
    process: ForkedChild | None = None  # while running
    began: float = 0.0
    pause_s: float = _FORK_PAUSE_S
    due: float = 0.0


class PreforkSupervisor:
    """Runs child processes and restarts those that end. Use it in the main thread."""

    def __init__(self, children: Sequence[ForkedProcess], say: Callable[[str], None], stop_s: float = 10.0) -> None:
        self._children, self._say, self._stop_s = list(children), say, stop_s
        self._stopping = False
        self._alive_read, self._alive_write = os.pipe()
        self._wake_read, self._wake_write = socket.socketpair()

    def run(self) -> None:
        """Run the children. SIGTERM, SIGINT or SIGHUP stops the children, and the method returns."""
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _SIGNALS:
            signal.signal(number, self._handle_signal)
        apart_s = _CPU_S / (os.cpu_count() or 1)
        for place, child in enumerate(self._children):
            child.due = time.monotonic() + max(place - _AT_ONCE, 0) * apart_s
        gc.collect()
        gc.freeze()
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_read, selectors.EVENT_READ)
                while not self._stopping:
                    self._start_due()
                    selector.select(self._get_seconds_to_next_start())
                    self._reap_ended()
        finally:
            self._stop_children()

    def _handle_signal(self, *_: object) -> None:
        self._stopping = True

    def _get_seconds_to_next_start(self) -> float | None:
        waiting = [child.due for child in self._children if child.process is None]
        return max(min(waiting) - time.monotonic(), 0.0) if waiting else None

    def _start_due(self) -> None:
        for child in self._children:
            if child.process is None and time.monotonic() >= child.due and not self._stopping:
                child.began = time.monotonic()
                child.process = ForkedChild(functools.partial(self._run_child, child))

    def _reap_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        for child in self._children:
            if child.process is not None and (code := child.process.poll()) is not None:
                self._reap_child(child, child.process)
                if not self._stopping:
                    self._say(f"{child.name} {exit_text(code)}; restarting in {child.pause_s:g} s")

    def _reap_child(self, child: ForkedProcess, process: ForkedChild) -> None:
        # Also kill the child's process group.
        signal_group(process.pid)
        child.process = None
        lived = time.monotonic() - child.began
        child.pause_s = _FORK_PAUSE_S if lived > _FORK_STEADY_SECONDS else min(child.pause_s * 2, child.most_pause_s)
        child.due = time.monotonic() + child.pause_s

    def _stop_children(self) -> None:
        for rank in sorted({child.rank for child in self._children}):
            running = [(one, one.process) for one in self._children if one.process is not None and one.rank == rank]
            for how, wait_s in ((signal.SIGTERM, self._stop_s), (signal.SIGKILL, 5.0)):
                for _, process in running:
                    with contextlib.suppress(OSError):
                        os.kill(process.pid, signal.SIGCONT)
                        os.kill(process.pid, how)
                deadline = time.monotonic() + wait_s
                while running and time.monotonic() < deadline:
                    for child, process in [one for one in running if one[1].poll() is not None]:
                        self._reap_child(child, process)
                        running.remove((child, process))
                    time.sleep(0.01)
        signal.set_wakeup_fd(-1)

    def _run_child(self, child: ForkedProcess) -> None:
        """In the forked child: create a session, then run the child's main function."""
        os.setsid()
        with contextlib.suppress(OSError):  # name for ps and top, on Linux
            Path("/proc/self/comm").write_text(child.name[-_COMM:])
        signal.set_wakeup_fd(-1)
        for number in (*_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if self._stopping:  # the signal arrived before the default handlers were restored
            return
        self._wake_read.close()
        self._wake_write.close()
        os.close(self._alive_write)
        os.dup2(self._alive_read, 0)
        os.close(self._alive_read)
        if child.log is not None:
            log = os.open(child.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
        child.main()


def make_module_main(module: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Return a function for a child that runs `python -m MODULE ARGUMENTS`."""

    def run() -> None:
        sys.argv = [module, *arguments]
        importlib.import_module(module).main()

    return run


def end_with_parent() -> None:
    """In a child: kill the process group when the parent ends."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        with contextlib.suppress(OSError):
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()
