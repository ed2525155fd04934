"""Wait until a board is steady: temperature and frequency constant, no other load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hil.controller.devices.measuring.conditions import BUSY, PERIOD_SECONDS
from hil.controller.devices.measuring.grading import FREQUENCY_SHARE, LOAD_CORES, PRESSURE_NOISY
from hil.controller.records.measurements.conditions import Settling
from hil.core.timeline import Sample

if TYPE_CHECKING:
    from hil.controller.devices.board import Board

# The board must be steady for this time. Its first half is compared with its second half.
WINDOW_SECONDS = 5.0
# Maximum difference between the mean temperatures of the two halves.
TEMPERATURE_DEGC = 0.5
_MIN_LOOKS = 6
_POLL_SECONDS = 0.25


def settle_board(board: Board, limit_s: float) -> Settling:
    """Wait until the board is steady, for at most ``limit_s`` seconds.

    hil does not wait for a board without counters, and reports that board as not steady.
    """
    begun = time.monotonic()
    with board.watch_counters(PERIOD_SECONDS) as watch:
        while True:
            waited = time.monotonic() - begun
            unsteady = [watch.problem] if watch.problem else find_unsteady(watch.samples)
            if not unsteady or waited >= limit_s or watch.problem:
                return Settling(waited_s=waited, steady=not unsteady, unsteady=unsteady)
            time.sleep(min(_POLL_SECONDS, limit_s - waited))


def find_unsteady(samples: Sequence[Sample]) -> list[str]:
    """Return a text for every counter that was not steady in the last :data:`WINDOW_SECONDS` seconds."""
    end = max((sample.at_ns for sample in samples), default=0)
    start = end - int(WINDOW_SECONDS * 1e9)
    # Accept a window that is one period shorter, because the samples are not exactly one period apart.
    is_long = any(sample.at_ns <= start + int(PERIOD_SECONDS * 1e9) for sample in samples)
    recent = [sample for sample in samples if sample.at_ns >= start]
    if not is_long or len({sample.at_ns for sample in recent}) < _MIN_LOOKS:
        return [f"the counters were read for less than {WINDOW_SECONDS:g} s"]
    middle = (start + end) // 2
    halves: dict[str, tuple[list[float], list[float]]] = {}
    for sample in recent:
        halves.setdefault(sample.name, ([], []))[sample.at_ns > middle].append(sample.value)
    units = {sample.name: sample.unit for sample in recent}
    found = []
    for name, (first, second) in halves.items():
        if not first or not second:
            continue
        was, now = statistics.fmean(first), statistics.fmean(second)
        if units[name] == "degC" and abs(now - was) > TEMPERATURE_DEGC:
            found.append(f"{name} {'rises' if now > was else 'falls'}: {now:.1f} C")
        elif units[name] == "MHz" and abs(now - was) > FREQUENCY_SHARE * max(was, now):
            found.append(f"the {name} changed from {was:.0f} to {now:.0f} MHz")
    busy = (
        sum(statistics.fmean(values) for name, (_, values) in halves.items() if BUSY.fullmatch(name) and values) / 100
    )
    if busy > LOAD_CORES:
        found.append(f"other programs keep {busy:.1f} cores busy")
    stalled = halves.get("memory pressure", ([], []))[1]
    if stalled and statistics.fmean(stalled) > PRESSURE_NOISY:
        found.append(f"programs stall on memory for {statistics.fmean(stalled):.0f} % of the time")
    return found
