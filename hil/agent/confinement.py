"""What a worker may do to the machine, as far as any user can see to that: limits, and no hand on the agent.

Set in the worker after its fork, before anything of the program's runs. What the system has not, is left out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

from hil.agent import seccomp

MOST_FILES = 4096
# Processes and threads beyond those that the user has already: such a limit counts all of a user's.
MORE_TASKS = 2048
# Of a worker's memory, beside its program's and what it has after the fork: what the runtime takes for itself.
OWN_BYTES = 1 << 30
# The kernel ends workers first where memory runs out, and not the agent.
_OOM_SCORE = "500"
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
# The same on every architecture.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_LANDLOCK_SCOPE_SIGNAL = 2


def seclude() -> None:
    """Nobody of the same user traces this process or reads its memory, unless he may trace any; Linux only."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def confine(parent: int, memory_limit: int) -> None:
    """Limit this worker, and what it starts.

    Args:
        parent: it ends when this process does.
        memory_limit: most bytes that its program may take; 0 is the machine's memory.
    """
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, MOST_FILES)
    page = os.sysconf("SC_PAGE_SIZE")
    # The shared memory of its outputs is such a file too.
    _lower(resource.RLIMIT_FSIZE, (memory_limit or os.sysconf("SC_PHYS_PAGES") * page) + OWN_BYTES)
    if sys.platform != "linux":
        return
    if memory_limit:
        data = int(Path("/proc/self/statm").read_text().split()[5]) * page
        _lower(resource.RLIMIT_DATA, data + memory_limit + OWN_BYTES)
    if user := os.getuid():  # for root it is none
        _lower(resource.RLIMIT_NPROC, _tasks_of(user) + MORE_TASKS)
    libc = _libc()
    # The fork server's is inherited, and would keep the program from files of its own below /proc.
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before that
    _no_signals_out(libc)


def _lower(what: int, limit: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard == resource.RLIM_INFINITY or hard > limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (limit, limit))


def _tasks_of(user: int) -> int:
    """How many threads a user's processes have."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == user:
                count += folder.joinpath("task").stat().st_nlink - 2
    return count


def _no_signals_out(libc: Any) -> None:
    """Landlock, since Linux 6.12: signals reach only what this process starts, and no process outside can be traced.

    A limit of another process's CPU time would be a signal as well: there is a filter of calls for that.
    """
    ruleset = struct.pack("=QQQ", 0, 0, _LANDLOCK_SCOPE_SIGNAL)
    fd = libc.syscall(_LANDLOCK_CREATE_RULESET, ruleset, len(ruleset), 0)
    if fd >= 0:
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
            libc.syscall(_LANDLOCK_RESTRICT_SELF, fd, 0)
            with contextlib.suppress(OSError):  # of a kernel without such filters
                seccomp.keep_limits_own()
        os.close(fd)


def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None)
