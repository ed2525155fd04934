"""The processes below one of ours, also those that have left their parents and groups: found, and ended.

On Linux a process whose parent has died comes to the nearest process above that asked for such (a subreaper). The fork
server and each worker ask, so whatever a worker started, however deep and in whatever session, stays below it, and
below the fork server once the worker has ended. The agent asks too, for a fork server may be killed. Elsewhere a
process that leaves its worker's group is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE_S = 0.001
# Only what hangs in the kernel lives longer than that after SIGKILL.
_KILL_S = 2.0


def adopt() -> bool:
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
