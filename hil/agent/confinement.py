"""Restrict workers: resource limits, system call filters, and an optional sandbox.

The worker calls :func:`confine` after the fork, before any code of the program runs. :func:`confine` sets resource
limits, and prevents the worker from signalling the agent. Limits that the system does not support are skipped.

:func:`enter_sandbox` isolates the worker on Linux: no network, no writes except to memory, no access to other
processes. A compiled program is native code, and simulators run on the user's machine. The sandbox costs a few
milliseconds per worker and consists of:

- separate user, mount, network and IPC namespaces
- read-only file systems
- a minimal ``/dev`` with stateless devices, and a small ``/dev/shm`` that the kernel removes when the process exits
- no writes to the machine's pipes or sockets, and no file locks
- no new privileges
- no system calls that read, write, signal or limit other processes
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import resource
import signal
import struct
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

MAX_FILES = 4096
# Number of processes and threads that a worker may add. The kernel's limit applies to all tasks of a user.
MORE_TASKS = 2048
# Memory for the runtime, in addition to the program's limit and the worker's memory after the fork.
OWN_BYTES = 1 << 30
# With this score, the kernel kills workers before the agent when memory runs out.
_OOM_SCORE = "500"
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_LANDLOCK_SCOPE_SIGNAL = 2
# Environment variable with the sandbox mode of simulators: auto, required or off.
SANDBOX_VARIABLE = "HIL_SANDBOX"
# Size limit for files of a sandboxed program below TMPDIR, which is in memory.
SCRATCH_BYTES = 256 << 20
_NEWNS, _NEWIPC, _NEWUSER, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID = 4096, 16384, 1 << 18, 2
_AT_FDCWD, _AT_RECURSIVE, _RDONLY = -100, 0x8000, 1
# System call numbers that are equal on every architecture, and Landlock rights: WRITE_FILE, REFER (move to another
# directory).
_MOUNT_SETATTR, _CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 442, 444, 445, 446
_WRITE, _MOVE, _PATH_BENEATH = 1 << 1, 1 << 13, 1
_DEVICES = ("null", "zero", "full", "random", "urandom")
# Machine -> seccomp architecture number.
_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Machine -> refused system calls: they reach other processes, a socket or keys, or lock a file.
_REFUSED = {
    # ptrace process_vm_readv process_vm_writev rt_sigqueueinfo rt_tgsigqueueinfo tkill connect sendmsg sendmmsg
    # setpriority add_key request_key keyctl flock
    "x86_64": (101, 310, 311, 129, 297, 200, 42, 46, 307, 141, 248, 249, 250, 73),
    "aarch64": (117, 270, 271, 138, 240, 130, 203, 211, 269, 140, 217, 218, 219, 32),
}
# Refused calls with the same numbers everywhere: pidfd_send_signal pidfd_open pidfd_getfd io_uring_setup
_NEW_CALLS = (424, 434, 438, 425)
# Calls that a process may make only on itself: kill tgkill prlimit64 sched_setparam sched_setscheduler sched_setattr
_SELF_ONLY_CALLS = {"x86_64": (62, 234, 302, 142, 144, 314), "aarch64": (129, 131, 261, 118, 119, 274)}
# Calls refused for some arguments: fcntl ioctl sendto
_PARTLY = {"x86_64": (72, 16, 44), "aarch64": (25, 29, 206)}
# Refused arguments, which lock a file or make the kernel signal a process: F_SETLK F_SETLKW F_SETOWN F_SETSIG
# F_SETOWN_EX F_OFD_SETLK F_OFD_SETLKW F_SETLEASE F_NOTIFY | FIOSETOWN SIOCSPGRP TIOCSTI
_FCNTL = (6, 7, 8, 10, 15, 37, 38, 1024, 1026)
_IOCTL = (0x8901, 0x8902, 0x5412)
# SECCOMP_RET_*: KILL_PROCESS, ERRNO of EPERM, ALLOW
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000
_LOAD, _EQUAL, _LEAST, _AND, _GIVE = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF: load a word, jumps, a mask, return
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in the data that a filter reads
_X32 = 0x40000000
# A BPF instruction: code, jump if true, jump if false, operand. An operand of None means the process id.
_Line = tuple[int, int, int, int | None]
_LINE = struct.Struct("=HBBI")


def prepare() -> None:
    """Prepare shared data in the fork server, so that workers do not repeat the work."""
    if sys.platform == "linux":
        for name in ("capset", "mount", "prctl", "syscall", "unshare"):
            getattr(_load_libc(), name, None)
        _own_limits_filter()
        if platform.machine() in _ARCHS:
            _build_sandbox_filter()


def seclude() -> None:
    """Prevent other processes of the user from tracing this process or reading its memory. Linux only."""
    if sys.platform == "linux":
        _load_libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def confine(parent: int, memory_limit: int) -> None:
    """Limit this worker and the child processes.

    Args:
        parent: process id of the expected parent; the worker exits if the parent has died.
        memory_limit: maximum memory of the program in bytes; 0 means the machine's memory.
    """
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NOFILE, MAX_FILES)
    page = os.sysconf("SC_PAGE_SIZE")
    # The shared memory for outputs counts as a file.
    _lower(resource.RLIMIT_FSIZE, (memory_limit or os.sysconf("SC_PHYS_PAGES") * page) + OWN_BYTES)
    if sys.platform != "linux":
        return
    if memory_limit:
        data = int(Path("/proc/self/statm").read_text().split()[5]) * page
        _lower(resource.RLIMIT_DATA, data + memory_limit + OWN_BYTES)
    if user := os.getuid():  # the limit does not apply to root
        _lower(resource.RLIMIT_NPROC, _count_tasks(user) + MORE_TASKS)
    libc = _load_libc()
    # Workers inherit the fork server's setting, which would block a program's access to its files below /proc.
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        _write("/proc/self/oom_score_adj", _OOM_SCORE)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before PR_SET_PDEATHSIG was set
    _restrict_signals(libc)


def _write(path: str, text: str) -> None:
    """Write to a kernel file.

    In a process that was just forked, the first ``write_text`` takes 0.4 ms because the kernel copies each touched
    page.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _lower(what: int, limit: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard == resource.RLIM_INFINITY or hard > limit:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (limit, limit))


def _count_tasks(user: int) -> int:
    """Count the threads of all processes of a user."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == user:
                count += folder.joinpath("task").stat().st_nlink - 2
    return count


def _restrict_signals(libc: Any) -> None:
    """Restrict signals and tracing to this process's children (Landlock, since Linux 6.12).

    A limit on another process's CPU time would act as a signal, so a system call filter refuses such limits.
    """
    ruleset = struct.pack("=QQQ", 0, 0, _LANDLOCK_SCOPE_SIGNAL)
    fd = libc.syscall(_CREATE_RULESET, ruleset, len(ruleset), 0)
    if fd >= 0:
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
            libc.syscall(_RESTRICT_SELF, fd, 0)
            with contextlib.suppress(OSError):  # the kernel lacks seccomp filters
                _own_limits_filter().install()
        os.close(fd)


@functools.cache
def _load_libc() -> Any:
    """Return the C library."""
    return ctypes.CDLL(None, use_errno=True)


def enter_sandbox(writable: Sequence[Path] = ()) -> None:
    """Move this process into the sandbox permanently. The process must have a single thread.

    Args:
        writable: directories that stay writable.

    Raises:
        OSError: the kernel refused a step. The process may be partly restricted and should exit.
    """
    if sys.platform != "linux":
        raise OSError("the system does not support namespaces")
    if platform.machine() not in _ARCHS:
        raise OSError(f"hil does not know the system call numbers of {platform.machine()}")
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEWUSER | _NEWNS | _NEWNET | _NEWIPC)
    # A nested namespace would restore capabilities. In some containers the file is read-only.
    with contextlib.suppress(OSError):
        _write("/proc/sys/user/max_user_namespaces", "0")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    for folder in writable:
        _mount(str(folder), str(folder), "", _MS_BIND | _MS_REC)
    _set_read_only("/", True)
    for folder in writable:
        _set_read_only(str(folder), False)
    _make_devices()
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: exec cannot restore privileges
    _write_only_below([*writable, Path("/dev")])
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _build_sandbox_filter().install()


def find_sandbox_error(writable: Sequence[Path] = ()) -> str:
    """Try the sandbox in a child process. Return the error, or "" on success."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            enter_sandbox(writable)
        except Exception as error:
            os.write(write, (getattr(error, "strerror", "") or str(error)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        why = pipe.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return why


def _make_devices() -> None:
    kept = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    _mount("tmpfs", "/dev", "tmpfs", _MS_NOSUID, f"size={SCRATCH_BYTES},mode=755")
    Path("/dev/shm").mkdir(mode=0o1777)
    for name, descriptor in kept.items():
        Path(f"/dev/{name}").touch()
        _mount(f"/proc/self/fd/{descriptor}", f"/dev/{name}", "", _MS_BIND)
        os.close(descriptor)


def _write_only_below(folders: Sequence[Path]) -> None:
    """Allow opening files for writing only below these directories (Landlock, since Linux 5.13).

    Read-only mounts do not prevent writes to pipes.
    """
    for wanted in (_WRITE | _MOVE, _WRITE):
        attributes = struct.pack("Q", wanted)
        try:
            rules = _call("syscall", _CREATE_RULESET, attributes, len(attributes), 0)
            break
        except OSError:  # the kernel lacks REFER or Landlock
            continue
    else:
        return
    for folder in folders:
        at = os.open(folder, os.O_PATH)
        _call("syscall", _ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", wanted, at), 0)
        os.close(at)
    _call("syscall", _RESTRICT_SELF, rules, 0)
    os.close(rules)


class _Filter:
    """System call filter that can be installed in any process."""

    def __init__(self, lines: Sequence[_Line]) -> None:
        self._lines = len(lines)
        self._code = b"".join(_LINE.pack(*line[:3], line[3] or 0) for line in lines)
        self._own = [(place + 1) * _LINE.size - 4 for place, line in enumerate(lines) if line[3] is None]

    def install(self) -> None:
        """Install the filter permanently. PR_SET_NO_NEW_PRIVS must be set. Raises OSError if the kernel refuses."""
        code = ctypes.create_string_buffer(self._code, len(self._code))
        own = struct.pack("=I", os.getpid())
        for at in self._own:
            ctypes.memmove(ctypes.addressof(code) + at, own, len(own))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", self._lines, ctypes.addressof(code)))
        words = [ctypes.c_ulong(one) for one in (2, ctypes.addressof(program), 0, 0)]  # SECCOMP_MODE_FILTER
        if _load_libc().prctl(22, *words) < 0:  # PR_SET_SECCOMP
            number = ctypes.get_errno()
            raise OSError(number, f"seccomp: {os.strerror(number)}")


@functools.cache
def _build_sandbox_filter() -> _Filter:
    """Build the sandbox's filter.

    The filter allows calls by default, and kills the process on calls of other architectures.
    """
    machine = platform.machine()
    fcntl, ioctl, sendto = _PARTLY[machine]
    wrong: list[_Line] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCHS[machine]),
        (_GIVE, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # x32 uses larger numbers for the same calls.
        (_LEAST, 0, 1, _X32),
        (_GIVE, 0, 0, _REFUSE),
    ]
    rules: list[_Line] = [
        line
        for number in (*_REFUSED[machine], *_NEW_CALLS)
        for line in ((_EQUAL, 0, 1, number), (_GIVE, 0, 0, _REFUSE))
    ]
    # abort and raise send a signal to the process itself.
    rules += [line for number in _SELF_ONLY_CALLS[machine] for line in _allow_on_itself(number)]
    rules += _allow_without_values(fcntl, 1, _FCNTL) + _allow_without_values(ioctl, 1, _IOCTL)
    # sendto with an address reaches a socket without connect.
    rules += _allow_null_address(sendto, 4)
    return _Filter([*wrong, *rules, (_GIVE, 0, 0, _ALLOW)])


def _set_read_only(path: str, wanted: bool) -> None:
    attributes = struct.pack("QQQQ", _RDONLY if wanted else 0, 0 if wanted else _RDONLY, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)


def _call(name: str, *arguments: int | bytes | None) -> int:
    function = getattr(_load_libc(), name)
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    answer = int(function(*given))
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return answer


def _allow_on_itself(number: int) -> list[_Line]:
    """Allow a call if the first argument is this process or 0."""
    return [(_EQUAL, 0, 5, number), (_LOAD, 0, 0, _ARGUMENTS), *_refuse_unless_itself()]


def _allow_without_values(number: int, argument: int, values: Collection[int]) -> list[_Line]:
    """Allow a call unless a 32-bit argument has one of these values."""
    count = len(values)
    tests: list[_Line] = [(_EQUAL, count - place, 0, value) for place, value in enumerate(values)]
    at = _ARGUMENTS + 8 * argument
    return [(_EQUAL, 0, count + 3, number), (_LOAD, 0, 0, at), *tests, (_GIVE, 0, 0, _ALLOW), (_GIVE, 0, 0, _REFUSE)]


def _allow_null_address(number: int, argument: int) -> list[_Line]:
    """Allow a call if a pointer argument is null."""
    low = _ARGUMENTS + 8 * argument
    words: list[_Line] = [(_LOAD, 0, 0, low), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, low + 4), (_EQUAL, 1, 0, 0)]
    return [(_EQUAL, 0, 6, number), *words, (_GIVE, 0, 0, _REFUSE), (_GIVE, 0, 0, _ALLOW)]


@functools.cache
def _own_limits_filter() -> _Filter:
    """Return a filter that allows a process to set only its own resource limits.

    Without this filter, a program could set a CPU time limit that kills any process of the same user. The filter also
    checks the system calls of 32-bit programs on a 64-bit machine.
    """
    lines: list[_Line] = []
    # prlimit64 of x86-64, aarch64, riscv64, i386, arm
    for arch, number in (
        (0xC000003E, 302),
        (0xC00000B7, 261),
        (0xC00000F3, 261),
        (0x40000003, 340),
        (0x40000028, 369),
    ):
        lines += [(_LOAD, 0, 0, _ARCH), (_EQUAL, 0, 8, arch), (_LOAD, 0, 0, _NUMBER), (_AND, 0, 0, ~_X32 & 0xFFFFFFFF)]
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _ARGUMENTS), *_refuse_unless_itself()]
    return _Filter([*lines, (_GIVE, 0, 0, _ALLOW)])


def _refuse_unless_itself() -> list[_Line]:
    return [(_EQUAL, 2, 0, None), (_EQUAL, 1, 0, 0), (_GIVE, 0, 0, _REFUSE), (_GIVE, 0, 0, _ALLOW)]
