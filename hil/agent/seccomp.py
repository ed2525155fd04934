"""Filters of system calls: what a process, and whatever it starts, may no longer ask of the kernel."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Collection

_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | 1, 0x7FFF0000  # SECCOMP_RET_*: KILL_PROCESS, ERRNO of EPERM, ALLOW
_LOAD, _EQUAL, _LEAST, _AND, _GIVE = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF: load a word, jumps, a mask, return
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # in what a filter looks at
_X32 = 0x40000000
# An instruction: its code, how many to skip where it is so and where not, its operand.
Line = tuple[int, int, int, int]


def refused(number: int) -> list[Line]:
    """A call that is not made."""
    return [(_EQUAL, 0, 1, number), (_GIVE, 0, 0, _REFUSE)]


def own(number: int) -> list[Line]:
    """A call whose first argument is this process, or 0."""
    return [(_EQUAL, 0, 5, number), (_LOAD, 0, 0, _ARGUMENTS), *_unless_own()]


def without(number: int, argument: int, values: Collection[int]) -> list[Line]:
    """A call whose argument, a number of 32 bits, is none of these values."""
    count = len(values)
    tests: list[Line] = [(_EQUAL, count - place, 0, value) for place, value in enumerate(values)]
    at = _ARGUMENTS + 8 * argument
    return [(_EQUAL, 0, count + 3, number), (_LOAD, 0, 0, at), *tests, (_GIVE, 0, 0, _ALLOW), (_GIVE, 0, 0, _REFUSE)]


def null(number: int, argument: int) -> list[Line]:
    """A call whose argument is no address."""
    low = _ARGUMENTS + 8 * argument
    words: list[Line] = [(_LOAD, 0, 0, low), (_EQUAL, 0, 2, 0), (_LOAD, 0, 0, low + 4), (_EQUAL, 1, 0, 0)]
    return [(_EQUAL, 0, 6, number), *words, (_GIVE, 0, 0, _REFUSE), (_GIVE, 0, 0, _ALLOW)]


def filter_calls(arch: int, rules: list[Line]) -> None:
    """Set these rules; calls of another architecture end the process.

    Args:
        arch: the kernel's number of this machine's.
        rules: one after the other.
    """
    wrong: list[Line] = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_GIVE, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    # No number is so large but those of x32, which would be other names of the same calls.
    _install([*wrong, (_LEAST, 0, 1, _X32), (_GIVE, 0, 0, _REFUSE), *rules, (_GIVE, 0, 0, _ALLOW)])


def keep_limits_own() -> None:
    """Let this process set its own limits, and nobody else's: one of CPU time would end any process of the user.

    Programs of the machine's other architecture, 32 bits, are held by it too.
    """
    lines: list[Line] = []
    # prlimit64 of x86-64, aarch64, riscv64, i386, arm
    for arch, number in (
        (0xC000003E, 302),
        (0xC00000B7, 261),
        (0xC00000F3, 261),
        (0x40000003, 340),
        (0x40000028, 369),
    ):
        lines += [(_LOAD, 0, 0, _ARCH), (_EQUAL, 0, 8, arch), (_LOAD, 0, 0, _NUMBER), (_AND, 0, 0, ~_X32 & 0xFFFFFFFF)]
        lines += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _ARGUMENTS), *_unless_own()]
    _install([*lines, (_GIVE, 0, 0, _ALLOW)])


def _unless_own() -> list[Line]:
    return [(_EQUAL, 2, 0, os.getpid()), (_EQUAL, 1, 0, 0), (_GIVE, 0, 0, _REFUSE), (_GIVE, 0, 0, _ALLOW)]


def _install(lines: list[Line]) -> None:
    """Set a filter, which nobody can take away; the process must have given up new privileges.

    Raises:
        OSError: the kernel takes none.
    """
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_ulong(one) for one in (2, ctypes.addressof(program), 0, 0)]  # SECCOMP_MODE_FILTER
    if libc.prctl(22, *words) < 0:  # PR_SET_SECCOMP
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
