"""Processes of ours: the command that starts one, how they are ended, and how it is told how they ended.

On Linux a process whose parent has died comes to the nearest process above that asked for such (a subreaper). The
agent's fork servers and workers ask, so whatever a worker started, however deep and in whatever session, stays below
it, and below the fork server once the worker has ended. The agent asks too, for a fork server may be killed.
Elsewhere a process that leaves its worker's group is not found.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

# For Python 3.10, which has no -P, and imports what runs a module with the working directory on the path already.
_START = (
    "import sys; sys.path.remove(''); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
# How often a forked child is looked at.
_WAIT_S = 0.005


def module_command(module: str, *arguments: str) -> list[str]:
    """``python -m MODULE ARGUMENTS``, which takes no module from the folder that it is called in."""
    start = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-c", _START]
    return [sys.executable, *start, module, *arguments]


def signal_name(number: int) -> str:
    """A signal's name: 11 is SIGSEGV; ``signal N`` where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_text(code: int) -> str:
    """What an exit code, negative for a signal, says to people: ``was killed by SIGSEGV``."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def signal_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group; one that is gone, or is another's by now, is left alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


class ForkedChild:
    """A child that was forked, to be waited for and killed as :class:`subprocess.Popen` is.

    Args:
        work: what it does; it ends with it, with the code of its SystemExit if it raises that.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                work()
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                # What the parent had opened is not ours to tidy up.
                os._exit(code)

    def poll(self) -> int | None:
        """The status that it ended with; None while it runs."""
        with self._lock:
            if self._status is None:
                try:
                    found, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    found, status = self.pid, 0
                self._status = os.waitstatus_to_exitcode(status) if found else None
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; :class:`subprocess.TimeoutExpired` after ``timeout`` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_WAIT_S)
        return status

    def kill(self) -> None:
        """Kill it, unless it has ended: its number may then be another's."""
        with self._lock:
            if self._status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)


def wait_or_kill(process: subprocess.Popen[Any] | ForkedChild, seconds: float, *, group: bool = False) -> int:
    """Wait so many seconds for a process that was told to end, then kill it; returns its exit code."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        if group:
            signal_group(process.pid)
        else:
            process.kill()
        return process.wait()


_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.001
# Only what hangs in the kernel lives longer than that after SIGKILL.
_KILL_S = 2.0


def adopt_descendants() -> bool:
    """Get every process below this one as a child once its own parent has died; returns whether that is so."""
    if sys.platform != "linux":
        return False
    import ctypes

    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def end_children(spared: Collection[int], ended: dict[int, int] | None = None) -> None:
    """Kill every child of this process and all that is below it, and take note of who has ended.

    Args:
        spared: children that are left alone, with what is below them.
        ended: gets the status of each child that has ended, of the spared ones too; None leaves them to whoever waits
            for them.
    """
    deadline = time.monotonic() + _KILL_S
    while True:
        if ended is not None:
            _reap(ended)
        left = children().difference(spared, ended or ())
        if not left or time.monotonic() > deadline:
            return
        _kill(left)
        if ended is None:
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(_PAUSE_S)


def _reap(ended: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]


def _kill(roots: set[int]) -> None:
    """Kill these processes and all below them: stopped first, so that none starts another while we look."""
    found: set[int] = set()
    while new := _below(roots) - found:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        found |= new
    for pid in found:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def children() -> set[int]:
    """This process's children."""
    if sys.platform != "linux":
        return set()
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (thread / "children").read_text().split()))
        except OSError:
            if thread.exists():
                return set(_parents()[os.getpid()])  # a kernel that has no such list
    return found


def _below(roots: set[int]) -> set[int]:
    parents = _parents()
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(parents[pid])
    return found


def _parents() -> defaultdict[int, list[int]]:
    """The children of every process."""
    parents: defaultdict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # The name, in brackets, may hold anything; the process may be gone.
        with contextlib.suppress(OSError):
            parents[int(stat.read_bytes().rpartition(b")")[2].split()[1])].append(int(stat.parent.name))
    return parents
