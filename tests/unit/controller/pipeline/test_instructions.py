"""Statistics of instruction counts, and their comparison."""

from __future__ import annotations

import pytest

from hil.controller.pipeline.instructions import compare_counts, describe_change, format_counts, summarise_counts
from hil.controller.records.measurements.instructions import InstructionStatistics
from hil.core.instructions import InstructionCounts


def stats_of(*counts: int, counter: str = "perf_event") -> InstructionStatistics:
    found = summarise_counts(InstructionCounts(counter, counts))
    assert found is not None
    return found


def test_statistics_leave_out_the_cold_iteration() -> None:
    found = summarise_counts(InstructionCounts("perf_event", (9000, 1000, 1010, 1020)), cold=True)
    assert found is not None
    assert (found.iterations, found.median, found.min, found.max) == (3, 1010, 1000, 1020)
    assert found.spread == pytest.approx(10 / 1010)


def test_a_single_cold_iteration_is_kept() -> None:
    found = summarise_counts(InstructionCounts("perf_event", (9000,)), cold=True)
    assert found is not None and found.median == 9000


def test_statistics_without_counts_have_the_reason() -> None:
    found = summarise_counts(InstructionCounts(problem="no counter"))
    assert found == InstructionStatistics(counter="", problem="no counter")
    assert format_counts(found) == "not counted: no counter"
    assert summarise_counts(None) is None


def test_text_names_what_was_counted() -> None:
    assert format_counts(stats_of(1200, 1234, 1300)) == "1,234 (min 1,200, max 1,300; user space)"
    assert format_counts(stats_of(5, counter="icount")) == "5 (min 5, max 5; whole emulated board)"


@pytest.mark.parametrize(
    ("count", "verdict", "change"),
    [
        (1_001_000, "equal", "+0.10 %"),
        (1_001_100, "more", "+0.11 %"),
        (999_100, "equal", "-0.09 %"),
        (998_900, "fewer", "-0.11 %"),
    ],
)
def test_differences_above_a_thousandth_are_reported(count: int, verdict: str, change: str) -> None:
    found = compare_counts(stats_of(1_000_000), stats_of(count))
    assert found is not None and found.verdict == verdict
    assert describe_change(found) == f"{change} instructions"


def test_difference_within_the_spread_is_unclear() -> None:
    varying = stats_of(990, 995, 1000, 1005, 1010)
    within, above = (compare_counts(varying, stats_of(count)) for count in (1009, 1011))
    assert within is not None and (within.verdict, within.reason) == (
        "unclear",
        "the counts of one program vary by 1.00%",
    )
    assert above is not None and above.verdict == "more"


def test_counts_of_different_counters_are_not_compared() -> None:
    assert compare_counts(stats_of(1), stats_of(1, counter="icount")) is None
    assert compare_counts(stats_of(1), None) is None
    assert compare_counts(stats_of(1), summarise_counts(InstructionCounts(problem="no counter"))) is None
