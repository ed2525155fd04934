"""Times of a sustained measurement over time."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from support.bench_boards import PacedBoard, side_on

from hil.controller.analysis.bench import sustained
from hil.controller.analysis.bench.measure import BenchSide, measure
from hil.controller.analysis.bench.show import format_sustained
from hil.controller.analysis.bench.stats import Batch, BenchJob
from hil.controller.analysis.bench.sustained import (
    BatchSummary,
    find_stride,
    find_throttling,
    select_counters,
    summarise_sustained,
    thin_batch,
)
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.measurements.bench import SustainedTimes
from hil.core.timeline import Sample
from hil.errors import RunCrashed

EVENT = "the board throttled: 1 CPU throttle events"


def summaries(medians_ms: list[float], events: dict[int, str] | None = None) -> list[BatchSummary]:
    """Return batches of half a second."""
    return [
        BatchSummary(
            at * 500_000_000, (at + 1) * 500_000_000, 100, ms * 1e6, (text,) if (text := (events or {}).get(at)) else ()
        )
        for at, ms in enumerate(medians_ms)
    ]


def run_sustained(board: PacedBoard, sustained_s: float) -> BenchSide:
    side = side_on(board, "A", "a")
    bench = BenchJob(Job(models=(Path("a"),)), sustained_s=sustained_s)
    measure([side], bench, lambda *_: None, random.Random(1))
    return side


def summarise_side(side: BenchSide, counters: list[Sample]) -> SustainedTimes:
    found = summarise_sustained(side.summaries, side.batches, counters, requested_s=30, min_effect=0.03)
    assert found is not None
    return found


def show_sustained(found: SustainedTimes) -> str:
    return re.sub(r"[^ -~]", " ", format_sustained(found))


def test_sustained_measurement_finds_throttling_and_frequencies():
    board = PacedBoard({"a": lambda: 2_000_000 if board.now_ns < 13_000_000_000 else 4_000_000})
    side = run_sustained(board, 30.0)
    start = side.summaries[0].start_ns
    looks = [(start + int(at * 1e9), 1800.0 if at < 12 else 900.0, 40 + at) for at in range(30)]
    counters = [
        Sample(at, name, value, unit)
        for at, clock, degrees in looks
        for name, value, unit in (
            ("cpu0 frequency", 600.0, "MHz"),
            ("cpu4 frequency", clock, "MHz"),
            ("cpu4 highest frequency", 2000.0, "MHz"),
            ("cpu0 busy", 100.0, "%"),
            ("thermal_zone0", degrees, "degC"),
        )
    ]
    found = summarise_side(side, select_counters(counters))
    assert found.measured_s == pytest.approx(30, abs=0.5)
    assert (found.first_ns, found.last_ns) == (2e6, 4e6)
    assert found.throttling is not None and found.throttling.start_s == pytest.approx(12, abs=1)
    assert 50 <= len(found.windows) <= 60
    first, last = found.windows[0], found.windows[-2]
    assert (first.start_s, first.p50_ns, first.high_mhz, first.high_degc) == (0, 2e6, 1800, 40)
    assert (last.p50_ns, last.low_mhz) == (4e6, None if last.high_mhz is None else 900)
    assert show_sustained(found).startswith("slower after 1") and show_sustained(found).endswith(" s: 2 ms to 4 ms")


def test_sustained_measurement_keeps_bounded_samples(monkeypatch):
    monkeypatch.setattr(sustained, "MAX_SAMPLES", 100)
    side = run_sustained(PacedBoard({"a": lambda: 1_000_000}), 10.0)
    kept = sum(batch.duration_ns.size for batch in side.batches)
    found = summarise_side(side, [])
    assert kept <= 100 + len(side.batches)
    assert 9_000 <= found.iterations <= 10_100
    assert found.windows[0].low_mhz is None


def test_sustained_measurement_keeps_batches_before_error():
    board = PacedBoard({"a": lambda: 1_000_000}, fail_at=60, failure=RunCrashed("gone"))
    side = side_on(board, "A", "a")
    with pytest.raises(RunCrashed):
        measure([side], BenchJob(Job(models=(Path("a"),)), sustained_s=3600), lambda *_: None, random.Random(1))
    assert len(side.batches) == len(side.summaries) > 30


def test_sustained_measurement_reports_board_events():
    board = PacedBoard({"a": lambda: 2_000_000})
    board.info_at = lambda now_ns: {"readings": [{"name": "throttle events", "value": float(now_ns > 5_000_000_000)}]}
    found = summarise_side(run_sustained(board, 10.0), [])
    assert found.throttling is not None
    assert found.throttling.event == EVENT
    assert found.throttling.start_s == pytest.approx(3.5, abs=1)


def test_throttling_begins_at_first_event_or_slow_batch():
    slow = [2.0] * 20 + [4.0] * 20
    assert find_throttling(summaries([2.0] * 40), min_effect=0.03) is None
    alone = find_throttling(summaries(slow), min_effect=0.03)
    assert alone is not None
    assert (alone.start_s, alone.event, alone.before_ns, alone.after_ns) == (10, "", 2e6, 4e6)
    later = find_throttling(summaries(slow, {21: EVENT}), min_effect=0.03)
    assert later is not None and (later.start_s, later.event) == (10, EVENT)
    earlier = find_throttling(summaries(slow, {18: EVENT}), min_effect=0.03)
    assert earlier is not None and earlier.start_s == 9
    always = find_throttling(summaries([4.0] * 3, {0: EVENT}), min_effect=0.03)
    assert always is not None and (always.start_s, always.before_ns) == (0, 4e6)


@pytest.mark.parametrize(
    "medians",
    [
        [2.0] * 20 + [4.0] * 5 + [2.0] * 20,  # recovers
        [2.0] * 38 + [4.0] * 2,  # too short
        [2.0] * 20 + [2.04] * 20,  # below the smallest effect
        [4.0] * 20 + [2.0] * 20,  # faster
        [2.0],
    ],
)
def test_throttling_ignores_slow_batches_that_do_not_last(medians):
    assert find_throttling(summaries(medians), min_effect=0.03) is None


def test_throttling_ignores_other_events():
    events = {5: "the cpu0 governor was changed from schedutil to performance"}
    assert find_throttling(summaries([2.0] * 10, events), min_effect=0.03) is None


def test_thin_batch_keeps_iterations_at_equal_distance():
    batch = Batch("A", 0, 0, np.arange(10), np.arange(10) + 5)
    assert thin_batch(batch, 4).start_ns.tolist() == [0, 4, 8]
    assert thin_batch(batch, 100).duration_ns.tolist() == [5]
    # Two hours of iterations of 0.1 ms.
    assert find_stride(7200, 1e-4) == 360
    assert find_stride(10, 1e-3) == 1


def test_sustained_without_batches_has_no_times():
    assert summarise_sustained([], [], [], requested_s=30, min_effect=0.03) is None


def test_format_sustained_describes_steady_and_throttled_board():
    batches = summaries([2.0] * 40)
    kept = [Batch("A", 0, 0, np.array([one.start_ns]), np.array([2_000_000])) for one in batches]
    steady = summarise_sustained(batches, kept, [], requested_s=20, min_effect=0.03)
    assert steady is not None
    assert show_sustained(steady) == "steady for 20 s: 2 ms to 2 ms"
    batches = summaries([2.0] * 20 + [4.0] * 20, {20: EVENT})
    throttled = summarise_sustained(batches, kept, [], requested_s=20, min_effect=0.03)
    assert throttled is not None
    assert show_sustained(throttled) == f"throttles after 10 s: 2 ms to 4 ms ({EVENT})"
