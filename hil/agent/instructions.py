"""Count the instructions of a worker's iterations with the Linux kernel's perf_event, or with the runtime's counter."""

from __future__ import annotations

import ctypes
import errno
import operator
import os
import platform
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hil.core.instructions import PERF_EVENT, InstructionCounts

# Type and number of a perf event: PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS.
INSTRUCTIONS = (0, 1)
# Number of the system call perf_event_open, by pointer size (a 64-bit kernel can run 32-bit programs) and machine. All
# machines are little-endian.
_PERF_EVENT_OPEN = {
    8: {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319},
    4: {"armv7l": 364, "armv6l": 364, "aarch64": 364, "i686": 336, "x86_64": 336},
}
# perf_event_attr of the first version: type, size, config, sample_period, sample_type, read_format, flags,
# wakeup_events, bp_type, bp_addr.
_ATTRIBUTES = struct.Struct("<IIQQQQQIIQ")
# Flags: inherit (count later threads and processes too), exclude_kernel, exclude_hv.
_FLAGS = 1 << 1 | 1 << 5 | 1 << 6
# PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING
_READ_FORMAT = 1 | 2
_CLOSE_ON_EXEC = 8
_VALUE = struct.Struct("<QQQ")  # count, time enabled, time running
# Messages contain signed 64-bit numbers.
_MAX_COUNT = (1 << 63) - 1
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
_MISSING = (errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP)
_SHARED = (
    "the CPU's counter was not active all the time: other programs use it, or the program ran on cores of another type"
)


class CountingFailed(Exception):
    """The board cannot count instructions. The text is the reason."""


class InstructionCounter:
    """Counter of this process's user-space instructions. It includes threads and processes that start later.

    Args:
        event: type and number of the perf event.

    Raises:
        CountingFailed: the board has no such counter, or this process may not use it.
    """

    def __init__(self, event: tuple[int, int] = INSTRUCTIONS) -> None:
        number = _PERF_EVENT_OPEN[struct.calcsize("P")].get(platform.machine())
        if sys.platform != "linux":
            raise CountingFailed("counting requires Linux on the board")
        if number is None or sys.byteorder != "little":
            raise CountingFailed(f"hil cannot count on the machine {platform.machine()}")
        kind, config = event
        attributes = _ATTRIBUTES.pack(kind, _ATTRIBUTES.size, config, 0, 0, _READ_FORMAT, _FLAGS, 0, 0, 0)
        libc: Any = ctypes.CDLL(None, use_errno=True)
        arguments = [ctypes.c_long(one) for one in (0, -1, -1, _CLOSE_ON_EXEC)]  # this process, on any CPU, no group
        self._fd = int(libc.syscall(ctypes.c_long(number), attributes, *arguments))
        if self._fd < 0:
            raise CountingFailed(_explain(ctypes.get_errno()))

    def read(self) -> tuple[int, int]:
        """Return the count so far, and the nanoseconds in which the counter was not active."""
        count, enabled, running = _VALUE.unpack(os.read(self._fd, _VALUE.size))
        return count, enabled - running

    def close(self) -> None:
        """Stop counting."""
        os.close(self._fd)


def _explain(number: int) -> str:
    if number in _MISSING:
        return "the CPU has no instruction counter that programs can use, as in most virtual machines"
    if number in (errno.EACCES, errno.EPERM):
        try:
            paranoid = _PARANOID.read_text().strip()
        except OSError:
            paranoid = "unknown"
        return (
            f"the kernel or a container forbids it: kernel.perf_event_paranoid is {paranoid}, and must be at most 2; "
            "a container must allow perf_event_open"
        )
    if number == errno.ENOSYS:
        return "the board's kernel has no perf_event"
    return f"cannot open the CPU's counter: {os.strerror(number)}"


class CountLog:
    """Instructions of the timed iterations of an invocation.

    Args:
        counter: counter of this process; None if it cannot be opened.
        problem: why there is no counter.
        program_counter: kind of counter, and a function that returns the instructions of the program's last run, if
            the runtime counts them itself.
    """

    def __init__(
        self,
        counter: InstructionCounter | None,
        problem: str = "",
        program_counter: tuple[str, Callable[[], int]] | None = None,
    ) -> None:
        self._kind = program_counter[0] if program_counter is not None else PERF_EVENT
        self._count_program = program_counter[1] if program_counter is not None else None
        self._counter, self._problem = (None, "") if program_counter is not None else (counter, problem)
        self._counts: list[int] = []
        self._before, self._inactive = 0, 0

    def begin(self) -> None:
        """Start an iteration."""
        if self._counter is not None:
            self._before, self._inactive = self._counter.read()

    def end(self) -> None:
        """End a timed iteration."""
        if self._count_program is not None:
            count = self._count_program()
            try:
                number = operator.index(count)  # a plugin may return any type
            except TypeError:
                number = 0
            if 0 < number <= _MAX_COUNT:
                self._counts.append(number)
            else:
                self._problem = f"the runtime returned an invalid number of instructions: {count!r:.100}"
        elif self._counter is not None:
            count, inactive = self._counter.read()
            self._counts.append(count - self._before)
            if inactive != self._inactive:
                self._problem = _SHARED

    def finish(self) -> InstructionCounts:
        """Return the counts of all timed iterations."""
        # Some virtual machines have a counter that never counts.
        problem = self._problem or ("" if min(self._counts) > 0 else "the CPU's instruction counter does not count")
        if problem:
            return InstructionCounts(problem=problem)
        return InstructionCounts(self._kind, tuple(self._counts))
