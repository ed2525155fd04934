"""Compare two profiles: join operations, detect changes, ignore noise."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence

import pytest
from support.made_profiles import US, profile, row, run_on

from hil.controller.analysis.profile.diff import OpDiff, ProfileDiff, compare_profiles
from hil.controller.analysis.profile.totals import sum_rows
from hil.core.timeline import InvokeTiming, Profile, Span


def called(kind: str, times: Sequence[int]) -> InvokeTiming:
    """A call whose iterations take these times."""
    windows = [(1000 * US * number, 1000 * US * number + time) for number, time in enumerate(times)]
    whole = Span("run", 0, 1000 * US * len(times))
    return InvokeTiming(kind, whole, whole, 0, windows)


def measured(
    times: Mapping[str, Sequence[int]],
    *,
    nodes: Mapping[str, tuple[str, ...]] | None = None,
    timed: Sequence[int] | None = None,
    runtime: str = "iree 3.13",
) -> Profile:
    """Return a profile of operations with the given times per iteration, named like their nodes.

    The timed runs take as long as the profiled runs unless ``timed`` is given.
    """
    known = nodes or {}
    rows = [
        row(op, 1000 * US * iteration, time, iteration=iteration, onnx_nodes=known.get(op, (op,)))
        for op, took in times.items()
        for iteration, time in enumerate(took)
    ]
    together = [sum(took) for took in zip(*times.values(), strict=True)]
    calls = [called("timed", together if timed is None else timed), called("profiled", together)]
    return profile(rows, calls=[call for call in calls if call.iterations_ns], runtime=runtime)


def noisy(dice: random.Random, mean_ns: float, iterations: int, noise: float = 0.05) -> list[int]:
    return [round(dice.gauss(mean_ns, noise * mean_ns)) for _ in range(iterations)]


def by_name(diff: ProfileDiff) -> dict[str, OpDiff]:
    return {one.name: one for one in diff.ops}


def test_diff_joins_operations_by_nodes():
    a = measured({"dispatch_3": [100] * 9, "copy": [5] * 9}, nodes={"dispatch_3": ("conv1", "relu1"), "copy": ()})
    b = measured({"dispatch_7": [100] * 9, "copy": [5] * 9}, nodes={"dispatch_7": ("conv1", "relu1"), "copy": ()})
    diff = by_name(compare_profiles(a, b))
    assert set(diff) == {"conv1;relu1", "copy"}
    assert (diff["conv1;relu1"].a_ops, diff["conv1;relu1"].b_ops) == (("dispatch_3",), ("dispatch_7",))
    assert all(one.ratio == 1.0 and one.change == "" for one in diff.values())


def test_diff_compares_fused_operation_with_parts():
    fused = measured({"all": [90] * 9, "x": [7] * 9}, nodes={"all": ("conv1", "relu1", "pool1")})
    apart = measured(
        {"one": [60] * 9, "two": [20] * 9, "three": [10] * 9, "x": [7] * 9},
        nodes={"one": ("conv1",), "two": ("relu1",), "three": ("pool1",)},
    )
    for a, b, parts in ((fused, apart, "b_ops"), (apart, fused, "a_ops")):
        diff = by_name(compare_profiles(a, b))
        assert set(diff) == {"conv1;relu1;pool1", "x"}
        whole = diff["conv1;relu1;pool1"]
        assert getattr(whole, parts) == ("one", "two", "three")
        assert whole.a is not None and whole.b is not None
        assert (whole.a.p50_ns, whole.b.p50_ns, whole.ratio, whole.change) == (90, 90, 1.0, "")


def test_diff_marks_operations_missing_in_a_profile():
    a = measured({"same": [50] * 9, "gone": [30] * 9, "left": [1] * 9}, nodes={"gone": ("n", "m"), "left": ("m",)})
    b = measured({"same": [50] * 9, "new": [80] * 9})
    diff = compare_profiles(a, b)
    assert [(one.name, one.change, one.change_ns) for one in diff.ops] == [
        ("new", "only in b", 80),
        ("n;m", "only in a", -30),
        ("m", "only in a", -1),
        ("same", "", 0),
    ]
    new, gone, *_ = diff.ops
    assert (new.a, gone.b, new.ratio, gone.low) == (None, None, None, None)
    assert (diff.total.kind, diff.total.a_ops, diff.total.change_ns) == ("total", (), 49)


def test_diff_sums_operation_run_twice_per_iteration():
    rows = [row("a", 10 * at, 3 + at, iteration=at // 2) for at in range(6)]
    rows.append(row("rare", 100, 2, iteration=1))
    one = by_name(compare_profiles(profile(rows), profile(rows)))
    cost, rare = one["a"].a, one["rare"].a
    assert cost is not None and rare is not None
    assert (cost.p50_ns, cost.mean_ns, cost.iterations) == (11, 11, 3)
    assert (cost.share, rare.share) == (1, 0), "of the medians that are shown"
    assert (rare.p50_ns, rare.mean_ns, rare.iterations) == (0, pytest.approx(2 / 3), 3), (
        "it did not run in two of three"
    )


def test_diff_computes_shares_of_medians():
    rows = [row(op, 1000 * at, took, iteration=at) for op, took in (("a", 60), ("b", 40)) for at in range(5)]
    rows[0] = row("a", 0, 6000)  # one outlier: by mean times the first operation has nearly the whole share
    alone = {one.name: one.share for one in sum_rows(rows)}
    compared = compare_profiles(profile(rows), profile(rows))
    shares = {one.name: one.a.share for one in compared.ops if one.a}
    assert shares == alone == {"a": 0.6, "b": 0.4}
    assert compared.total.a is not None and compared.total.a.share == 1


@pytest.mark.ci
def test_diff_ignores_noise_and_detects_changes():
    """A hundred operations each time: with intervals of 95 % each, five of them would be false alarms."""
    dice = random.Random(1)
    alarms = 0
    for _ in range(20):
        a, b = ({f"op{n}": noisy(dice, 50 * US, 20) for n in range(100)} for _ in "ab")
        alarms += any(one.change for one in compare_profiles(measured(a), measured(b), margin=0.0).ops)
        b["op7"], b["op8"] = noisy(dice, 60 * US, 20), noisy(dice, 40 * US, 20)
        changed = {one.name: one.change for one in compare_profiles(measured(a), measured(b)).ops if one.change}
        assert changed == {"op7": "slower", "op8": "faster"}
    assert alarms <= 3, "one in twenty is what 95 % of all together allow"


def test_diff_interval_covers_true_ratio_at_stated_rate():
    dice = random.Random(2)
    held = 0
    for _ in range(400):
        a, b = {"x": noisy(dice, 50 * US, 9)}, {"x": noisy(dice, 55 * US, 14)}
        diff = compare_profiles(measured(a), measured(b), confidence=0.8)
        (one,) = diff.ops
        assert one.low is not None and one.high is not None and one.ratio is not None
        assert one.low <= one.ratio <= one.high
        held += one.low <= 1.1 <= one.high
    # The total uses the same interval here, so each interval has a level of 90 %.
    assert 0.87 <= held / 400 <= 0.95


def test_diff_interval_matches_rank_tables():
    """For 5 and 5 at 5 % (of two intervals 10 %) they say 2: so many ratios are left out at each end."""
    a, b = [1000, 1007, 1031, 1100, 1211], [2003, 2100, 2201, 2333, 2500]
    ratios = sorted(theirs / mine for mine in a for theirs in b)
    (one,) = compare_profiles(measured({"x": a}), measured({"x": b}), confidence=0.9).ops
    assert (one.low, one.ratio, one.high) == pytest.approx((ratios[2], ratios[12], ratios[-3]))


def test_diff_interval_narrows_with_more_iterations():
    dice = random.Random(3)
    few, many = (
        compare_profiles(measured({"x": noisy(dice, 100 * US, n)}), measured({"x": noisy(dice, 103 * US, n)})).ops[0]
        for n in (30, 2000)
    )
    for one in (few, many):
        assert one.low is not None and one.high is not None and one.low <= 1.03 <= one.high and one.change == ""
    assert many.high - many.low < few.high - few.low


def test_diff_ignores_change_within_margin():
    a, b = measured({"x": [100, 101, 102] * 9}), measured({"x": [104, 105, 106] * 9})
    (within,) = compare_profiles(a, b).ops
    (beyond,) = compare_profiles(a, b, margin=0.01).ops
    (less,) = compare_profiles(b, a, margin=0.01).ops
    assert within.low is not None and within.low > 1
    assert (within.change, beyond.change, less.change) == ("", "slower", "faster")


def test_diff_needs_enough_iterations():
    (one,) = compare_profiles(measured({"x": [100] * 3}), measured({"x": [900] * 3})).ops
    assert (one.ratio, one.low, one.high, one.change) == (pytest.approx(9.0), None, None, "")


def test_diff_accepts_zero_times_and_empty_profiles():
    nothing, something = measured({"x": [0] * 9}), measured({"x": [0] * 9}, timed=[5] * 9)
    assert [one.change for one in compare_profiles(nothing, nothing).ops] == [""]
    (one,) = compare_profiles(something, something).ops
    assert (one.ratio, one.change) == (1.0, "")
    nothing = compare_profiles(profile(), profile())
    assert (nothing.ops, nothing.total.ratio) == ([], None)


def test_diff_verdict_uses_timed_runs():
    """One profiler adds 5 %, the other 300 %: the faster run looks twice as slow."""
    a = measured({"conv": [90 * US] * 12, "fc": [15 * US] * 12}, timed=[100 * US, 101 * US] * 6)
    b = measured(
        {"conv": [150 * US] * 12, "fc": [50 * US] * 12}, timed=[50 * US, 51 * US] * 6, runtime="onnxruntime 1.31"
    )
    diff = compare_profiles(a, b)
    assert diff.verdict.startswith("B is faster than A: the timed run takes 0.50")
    assert (diff.timed.change, diff.timed.ratio) == ("faster", pytest.approx(0.502, abs=0.01))
    assert diff.a_times.overhead == pytest.approx(0.05, abs=0.01)
    assert diff.b_times.overhead == pytest.approx(3.0, abs=0.1)
    assert "iree" in diff.incomparable and "onnxruntime" in diff.incomparable
    for one in (diff.total, *diff.ops):
        assert (one.ratio, one.low, one.high, one.change) == (None, None, None, "")
    assert [one.name for one in diff.ops] == ["conv", "fc"]
    told = diff.record()
    assert [one.change_ns for one in (told.total, *told.ops)] == [None] * 3
    assert told.timed.change_ns == pytest.approx(-50 * US)


@pytest.mark.parametrize("changed", [0, 1])
def test_diff_skips_operations_with_high_overhead(changed):
    """The same runtime, but one profile has a high overhead."""
    sides = [measured({"x": [100 * US] * 12}), measured({"x": [125 * US] * 12}, timed=[100 * US] * 12)]
    diff = compare_profiles(*(sides if changed else sides[::-1]))
    assert (diff.timed.change, diff.ops[0].change, diff.ops[0].ratio) == ("", "", None)
    assert diff.incomparable == f"the profiler adds 25% to {'AB'[changed]}'s runs"


def test_diff_ignores_change_within_profiler_overhead():
    dear = measured({"x": [115 * US] * 12}, timed=[100 * US] * 12)
    (one,) = compare_profiles(measured({"x": [100 * US] * 12}), dear).ops
    assert (one.ratio, one.change) == (pytest.approx(1.15), "")


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ([100] * 12, [], "cannot determine the faster run: missing timed run"),
        ([], [], "cannot determine the faster run: missing timed run"),
        ([100] * 2, [900] * 2, "cannot determine the faster run: not enough timed iterations"),
        ([100, 101] * 9, [101, 100] * 9, "no significant difference between the timed runs"),
    ],
)
def test_diff_leaves_verdict_open_without_enough_timed_runs(a, b, verdict):
    diff = compare_profiles(measured({"x": [100] * 12}, timed=a), measured({"x": [900] * 12}, timed=b))
    assert diff.verdict == verdict and diff.timed.change == ""


def test_diff_serializes_to_json():
    diff = compare_profiles(run_on(run="a", iterations=12), run_on(run="b", iterations=12, slower=1.5, seed=1))
    told = json.loads(json.dumps(diff.record().to_json(), allow_nan=False))
    assert (told["a"], told["b"], told["confidence"], told["margin"]) == ("a", "b", 0.95, 0.05)
    assert (told["total"]["change"], told["total"]["name"]) == ("slower", "total")
    assert told["total"]["change_ns"] == diff.total.change_ns
    assert told["timed"]["change"] == "slower" and told["verdict"] == diff.verdict
    assert [one["name"] for one in told["ops"]] == [one.name for one in diff.ops]
    assert sum(one["a"]["share"] for one in told["ops"]) == pytest.approx(1)
