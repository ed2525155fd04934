"""Instruction counts: the kernel's counter, tested with events that need no counter of the CPU, and the log."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hil.agent import instructions
from hil.agent.instructions import CountingFailed, CountLog, InstructionCounter
from hil.core.instructions import InstructionCounts, count_clock, merge_counts

# Type and number of perf events: PERF_TYPE_SOFTWARE with PERF_COUNT_SW_PAGE_FAULTS, and a hardware event that no CPU
# has.
PAGE_FAULTS, MISSING = (1, 2), (0, 1000)
PAGES = 200

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="perf_event is a Linux interface")


@pytest.fixture
def page_faults() -> Iterator[InstructionCounter]:
    try:
        counter = InstructionCounter(PAGE_FAULTS)
    except CountingFailed as error:
        pytest.skip(str(error))
    yield counter
    counter.close()


def touch_pages() -> None:
    """Cause a page fault for each of the pages."""
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(PAGES):
            memory[page * mmap.PAGESIZE] = 1


def test_counter_counts_events_of_this_process(page_faults: InstructionCounter) -> None:
    before, _ = page_faults.read()
    touch_pages()
    after, inactive = page_faults.read()
    assert PAGES <= after - before < 10 * PAGES
    assert inactive == 0


def test_counter_includes_threads_that_start_later(page_faults: InstructionCounter) -> None:
    before, _ = page_faults.read()
    threads = [threading.Thread(target=touch_pages) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert page_faults.read()[0] - before >= 3 * PAGES


def test_missing_counter_is_explained() -> None:
    with pytest.raises(CountingFailed, match=r"no instruction counter|forbids it|no perf_event"):
        InstructionCounter(MISSING)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOENT, "the CPU has no instruction counter"),
        (errno.EACCES, r"kernel\.perf_event_paranoid is -?\w+, and must be at most 2"),
        (errno.ENOSYS, "kernel has no perf_event"),
        (errno.EMFILE, "Too many open files"),
    ],
)
def test_error_of_the_kernel_is_explained(monkeypatch: pytest.MonkeyPatch, number: int, text: str) -> None:
    class Refusing:
        def syscall(self, *_: object) -> int:
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(instructions.ctypes, "CDLL", lambda *_, **__: Refusing())
    with pytest.raises(CountingFailed, match=text):
        InstructionCounter()


class Readings:
    """A counter with scripted readings: count, and nanoseconds in which it was not active."""

    def __init__(self, *readings: tuple[int, int]) -> None:
        self._readings = iter(readings)

    def read(self) -> tuple[int, int]:
        return next(self._readings)


def log_of(*readings: tuple[int, int]) -> CountLog:
    log = CountLog(Readings(*readings))
    for _ in range(len(readings) // 2):
        log.begin()
        log.end()
    return log


def test_log_counts_each_iteration() -> None:
    assert log_of((10, 0), (110, 0), (200, 0), (301, 0)).finish() == InstructionCounts("perf_event", (100, 101))


def test_log_rejects_a_counter_that_was_not_always_active() -> None:
    assert "not active all the time" in log_of((10, 0), (110, 0), (200, 0), (301, 5)).finish().problem


def test_log_rejects_a_counter_that_does_not_count() -> None:
    assert log_of((10, 0), (10, 0)).finish() == InstructionCounts(
        problem="the CPU's instruction counter does not count"
    )


def test_log_without_counter_reports_the_problem() -> None:
    log = CountLog(None, "no counter")
    log.begin()
    log.end()
    assert log.finish() == InstructionCounts(problem="no counter")


def test_log_prefers_the_counts_of_the_runtime() -> None:
    counts = iter([7, 8])
    log = CountLog(None, "no counter", ("runtime", lambda: next(counts)))
    for _ in range(2):
        log.begin()
        log.end()
    assert log.finish() == InstructionCounts("runtime", (7, 8))


@pytest.mark.parametrize("count", [0, -1, 2.5, None, 1 << 63])
def test_log_reports_invalid_counts_of_the_runtime(count: Any) -> None:
    log = CountLog(None, "no counter", ("runtime", lambda: count))
    log.begin()
    log.end()
    found = log.finish()
    assert (found.counter, found.counts) == ("", ())
    assert found.problem == f"the runtime returned an invalid number of instructions: {count}"


def test_clock_of_an_emulated_board_is_converted() -> None:
    assert count_clock([(0, 1024), (2048, 4096)], 3) == InstructionCounts("icount", (128, 256))


def test_merged_counts_keep_the_first_problem() -> None:
    one, other, failed = (
        InstructionCounts("perf_event", (1,)),
        InstructionCounts("perf_event", (2,)),
        InstructionCounts(problem="why"),
    )
    assert merge_counts(one, other) == InstructionCounts("perf_event", (1, 2))
    assert merge_counts(one, failed) == merge_counts(failed, one) == failed
    assert merge_counts(None, None) is None
