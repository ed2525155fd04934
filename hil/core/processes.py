"""Start, kill and reap hil's processes.

On Linux an orphaned process becomes a child of its nearest ancestor that is a subreaper. The agent's fork servers and
workers are subreapers. A worker's descendants therefore stay below the worker in the process tree, even in a new
session. After the worker's exit, they stay below the fork server. The agent is also a subreaper, in case a fork server
is killed. On other systems, hil cannot find a process that left its worker's process group.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

# Remove the working directory from the path. Python 3.10 lacks -P, and ``-m`` would search the working directory first.
_START = (
    "import sys; sys.path.remove(''); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
# Polling interval for a forked child.
_WAIT_SECONDS = 0.005


def make_module_command(module: str, *arguments: str) -> list[str]:
    """Return ``python -m MODULE ARGUMENTS`` that does not import from the working directory."""
    start = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-c", _START]
    return [sys.executable, *start, module, *arguments]


def get_signal_name(number: int) -> str:
    """Return a signal's name: 11 is SIGSEGV; unknown signals are ``signal N``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_text(code: int) -> str:
    """Describe an exit code, negative for a signal: ``was killed by SIGSEGV``."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {get_signal_name(-code)}"


def signal_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group. Ignores groups that ended or now belong to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


class ForkedChild:
    """Forked child with the wait and kill methods of :class:`subprocess.Popen`.

    Args:
        work: function to run in the child. Then the child exits, with the code of SystemExit if the function raises it.
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
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                # Skip cleanup handlers: they belong to the parent.
                os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code, or None if running."""
        with self._lock:
            if self._status is None:
                try:
                    found, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    found, status = self.pid, 0
                self._status = os.waitstatus_to_exitcode(status) if found else None
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the child's exit. Raises :class:`subprocess.TimeoutExpired` after ``timeout`` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(_WAIT_SECONDS)
        return status

    def kill(self) -> None:
        """Kill the child if it still runs. After the end, a different process may have the same pid."""
        with self._lock:
            if self._status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)


def wait_or_kill(process: subprocess.Popen[Any] | ForkedChild, seconds: float, *, group: bool = False) -> int:
    """Wait up to ``seconds`` for a process that was asked to exit, then kill it. Return the exit code."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        if group:
            signal_group(process.pid)
        else:
            process.kill()
        return process.wait()


_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_SECONDS = 0.001
# Only processes stuck in the kernel survive SIGKILL longer than this.
_KILL_SECONDS = 2.0


def adopt_descendants() -> bool:
    """Make this process a subreaper: orphaned descendants become its children. Return True on success."""
    if sys.platform != "linux":
        return False
    import ctypes

    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


class ExitStatus(NamedTuple):
    """Exit status of a child."""

    code: int  # exit code, or the negative signal number
    peak_bytes: int = 0  # peak resident memory; 0 if unknown


def end_children(spared: Collection[int], ended: dict[int, ExitStatus] | None = None) -> None:
    """Kill all children and their descendants, and record the exit status of ended children.

    Args:
        spared: children to leave running, with their descendants.
        ended: receives the exit status of each child that ended, also of spared children. With None, other code
            collects the exit statuses.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while True:
        if ended is not None:
            _reap(ended)
        left = list_children().difference(spared, ended or ())
        if not left or time.monotonic() > deadline:
            return
        kill_trees(left)
        if ended is None:
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        time.sleep(_PAUSE_SECONDS)


def _reap(ended: dict[int, ExitStatus]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.wait3(os.WNOHANG))[0]:
            pid, status, usage = found
            ended[pid] = ExitStatus(os.waitstatus_to_exitcode(status), get_peak_memory(usage))


def get_peak_memory(usage: resource.struct_rusage) -> int:
    """Return the peak resident memory in bytes."""
    return usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss * 1024


def kill_trees(roots: set[int]) -> None:
    """Kill processes with all descendants. The processes are stopped first, so that they cannot start new processes.

    On systems without /proc, the descendants are unknown and continue to run.
    """
    found: set[int] = set()
    while new := _find_descendants(roots) - found:
        for pid in new:
            _send(pid, signal.SIGSTOP)
        found |= new
    for pid in found:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def list_children() -> set[int]:
    """Return the pids of this process's children."""
    if sys.platform != "linux":
        return set()
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (thread / "children").read_text().split()))
        except OSError:
            if thread.exists():
                return set(_map_children()[os.getpid()])  # kernel without this list
    return found


def _find_descendants(roots: set[int]) -> set[int]:
    parents = _map_children()
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(parents[pid])
    return found


def _map_children() -> defaultdict[int, list[int]]:
    """Map each pid to its children."""
    parents: defaultdict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # The process name in brackets may contain any character, and the process may have ended.
        with contextlib.suppress(OSError):
            parents[int(stat.read_bytes().rpartition(b")")[2].split()[1])].append(int(stat.parent.name))
    return parents
