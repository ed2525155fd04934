import math
import random
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.suite_runs import case, comparison, large_run, suite_run
from support.web import asking, write_record, write_run, write_suite

from hil.controller.analysis.bench.stats import compare_samples
from hil.controller.devices.measuring.time_statistics import DEFAULT_EFFECT
from hil.controller.web.compare import side_cases
from hil.controller.web.compare.comparing import MOVES, NOTHING, SAME, compare_sides
from hil.controller.web.index.index import IndexReader, IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.session.sides import ComparedSide, choose_side, find_baseline, get_session
from hil.controller.workloads.suites.reports.changes import Numbers, iter_changes
from hil.controller.workloads.suites.reports.diff import compare_runs
from hil.errors import UsageError


@pytest.fixture
def compared(tmp_path):
    """Compare sessions below ``tmp_path/runs`` by their ids."""

    def compare(a, b, only_a=None, only_b=None):
        with IndexWriter(tmp_path / "index.sqlite") as writer:
            Indexer(writer, [tmp_path / "runs"]).scan()
        with IndexReader(tmp_path / "index.sqlite").open_snapshot() as database:
            sides = [choose_side(database, ids, only or {}) for ids, only in ((a, only_a), (b, only_b))]
            return compare_sides(database, *sides)

    return compare


def test_comparison_matches_suite_diff(tmp_path, compared):
    rolled = random.Random(5)
    records = large_run(300)
    other = [
        case(
            one.id,
            rolled.choice([one.outcome, one.outcome, "PASS", "FAIL", "TIMEOUT", "SKIP"]),
            device_p50_ns=rolled.choice([None, 40_000.0, 125_000.0 * rolled.uniform(0.5, 2)]),
            device_p90_ns=rolled.choice([None, 130_000.0]),
            iterations=rolled.choice([1, 4, 5, 20]),
            grade=rolled.choice([None, {"grade": "A", "reasons": []}, {"grade": "F", "reasons": ["throttled"]}]),
            artifact_bytes=rolled.choice([None, 18_400, 19_000]),
            program=rolled.choice(["", "blake3:00ff", f"blake3:{number:060x}"]),
            outputs=(
                comparison(sqnr_db=rolled.choice([92.5, 91.6, 80.0, "inf"]), max_abs=rolled.choice([0, 1e-6, 1])),
            ),
        )
        for number, one in enumerate(records)
        if number % 9
    ]
    a = suite_run(tmp_path / "runs" / "a", records[:-3], missing=(records[-1].id,))
    b = suite_run(tmp_path / "runs" / "b", other, missing=(records[0].id,))
    told, found = compare_runs(a, b), compared(["a"], ["b"])
    for kind in MOVES[:-1]:
        expected = {(one.id, one.before, one.after) for one in getattr(told, kind)}
        assert {(one.name, one.before.word, one.after.word) for one in found.pairs if one.move == kind} == expected
    changed = {(one.pair.name, one.what, one.before, one.after, one.worse) for one in found.movers if one.decided}
    assert changed == {(one.id, one.what, one.before, one.after, one.worse) for one in told.changed}
    assert len(changed) > 50
    assert {one.cases for one in found.movers} >= {one.cases for one in told.changed}
    assert found.device_ratio == pytest.approx(told.device_ratio)
    assert (found.device_cases, found.device_few) == (told.device_cases, told.device_few)


def test_comparison_and_suite_diff_report_changed_energy(tmp_path, compared):
    def measured(**joules):
        energies = {
            name: {"meter": "file", "per_inference": {"joules": j, "interval": None}} for name, j in joules.items()
        }
        return [case(name, energy=energy) for name, energy in energies.items()]

    a = suite_run(
        tmp_path / "runs" / "a", [*measured(more=1e-3, less=2e-3, same=1e-3, offset=-1e-9), case("unmeasured")]
    )
    b = suite_run(tmp_path / "runs" / "b", measured(more=1.3e-3, less=1e-3, same=1.1e-3, offset=1e-3, unmeasured=1e-3))
    found = {one.pair.name: one.verdict for one in compared(["a"], ["b"]).movers if one.what == "joules"}
    assert found == {
        "more": "more energy",
        "less": "less energy",
        "same": "no difference",
        "offset": "no difference",
    }
    told = {(one.id, one.worse) for one in compare_runs(a, b).changed if one.what == "joules"}
    assert told == {("more", True), ("less", False)}
    with asking(tmp_path / "runs") as client:
        page = client.get("/compare?a=a&b=b&show=joules").text
        assert "1.3 mJ" in page and "what=energy" in page


def test_comparison_matches_outputs_by_name(tmp_path, compared):
    """Each side has another worst output; they must not be compared with each other."""
    features, prob = comparison(name="features", sqnr_db=133.0, max_abs=2e-6), comparison(name="prob")
    before = {**prob, "sqnr_db": 138.0, "max_abs": 1.19e-7}, {**prob, "sqnr_db": 98.5, "max_abs": 8.58e-6}
    a = suite_run(tmp_path / "runs" / "a", [case("m", outputs=(features, before[0])), case("one", outputs=(features,))])
    worse = {**features, "sqnr_db": 132.8}
    b = suite_run(
        tmp_path / "runs" / "b", [case("m", outputs=(before[1], worse)), case("one", outputs=(before[1], worse))]
    )
    found = {(one.pair.name, one.what): one for one in compared(["a"], ["b"]).movers}
    told = [(one.before, one.after, one.output, one.worse) for one in (found["m", "sqnr_db"], found["m", "max_abs"])]
    assert told == [(138.0, 98.5, "prob", True), (1.19e-7, 8.58e-6, "prob", True)]
    only = found["one", "sqnr_db"]
    assert (only.before, only.after, only.output, only.decided) == (133.0, 132.8, "features", False)
    assert {(one.id, one.what, one.output) for one in compare_runs(a, b).changed} == {
        ("m", "sqnr_db", "prob"),
        ("m", "max_abs", "prob"),
    }
    with asking(tmp_path / "runs") as client:
        row = client.get("/session.csv?id=b").text.splitlines()[1].split(",")
        assert {"8.58e-06", "98.5"} <= set(row)
        assert "output prob" in client.get("/compare?a=a&b=b").text


def test_comparison_ignores_outputs_of_repeated_case(tmp_path, compared):
    several = comparison(name="x", max_abs=1.0), comparison(name="y", max_abs=1.0)
    suite_run(tmp_path / "runs" / "a", [case("m", outputs=several)])
    again = [case("m", outputs=several), case("m", "TIMEOUT")]
    suite_run(tmp_path / "runs" / "b", again)
    assert [one.what for one in compared(["a"], ["b"]).movers if one.what == "max_abs"] == []


@pytest.mark.parametrize("sessions", [1, 3])
def test_comparison_of_multiple_outputs_matches_suite_diff(tmp_path, compared, sessions):
    rolled = random.Random(3)

    def outputs():
        names = rolled.sample("xyz", rolled.choice([0, 1, 1, 2, 3]))
        return tuple(
            comparison(name=one, sqnr_db=rolled.uniform(80, 90), max_abs=10 ** rolled.uniform(-6, -5)) for one in names
        )

    a = [case(f"m{number}", outputs=outputs()) for number in range(60)]
    b = [case(f"m{number}", outputs=outputs()) for number in range(60)]
    told = compare_runs(suite_run(tmp_path / "runs" / "a0", a), suite_run(tmp_path / "runs" / "b0", b))
    for number in range(1, sessions):
        suite_run(tmp_path / "runs" / f"a{number}", a)
        suite_run(tmp_path / "runs" / f"b{number}", b)
    found = compared(*([f"{side}{number}" for number in range(sessions)] for side in "ab"))
    changed = {
        (one.pair.name, one.what, one.before, one.after, one.worse, one.output) for one in found.movers if one.decided
    }
    assert changed == {(one.id, one.what, one.before, one.after, one.worse, one.output) for one in told.changed}
    assert len({one[-1] for one in changed}) == 4


def times(folder: Path, name: str, values, outcome="PASS", **other):
    """Write a session with one case for each device time."""
    records = [case(f"m_{n}", outcome, device_p50_ns=v, device_p90_ns=v * 1.05, **other) for n, v in enumerate(values)]
    return suite_run(folder / "runs" / name, records)


def test_comparison_ignores_single_cold_iteration(tmp_path, compared):
    times(tmp_path, "a", [1e5], iterations=1, cold=True)
    times(tmp_path, "b", [9e5], iterations=1, cold=True)
    (mover,) = [one for one in compared(["a"], ["b"]).movers if one.what == "device_p50_ns"]
    assert mover.verdict == NOTHING and not mover.decided and mover.comparison is None


def test_single_runs_require_large_change(tmp_path, compared):
    times(tmp_path, "a", [1e5, 1e5])
    times(tmp_path, "b", [1.1e5, 1.5e5])
    found = [one for one in compared(["a"], ["b"]).movers if one.what == "device_p50_ns"]
    assert [one.verdict for one in found] == [SAME, "slower"]
    assert all(one.comparison is None for one in found)


def test_sets_detect_small_change_with_interval(tmp_path, compared):
    rolled = random.Random(1)
    for number in range(8):
        times(tmp_path, f"a{number}", [1e5 * rolled.gauss(1, 0.01), 1e5 * rolled.gauss(1, 0.01)])
        times(tmp_path, f"b{number}", [1.08e5 * rolled.gauss(1, 0.01), 1e5 * rolled.gauss(1, 0.01)])
    found = compared([f"a{n}" for n in range(8)], [f"b{n}" for n in range(8)])
    slower, same = [one for one in found.movers if one.what == "device_p50_ns"]
    assert (slower.verdict, same.verdict) == ("slower", SAME)
    assert slower.comparison.interval.low < 1.08 < slower.comparison.interval.high
    assert (slower.count_before, slower.count_after) == (8, 8)


def test_sets_are_compared_case_by_case(tmp_path, compared):
    rolled = random.Random(2)
    sides, programs = {"a": [], "b": []}, ("", "blake3:00ff", "blake3:00fe")
    for name in (f"{side}{number}" for side in sides for number in range(5)):
        records = [
            case(
                f"m_{place}",
                rolled.choice(["PASS", "FAIL", "SKIP"]),
                device_p50_ns=rolled.choice([None, 40_000.0, 1e5 * rolled.gauss(1, 0.01), 1.3e5]),
                device_p90_ns=1.2e5,
                iterations=rolled.choice([4, 5, 20]),
                artifact_bytes=rolled.choice([18_400, 19_000]) + 400 * (name[0] == "b"),
                program=programs[place % 3],
                outputs=(comparison(max_abs=rolled.choice([0.0, 1e-6, 1.0]), sqnr_db=rolled.choice([80.0, 92.5])),),
            )
            for place in rolled.sample(range(30), 25)
        ]
        suite_run(tmp_path / "runs" / name, records, started=1e9 + int(name[1]))
        sides[name[0]].append({one.id: one for one in records})
    found = compared(*([f"{side}{number}" for number in range(5)] for side in sides))
    movers = {(one.what, one.pair.name): one for one in found.movers}
    assert len(movers) > 60 and {one.verdict for one in movers.values()} > {SAME, NOTHING, "slower"}
    for pair in found.pairs:
        samples = [[run[pair.name] for run in reversed(side) if pair.name in run] for side in sides.values()]
        for ends, records in zip((pair.before, pair.after), samples, strict=True):
            assert ends.outcomes == Counter(one.outcome for one in records)
        timed = [_well_timed(records) for records in samples]
        if all(timed):
            mover = movers["device_p50_ns", pair.name]
            assert mover.before == statistics.median(one.device_p50_ns for one in timed[0])
            assert mover.verdict == _verdict_on_times(*timed)
        for what in ("max_abs", "sqnr_db"):
            was, now = ([Numbers.of(one) for one in records] for records in samples)
            values = [[getattr(one, what) for one in side] for side in (was, now)]
            medians = [Numbers(**{what: statistics.median(one)}) for one in values]
            apart = max(values[0]) < min(values[1]) or max(values[1]) < min(values[0])
            assert movers[what, pair.name].decided == (apart and any(iter_changes(*medians)))


def _well_timed(records):
    known = [one for one in records if one.device_p50_ns]
    return [one for one in known if one.iterations >= 5] or known


def _verdict_on_times(was, now):
    times = [np.array([one.device_p50_ns for one in side]) for side in (was, now)]
    if min(one.iterations for one in (*was, *now)) < 5:
        return NOTHING
    if found := compare_samples(*times, min_effect=DEFAULT_EFFECT):
        return SAME if found.verdict == "no difference" else found.verdict
    numbers = (Numbers(statistics.median(one), 1.2e5, 5) for one in times)
    told = next(iter(iter_changes(*numbers)), None)
    return SAME if told is None else "slower" if told.worse else "faster"


def test_comparison_reloads_changed_session(tmp_path, compared):
    times(tmp_path, "a", [1e5, 1e5])
    times(tmp_path, "b", [1e5])
    assert compared(["a"], ["b"]).counts["gone"] == 1
    times(tmp_path, "b", [1e5, 2e5])
    found = compared(["a"], ["b"])
    assert (found.total, found.counts["device_p50_ns"], found.counts["gone"]) == (2, 1, 0)


def test_comparison_rejects_side_above_sample_limit(tmp_path, compared, monkeypatch):
    times(tmp_path, "a", [1e5] * 3)
    times(tmp_path, "b", [1e5] * 2)
    monkeypatch.setattr(side_cases, "MAX_SAMPLES", 4)
    assert compared(["a"], ["b"]).total == 3
    with pytest.raises(UsageError, match="more than 4 case results"):
        compared(["a", "b"], ["b"])


def test_case_failing_in_any_session_counts_as_broken(tmp_path, compared):
    times(tmp_path, "a", [1e5])
    times(tmp_path, "b1", [1e5])
    times(tmp_path, "b2", [1e5], outcome="FAIL")
    (pair,) = compared(["a"], ["b1", "b2"]).pairs
    assert pair.move == "broke" and pair.after.outcomes == {"PASS": 1, "FAIL": 1}


def test_filter_selects_sessions_of_side(tmp_path, compared):
    for name, board, time in (("one", "x", 1e5), ("two", "y", 3e5)):
        suite_run(tmp_path / "runs" / name, [case("c", board=board, device_p50_ns=time)], boards=[board])
    found = compared([], [], {"board": "x"}, {"board": "y"})
    assert [one.verdict for one in found.movers if one.what == "device_p50_ns"] == ["slower"]
    with pytest.raises(UsageError, match="sessions with board z not found"):
        compared([], [], {"board": "x"}, {"board": "z"})


def test_baseline_selects_previous_session_of_same_kind(tmp_path):
    for number, (name, flow) in enumerate([("a", "iree"), ("b", "tflite"), ("c", "iree"), ("d", "iree")]):
        suite_run(tmp_path / "runs" / name, [case("c")], flow=flow, started=1e9 + number)
    with IndexWriter(tmp_path / "index.sqlite") as writer:
        Indexer(writer, [tmp_path / "runs"]).scan()
    with IndexReader(tmp_path / "index.sqlite").open_snapshot() as database:
        told = {name: find_baseline(database, get_session(database, name)) for name in "abcd"}
    assert {name: one and one.id for name, one in told.items()} == {"a": None, "b": None, "c": "a", "d": "c"}


SAMPLES = st.lists(st.floats(-0.05, 0.05), min_size=6, max_size=12)


@given(st.floats(0.5, 2), SAMPLES, SAMPLES)
def test_swapped_samples_give_inverse_ratio(ratio, first, second):
    a, b = np.exp(first), ratio * np.exp(second)
    there, back = (compare_samples(x, y, min_effect=0.0) for x, y in ((a, b), (b, a)))
    assert there.ratio * back.ratio == pytest.approx(1)
    assert there.interval.low * back.interval.high == pytest.approx(1)
    assert there.interval.low <= there.ratio * (1 + 1e-12) and there.ratio <= there.interval.high * (1 + 1e-12)


def test_extreme_times_have_finite_interval():
    found = compare_samples(np.array([1e-300] * 6), np.array([1e300, 1.0] * 3), min_effect=0.03)
    assert math.isfinite(found.interval.high)


@pytest.mark.parametrize(("many", "few"), [(8, 8), (12, 1), (20, 6)])
def test_equal_samples_rarely_differ(many, few):
    rolled = np.random.default_rng(3)
    tries = 2000
    wrong = sum(
        compare_samples(
            np.exp(rolled.normal(0, 0.05, many)), np.exp(rolled.normal(0, 0.05, few)), min_effect=0.0
        ).verdict
        != "no difference"
        for _ in range(tries)
    )
    assert wrong / tries < 0.02


def test_interval_requires_enough_samples():
    assert compare_samples(np.ones(3), np.ones(3), min_effect=0.03) is None
    assert compare_samples(np.ones(6), np.ones(0), min_effect=0.03) is None


def test_compare_page_handles_valid_and_invalid_queries(tmp_path):
    runs = tmp_path / "runs"
    suite_run(runs / "a", [case("<b>&"), case("c")], started=1e9)
    suite_run(runs / "b", [case("<b>&", "FAIL"), case("new")], started=2e9)
    write_run(runs, "r", [{"name": "m"}])
    with asking(runs) as client:
        for query in (
            "",
            "a=a",
            "b=b",
            "a=a&b=b",
            "b=r",
            "a=a&b=r",
            "a=a&b=b&show=broke&order=-name&q=b",
            "a.board=sim&b=b",
        ):
            answer = client.get(f"/compare?{query}")
            assert answer.status_code == 200, query
            assert "<b>&" not in answer.text
        assert "previous session of the same kind" in client.get("/compare?b=b").text
        assert "2 cases with the same outcome" not in client.get("/compare?a=a&b=b").text
        assert "2 cases with the same outcome" in client.get("/compare?a=a&b=a").text
        for query in ("a=none", "b.board=none"):
            assert client.get(f"/compare?{query}").status_code == 404, query
        for query in ("a=a&b=b&show=what", "a=a&b=b&show=broke&order=what", "a.last=x"):
            assert client.get(f"/compare?{query}").status_code == 400, query
        marked = client.get("/compare?s=b&s=a", follow_redirects=False)
        assert (marked.status_code, marked.headers["location"]) == (303, "/compare?a=a&b=b")
        assert 'name="s" value="a"' in client.get("/").text
        assert "/compare?b=b" in client.get("/session?id=b").text


def test_compare_page_reports_changed_model_file(tmp_path):
    for name, digest in (("a", "blake3:aaaa1"), ("b", "blake3:bbbb2")):
        write_suite(tmp_path, name, [{"id": "net_full_model", "model": "net"}], models={"net": {"digest": digest}})
    write_record(tmp_path / "c" / "bisect.json", {"schema": 1, "model": "net.onnx", "model_digest": "blake3:bbbb2"})
    write_run(tmp_path, "d", [{"name": "net", "model": {"format": "onnx", "digest": "blake3:aaaa1"}}])
    with asking(tmp_path) as client:
        for query, told in (("a=a&b=b", True), ("a=c&b=b", False), ("a=d&b=a", False), ("a=d&b=c", True)):
            assert ("model net changed" in client.get(f"/compare?{query}").text) is told, query
        assert "model net changed: aaaa1 before, bbbb2 after" in client.get("/compare?a=a&b=b").text


def test_side_name_describes_filter(tmp_path):
    assert ComparedSide([], {"board": "x"}).name == "board x"
