"""A worker's sandbox on Linux: no network, nothing that can be written but memory, no other process to be touched.

A compiled program is native code, and a simulator runs it on the user's own machine. What is taken from it costs a few
milliseconds a worker: user, mount, network and IPC namespaces of its own; every file system read-only, ``/dev`` down to
what holds nothing, with a small ``/dev/shm`` that vanishes with the process; no new privileges; no system call that
reads, writes or signals another process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Tells simulators, in whatever command they are started: auto, required or off.
VARIABLE = "HIL_SANDBOX"
# What a program may write below TMPDIR, of the machine's memory.
SCRATCH_BYTES = 256 << 20
_NEWNS, _NEWIPC, _NEWUSER, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID = 4096, 16384, 1 << 18, 2
_AT_FDCWD, _AT_RECURSIVE, _RDONLY = -100, 0x8000, 1
_MOUNT_SETATTR = 442
_DEVICES = ("null", "zero", "full", "random", "urandom")
# By machine: seccomp's number of the architecture; calls that are refused; calls whose first argument must be oneself.
_CALLS = {
    # ptrace process_vm_readv process_vm_writev rt_sigqueueinfo rt_tgsigqueueinfo tkill connect | kill tgkill
    "x86_64": (0xC000003E, (101, 310, 311, 129, 297, 200, 42), (62, 234)),
    "aarch64": (0xC00000B7, (117, 270, 271, 138, 240, 130, 203), (129, 131)),
}
# The same numbers everywhere: pidfd_send_signal pidfd_open pidfd_getfd io_uring_setup
_NEW_CALLS = (424, 434, 438, 425)


def enter(writable: Sequence[Path] = ()) -> None:
    """Put this process, which must have one thread only, into the sandbox for good.

    Args:
        writable: folders that stay as they are.

    Raises:
        OSError: the kernel does not allow it; the process may then be half inside, and should end.
    """
    if sys.platform != "linux":
        raise OSError("there are no namespaces on this system")
    if platform.machine() not in _CALLS:
        raise OSError(f"its system calls are not known on {platform.machine()}")
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEWUSER | _NEWNS | _NEWNET | _NEWIPC)
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


def _refuse_calls() -> None:
    arch, refused, own = _CALLS[platform.machine()]
    kill, refuse, allow = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # SECCOMP_RET_*: KILL_PROCESS, ERRNO of EPERM, ALLOW
    load, equal, give = 0x20, 0x15, 0x06  # BPF: load a word, jump if equal, return
    lines = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    if platform.machine() == "x86_64":
        lines += [(0x35, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # numbers of x32
    for number in (*refused, *_NEW_CALLS):
        lines += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    for number in own:
        # Only itself may be signalled: abort and raise do so.
        lines += [(equal, 0, 4, number), (load, 0, 0, 16), (equal, 1, 0, os.getpid()), (give, 0, 0, refuse)]
        lines += [(give, 0, 0, allow)]
    lines += [(give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    _call("prctl", 22, 2, ctypes.addressof(program), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _set_read_only(path: str, wanted: bool) -> None:
    attributes = struct.pack("QQQQ", _RDONLY if wanted else 0, 0 if wanted else _RDONLY, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() or None, flags, data.encode() or None)


def _call(name: str, *arguments: int | bytes | None) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    if function(*given) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
