"""Distance of operations to measured peaks."""

from __future__ import annotations

import pytest
from support.made_profiles import profile, row
from support.rooflines import make_peaks

from hil.controller.analysis.roofline.attainment import ABOVE_PEAK, compute_roofline, find_dtype, limit_time
from hil.controller.records.base import Interval
from hil.controller.records.measurements.roofline import ModelWork, OperatorWork, PeakValue
from hil.core.clock import ClockFit
from hil.core.timeline import InvokeTiming, OpRow, Profile, Span

SHAPES = "4x4xf32, 4x4xf32 -> 4x4xf32"


def make_row(name: str, duration_ns: int, flops: int | None, moved: int | None, *, start: int = 0, **more) -> OpRow:
    return row(name, start, duration_ns, **{"shapes": SHAPES, **more}, flops=flops, bytes=moved)


def repeat_rows(durations: list[int], flops: int | None = 1_000_000, moved: int | None = 1000) -> list[OpRow]:
    return [
        make_row("mm", duration, flops, moved, start=number * 10_000_000, iteration=number)
        for number, duration in enumerate(durations)
    ]


def add_timed_runs(found: Profile, duration_ns: int, runs: int) -> Profile:
    windows = [(number * 10**9, number * 10**9 + duration_ns) for number in range(runs)]
    span = Span("run", 0, runs * 10**9)
    call = InvokeTiming("timed", span, span, iterations_ns=windows)
    return Profile(**{**vars(found), "calls": [call], "clock": ClockFit(0, 0.0, 0, 0)})


def test_compute_bound_operation_attains_share_of_compute_peak() -> None:
    # 1e6 operations at 100 Gop/s need 10 us; 1000 bytes at 10 GB/s need 0.1 us.
    (found,) = compute_roofline(profile(repeat_rows([40_000])), make_peaks()).rows
    assert (found.bound, found.shortest_ns, found.attained) == ("compute", 10_000, 0.25)
    assert (found.flops, found.bytes, found.intensity) == (1_000_000, 1000, 1000)
    assert found.flops_per_s == pytest.approx(25e9)
    assert found.roof_flops_per_s == pytest.approx(100e9)


def test_memory_bound_operation_attains_share_of_slope() -> None:
    # 1e6 bytes at 10 GB/s need 100 us; 1e6 operations need 10 us. The roof at 1 op/byte is 10 Gop/s.
    (found,) = compute_roofline(profile(repeat_rows([200_000], moved=1_000_000)), make_peaks()).rows
    assert (found.bound, found.shortest_ns, found.attained) == ("memory", 100_000, 0.5)
    assert found.roof_flops_per_s == pytest.approx(10e9)


def test_copy_without_operations_is_memory_bound() -> None:
    (found,) = compute_roofline(profile(repeat_rows([200_000], flops=0, moved=1_000_000)), make_peaks()).rows
    assert (found.bound, found.attained, found.roof_flops_per_s) == ("memory", 0.5, None)


def test_interval_combines_times_and_peaks() -> None:
    durations = [40_000 + 100 * (number * 7 % 41) for number in range(41)]
    (exact,) = compute_roofline(profile(repeat_rows(durations)), make_peaks()).rows
    (wide,) = compute_roofline(profile(repeat_rows(durations)), make_peaks(margin=0.1)).rows
    assert exact.interval is not None
    assert wide.interval is not None
    assert exact.attained == pytest.approx(10 / 42)
    assert 10 / 44 < exact.interval.low < exact.attained < exact.interval.high < 10 / 40
    assert wide.interval.low == pytest.approx(exact.interval.low / 1.1)
    assert wide.interval.high == pytest.approx(exact.interval.high / 0.9)


def test_few_iterations_have_no_interval() -> None:
    (found,) = compute_roofline(profile(repeat_rows([40_000] * 5)), make_peaks(margin=0.1)).rows
    assert found.interval is None
    assert found.attained == 0.25


def test_operation_above_the_peak_is_reported() -> None:
    found = compute_roofline(profile(repeat_rows([8000])), make_peaks())
    assert found.rows[0].is_above
    assert found.warnings[0].startswith(f"{ABOVE_PEAK}: mm: measure the peak again")


def test_operation_within_the_peaks_interval_is_not_above() -> None:
    found = compute_roofline(profile(repeat_rows([9500])), make_peaks(margin=0.1))
    assert found.rows[0].attained > 1
    assert not found.rows[0].is_above
    assert not found.warnings


def test_memory_bound_operation_above_the_peak_names_caches() -> None:
    found = compute_roofline(profile(repeat_rows([50_000], moved=1_000_000)), make_peaks())
    assert "fits into the caches" in found.warnings[0]


def test_uncounted_operation_makes_the_sum_a_lower_limit() -> None:
    rows = [
        make_row("mm", 30_000, 1_000_000, 1000),
        make_row("odd", 60_000, None, 1000, start=30_000, op_types=("NonMaxSuppression",)),
        row("alloca", 90_000, 10_000, kind="runtime"),
    ]
    found = compute_roofline(profile(rows), make_peaks())
    assert (found.uncounted.operators, found.uncounted.op_types) == (1, ["NonMaxSuppression"])
    assert (found.uncounted.share, found.uncounted.runtime_share) == (0.6, 0.1)
    assert found.warnings == [
        "not counted: 1 operation, 60.0% of the time (NonMaxSuppression): the model's sums are lower limits"
    ]
    assert (found.whole.flops, found.whole.shortest_ns) == (1_000_000, 10_000)
    assert [one.attained for one in found.rows if one.name == "odd"] == [None]


def test_whole_model_uses_the_time_without_profiler() -> None:
    rows = [
        make_row("mm", 20_000, 1_000_000, 1000),
        make_row("copy", 20_000, 0, 100_000, start=20_000),
    ]
    found = compute_roofline(add_timed_runs(profile(rows), 80_000, 30), make_peaks()).whole
    # 10 us of arithmetic and 10 us of memory in a timed run of 80 us.
    assert (found.time_ns, found.shortest_ns, found.attained) == (80_000, 20_000, 0.25)
    assert (found.flops, found.bytes) == (1_000_000, 101_000)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (0.25, 0.25)


def test_whole_model_without_operations_uses_the_work_of_the_model() -> None:
    work = ModelWork(
        model="m",
        function="",
        flops=1_000_000,
        bytes=1000,
        model_bytes=1000,
        operators=[
            OperatorWork(name="a", op_type="CONV_2D", flops=1_000_000, bytes=1000, shapes=SHAPES),
            OperatorWork(name="b", op_type="CUSTOM", flops=None, bytes=10, shapes=SHAPES),
        ],
        not_counted={"CUSTOM": 1},
    )
    found = compute_roofline(add_timed_runs(profile(), 40_000, 30), make_peaks(), work=work)
    assert (found.whole.flops, found.whole.attained) == (1_000_000, 0.25)
    assert found.uncounted.op_types == ["CUSTOM"]
    assert found.warnings[0].startswith("not counted: 1 operation (CUSTOM)")


def test_type_without_peak_is_reported_and_not_judged() -> None:
    rows = [make_row("mm", 40_000, 1000, 1000, shapes="4x4xi8, 4x4xi8 -> 4x4xi32")]
    found = compute_roofline(profile(rows), make_peaks())
    assert found.rows[0].attained is None
    assert found.warnings == ["no measured peak for int8: measure it with hil board peak sim --dtype TYPE"]


def test_int8_operation_uses_the_int8_peak() -> None:
    peaks = make_peaks(compute={"f32": PeakValue(rate=100e9), "int8": PeakValue(rate=400e9)})
    rows = [make_row("mm", 10_000, 1_000_000, 100, shapes="4x4xi8, 4x4xi8 -> 4x4xi32")]
    (found,) = compute_roofline(profile(rows), peaks).rows
    assert (found.dtype, found.attained) == ("int8", 0.25)


def test_board_without_memory_peak_has_only_a_compute_roof() -> None:
    (found,) = compute_roofline(profile(repeat_rows([40_000], moved=10**9)), make_peaks(memory=None)).rows
    assert (found.bound, found.attained) == ("compute", 0.25)


def test_profile_without_peaks_still_has_work_and_speed() -> None:
    (found,) = compute_roofline(profile(repeat_rows([40_000])), None).rows
    assert (found.flops, found.flops_per_s, found.attained, found.bound) == (1_000_000, 25e9, None, "")


def test_rows_group_by_node_and_type() -> None:
    rows = [
        make_row("d0", 10_000, 1000, 100, onnx_nodes=("a",), op_types=("Conv",)),
        make_row("d1", 20_000, 1000, 100, start=10_000, onnx_nodes=("b",), op_types=("Conv",)),
    ]
    (by_type,) = compute_roofline(profile(rows), make_peaks(), by="type").rows
    assert (by_type.name, by_type.flops, by_type.time_ns) == ("Conv", 2000, 30_000)
    assert [one.name for one in compute_roofline(profile(rows), make_peaks(), by="node").rows] == ["b", "a"]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ("1x4xf32, 4xf32 -> 1x4xf32", "f32"),
        ("1x4xi8, 4x4xi8, 4xi32 -> 1x4xi8", "int8"),
        ("1x4xf32, 4x4xi8 -> 1x4xf32", "f32"),
        ("1x4xf16, 4x4xi8 -> 1x4xf16", "f16"),
        ("1x4xbf16 -> 1x4xbf16", None),
        ("1x4xi32 -> 1x4xi32", "f32"),
        ("-> 4xf16", "f16"),
        ("f32 -> f32", "f32"),
        ("", "f32"),
        ("? -> ?", "f32"),
    ],
)
def test_dtype_comes_from_the_inputs(shapes: str, expected: str | None) -> None:
    assert find_dtype(shapes) == expected


@pytest.mark.parametrize("ends", [(1e-310, 2e11), (2e11, 3e11), (-1.0, 2e11), (5e10, 6e10)])
def test_unusable_interval_of_a_peak_is_ignored(ends: tuple[float, float]) -> None:
    interval = Interval(low=ends[0], high=ends[1], level=0.99)
    found = limit_time(1_000_000, 10, "f32", make_peaks(compute={"f32": PeakValue(rate=100e9, interval=interval)}))
    assert found is not None
    assert (found.shortest_ns, found.low_ns, found.high_ns) == (10_000, 10_000, 10_000)


def test_durations_beyond_64_bits_are_limited() -> None:
    longest = 2**63 - 1
    rows = [make_row("a", longest, 1, 1, iteration=number) for number in range(3)]
    rows += [make_row("a", longest, 1, 1, iteration=number) for number in range(3)]
    found = compute_roofline(add_timed_runs(profile(rows), longest * 2, 2), make_peaks())
    assert (found.rows[0].time_ns, found.whole.time_ns) == (2**62, 2**62)


def test_limit_is_unknown_without_work_or_peaks() -> None:
    assert limit_time(None, 10, "f32", make_peaks()) is None
    assert limit_time(10, None, "f32", make_peaks()) is None
    assert limit_time(10, 10, "f32", None) is None
    assert limit_time(10, 10, None, make_peaks()) is None
