"""Processes that are kept: started again when they die, ended in order, found again after their keeper was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hil.core.files import write_atomic

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# Who lived so long died of something new.
_STEADY_S = 60.0
_STOP_S = 15.0
_LARGEST_LOG = 10 << 20


class Kept:
    """A process that is started again when it dies, later and later where it does so at once.

    Args:
        name: for people, and of its files.
        command: what to start.
        environment: for it.
        folder: where its log goes, and a note of which process it is.
        say: told when it died.
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

    @property
    def pid(self) -> int | None:
        """The process, where it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start it; what an earlier keeper left of it is ended first."""
        end_noted(self._note)
        if self.log.exists() and self.log.stat().st_size > _LARGEST_LOG:
            self.log.replace(self.log.with_suffix(".old"))
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C is ours, and we end it in order.
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
        write_atomic(self._note, json.dumps({"pid": pid, "born": born(pid)}))

    def look(self) -> bool:
        """Start it again where it died and its pause is over; whether it runs."""
        if self._process is None:
            if time.monotonic() >= self._next:
                self._start_again()
        elif (code := self._process.poll()) is not None:
            lived = time.monotonic() - self._began
            self._pause_s = _FIRST_PAUSE_S if lived > _STEADY_S else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._say(f"the {self.name} {how_ended(code)}; it starts again in {self._pause_s:g} s (see {self.log})")
            self._process, self._next = None, time.monotonic() + self._pause_s
        return self.pid is not None

    def _start_again(self) -> None:
        try:
            self.start()
        except OSError as error:  # the disk is full, or there are too many processes: that passes
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._next = time.monotonic() + self._pause_s
            self._say(f"the {self.name} does not start: {error}; it is tried again in {self._pause_s:g} s")

    def stop(self) -> None:
        """End it, with all that it started."""
        if self._process is not None:
            _end(self._process.pid, self._process.poll)
            self._process = None
        self._note.unlink(missing_ok=True)

    def tail(self, lines: int = 12) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


def end_noted(note: Path) -> None:
    """End the process that a note names, if it is still that one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads(note.read_text())
        pid, was = int(said["pid"]), str(said["born"])
        if was and born(pid) == was:
            _end(pid, lambda: None if born(pid) == was else 0)
    note.unlink(missing_ok=True)


def born(pid: int) -> str:
    """What tells a process from a later one of the same number; "" where there is none, or it has ended."""
    if Path("/proc/self/stat").exists():
        try:
            words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return ""
        return "" if words[0] in (b"Z", b"X") else words[19].decode()
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()


def _end(pid: int, poll: Callable[[], int | None]) -> None:
    """Ask a session's leader to end, then make it and whatever it left."""
    for how, wait_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if how is signal.SIGTERM:
                # One that is stopped would not hear it.
                os.killpg(pid, signal.SIGCONT)
                os.kill(pid, how)
            else:
                os.killpg(pid, how)
        deadline = time.monotonic() + wait_s
        while poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if poll() is not None:
            break
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def how_ended(code: int) -> str:
    """What an exit code, negative for a signal, says to people."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'}"
