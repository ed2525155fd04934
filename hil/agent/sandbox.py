"""A worker's sandbox on Linux: no network, nothing that can be written but memory, no other process to be touched.

A compiled program is native code, and a simulator runs it on the user's own machine. What is taken from it costs a few
milliseconds a worker: user, mount, network and IPC namespaces of its own; every file system read-only, ``/dev`` down to
what holds nothing, with a small ``/dev/shm`` that vanishes with the process; no pipe or socket of the machine's written
to, no file locked; no new privileges; no system call that reads, writes, signals or limits another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hil.agent import seccomp

# Tells simulators, in whatever command they are started: auto, required or off.
VARIABLE = "HIL_SANDBOX"
# What a program may write below TMPDIR, of the machine's memory.
SCRATCH_BYTES = 256 << 20
_NEWNS, _NEWIPC, _NEWUSER, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID = 4096, 16384, 1 << 18, 2
_AT_FDCWD, _AT_RECURSIVE, _RDONLY = -100, 0x8000, 1
# System calls with the same numbers everywhere, and Landlock's words: WRITE_FILE, REFER (move to another folder).
_MOUNT_SETATTR, _CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 442, 444, 445, 446
_WRITE, _MOVE, _PATH_BENEATH = 1 << 1, 1 << 13, 1
_DEVICES = ("null", "zero", "full", "random", "urandom")
# By machine: seccomp's number of the architecture.
_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Numbers of calls there. Those that reach another process, a socket or somebody's keys, or keep others from a file:
_REFUSED = {
    # ptrace process_vm_readv process_vm_writev rt_sigqueueinfo rt_tgsigqueueinfo tkill connect sendmsg sendmmsg
    # setpriority add_key request_key keyctl flock
    "x86_64": (101, 310, 311, 129, 297, 200, 42, 46, 307, 141, 248, 249, 250, 73),
    "aarch64": (117, 270, 271, 138, 240, 130, 203, 211, 269, 140, 217, 218, 219, 32),
}
# The same numbers everywhere: pidfd_send_signal pidfd_open pidfd_getfd io_uring_setup
_NEW_CALLS = (424, 434, 438, 425)
# Those whose first argument must be oneself: kill tgkill prlimit64 sched_setparam sched_setscheduler sched_setattr
_OWN = {"x86_64": (62, 234, 302, 142, 144, 314), "aarch64": (129, 131, 261, 118, 119, 274)}
# fcntl ioctl sendto
_PARTLY = {"x86_64": (72, 16, 44), "aarch64": (25, 29, 206)}
# What keeps others from a file, or has somebody signalled: F_SETLK F_SETLKW F_SETOWN F_SETSIG F_SETOWN_EX F_OFD_SETLK
# F_OFD_SETLKW F_SETLEASE F_NOTIFY | FIOSETOWN SIOCSPGRP TIOCSTI
_FCNTL = (6, 7, 8, 10, 15, 37, 38, 1024, 1026)
_IOCTL = (0x8901, 0x8902, 0x5412)


def enter(writable: Sequence[Path] = ()) -> None:
    """Put this process, which must have one thread only, into the sandbox for good.

    Args:
        writable: folders that stay as they are.

    Raises:
        OSError: the kernel does not allow it; the process may then be half inside, and should end.
    """
    if sys.platform != "linux":
        raise OSError("there are no namespaces on this system")
    if platform.machine() not in _ARCHS:
        raise OSError(f"its system calls are not known on {platform.machine()}")
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEWUSER | _NEWNS | _NEWNET | _NEWIPC)
    # A namespace within this one would give capabilities back; in some containers that file is read-only.
    with contextlib.suppress(OSError):
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    for folder in writable:
        _mount(str(folder), str(folder), "", _MS_BIND | _MS_REC)
    _set_read_only("/", True)
    for folder in writable:
        _set_read_only(str(folder), False)
    _make_devices()
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: nor are any got back by an exec
    _write_only_below([*writable, Path("/dev")])
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    _refuse_calls()


def why_not(writable: Sequence[Path] = ()) -> str:
    """Why this machine has no sandbox; "" where it has one. It is tried in a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            enter(writable)
        except Exception as error:
            os.write(write, (getattr(error, "strerror", "") or str(error)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as said:
        why = said.read().decode(errors="replace")
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
    """Landlock, since Linux 5.13: nothing else is opened to be written. A pipe on a read-only file system would be."""
    for wanted in (_WRITE | _MOVE, _WRITE):
        attributes = struct.pack("Q", wanted)
        try:
            rules = _call("syscall", _CREATE_RULESET, attributes, len(attributes), 0)
            break
        except OSError:  # of a kernel that does not know the one, or nothing of that
            continue
    else:
        return
    for folder in folders:
        at = os.open(folder, os.O_PATH)
        _call("syscall", _ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", wanted, at), 0)
        os.close(at)
    _call("syscall", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def _refuse_calls() -> None:
    machine = platform.machine()
    fcntl, ioctl, sendto = _PARTLY[machine]
    rules = [line for number in (*_REFUSED[machine], *_NEW_CALLS) for line in seccomp.refused(number)]
    # Only itself may be signalled: abort and raise do so.
    rules += [line for number in _OWN[machine] for line in seccomp.own(number)]
    rules += seccomp.without(fcntl, 1, _FCNTL) + seccomp.without(ioctl, 1, _IOCTL)
    # A socket that has no other side yet: connect is not the only way to it.
    rules += seccomp.null(sendto, 4)
    seccomp.filter_calls(_ARCHS[machine], rules)


def _set_read_only(path: str, wanted: bool) -> None:
    attributes = struct.pack("QQQQ", _RDONLY if wanted else 0, 0 if wanted else _RDONLY, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)


def _call(name: str, *arguments: int | bytes | None) -> int:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    answer = int(function(*given))
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return answer
