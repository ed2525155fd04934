"""Totals of profiles, their text and JSON output, and the lookup of a profile."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.schemas import check_document
from support.shown_profile import US, example

from hil.controller.analysis.profile.show import format_si, print_profile, summarize_profile
from hil.controller.analysis.profile.store import find_folder, find_profile, read_title, trace_of, write_profile
from hil.controller.analysis.profile.totals import find_typical_iteration, run_times, sum_rows
from hil.controller.cli.stored.profile import profile as command
from hil.controller.storage.runs import RunStore
from hil.errors import UsageError


def test_totals_by_operation_sort_by_cost():
    first, second, third = sum_rows(example().rows)
    assert [(one.name, one.calls, one.total_ns, one.share) for one in (first, second, third)] == [
        ("matmul_0", 3, 180 * US, 0.6),
        ("matmul_1", 6, 90 * US, 0.3),
        ("buffer.copy", 3, 30 * US, 0.1),
    ]
    assert (first.mean_ns, second.mean_ns, second.p50_ns) == (60 * US, 15 * US, 15 * US)
    assert (first.onnx_nodes, second.onnx_nodes, third.onnx_nodes) == (("fc1", "relu1"), ("fc2", "fc3"), ())
    assert (first.kind, third.kind) == ("compute", "runtime")


def test_totals_group_by_node_and_type():
    by_node = [(one.name, one.share) for one in sum_rows(example().rows, "node")]
    assert by_node == [("fc1, relu1", 0.6), ("fc2", 0.2), ("fc3", 0.1), ("(runtime)", 0.1)]
    by_type = [(one.name, one.share, one.ops) for one in sum_rows(example().rows, "type")]
    assert by_type == [
        ("Gemm+Relu", 0.6, ("matmul_0",)),
        ("Gemm", 0.3, ("matmul_1",)),
        ("(runtime)", 0.1, ("buffer.copy",)),
    ]


def test_totals_compute_parallelism_from_tiles():
    assert [one.parallelism for one in sum_rows(example().rows)] == [2.0, 1.0, None]


def test_totals_compute_throughput_from_estimates():
    first, second, third = sum_rows(example().rows)
    # 120,000 operations and 6,000 bytes in 60 us.
    assert (first.flops_per_s, first.bytes_per_s, first.intensity) == (2e9, 1e8, 20.0)
    assert (first.bound_estimate, second.bound_estimate, third.bound_estimate) == ("compute", "memory", "")
    assert (third.flops_per_s, third.bytes_per_s, third.intensity) == (None, None, None)


def test_totals_omit_throughput_with_missing_estimate():
    rows = list(example().rows)
    rows[4] = replace(rows[4], flops=None, bound_estimate="memory")
    (first, *_) = sum_rows(rows)
    assert (first.flops_per_s, first.intensity, first.bound_estimate) == (None, None, "")
    assert first.bytes_per_s == 1e8


def test_totals_accept_zero_durations():
    rows = [replace(row, duration_ns=0, tile_time_ns=0) for row in example().rows]
    assert {(one.share, one.parallelism, one.flops_per_s) for one in sum_rows(rows)} == {(0.0, None, None)}
    assert sum_rows([]) == []


def test_totals_exclude_time_of_nested_operations():
    *compute, copy = example(iterations=1).rows
    around = replace(copy, op="execute", start_ns=compute[0].start_ns - 10 * US, duration_ns=120 * US)
    # Two concurrent threads: their 40 us together take 20 us.
    beside = replace(compute[1], op="beside")
    found = {one.name: one.total_ns for one in sum_rows([around, *compute[:2], beside, *compute[2:], copy])}
    assert found == {
        "execute": 20 * US,
        "matmul_0": 60 * US,
        "matmul_1": 30 * US,
        "beside": 20 * US,
        "buffer.copy": 10 * US,
    }


def test_run_times_compute_profiler_overhead():
    times = run_times(example(timed_ns=80 * US))
    assert (times.timed_p50_ns, times.profiled_p50_ns, times.iterations) == (80 * US, 100 * US, 3)
    assert times.overhead == pytest.approx(0.25)


def test_run_times_fall_back_to_rows():
    profile = example(iterations=4)
    calls = [replace(call, iterations_ns=()) for call in profile.calls]
    times = run_times(replace(profile, calls=calls))
    # The timed call took 160 us and 10 before and after.
    assert (times.timed_p50_ns, times.profiled_p50_ns, times.iterations) == (180 * US, 100 * US, 4)


def test_run_times_of_empty_profile_are_none():
    times = run_times(replace(example(), rows=[], calls=[]))
    assert (times.timed_p50_ns, times.profiled_p50_ns, times.iterations, times.overhead) == (None, None, 0, None)
    assert find_typical_iteration([]) == []


def test_typical_iteration_has_median_duration():
    rows = [replace(row, duration_ns=row.duration_ns * (3, 1, 2)[row.iteration]) for row in example().rows]
    assert {row.iteration for row in find_typical_iteration(rows)} == {2}
    assert [row.op for row in find_typical_iteration(rows)] == ["matmul_0", "matmul_1", "matmul_1", "buffer.copy"]


def shown(profile, *, by="op", top=20, width=80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_profile(console, profile, by=by, top=top)
    return console.file.getvalue()


def test_print_profile_shows_head_totals_and_notes():
    text = shown(example(timed_ns=100 * US))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "digits_cnn on sim, iree 3.13.0 on local-task"
    assert lines[1] == "timed run p50 100 us"
    assert lines[2] == "profiled run p50 100 us of 3 iterations, +0.0% compared with the timed run"
    assert "matmul_0 60 us 60.0% ████████ 1 60 us 60 us 2.00" in lines
    assert "matmul_1 30 us 30.0% ████ 2 15 us 15 us 1.00" in lines
    assert "matmul_0 2 Gop/s 100 MB/s 20 compute" in lines
    assert any(line.startswith("estimates:") for line in lines)
    assert lines[-1] == "this board tells no temperature"
    assert max(map(len, text.splitlines())) <= 80


def test_print_profile_shows_overhead_with_each_figure():
    text = shown(example(timed_ns=25 * US), width=150)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "profiled run p50 100 us of 3 iterations, +300.0% compared with the timed run" in lines
    assert "matmul_0 60 us (+300%) 60.0% ████████████████ 1 60 us (+300%) 60 us (+300%) 2.00" in lines
    assert "matmul_0 2 Gop/s (+300%) 100 MB/s (+300%) 20 compute" in lines
    assert "(+300%): the profiler adds this much to a run; use the times only to compare operations" in text
    assert "(+" not in shown(example(timed_ns=90 * US), width=150).replace("+11", "")


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100])
@pytest.mark.parametrize("timed_ns", [80 * US, 100 * US])
def test_print_profile_preserves_names_when_narrow(width, timed_ns):
    rows = [replace(row, op=f"main$async_dispatch_{row.op}_elementwise_1x64x56x56") for row in example().rows]
    text = shown(replace(example(timed_ns=timed_ns), rows=rows), width=width, by="node")
    lines = text.splitlines()
    for name in ("fc1, relu1", "fc2", "fc3"):
        found = [line for line in lines if line.startswith(f"{name} ")]
        assert max(map(len, found)) <= width
        assert [unit in line for unit, line in zip(("us", "op/s"), found, strict=True)] == [True, True]


def test_print_profile_counts_omitted_rows():
    assert "and 2 more with 40.0% of the time" in shown(example(), top=1)


def test_print_profile_drops_common_name_prefix():
    rows = [replace(row, op=f"digits$async_dispatch_{row.op}" if row.onnx_nodes else row.op) for row in example().rows]
    profile = replace(example(), rows=rows)
    text = shown(profile, width=120)
    assert "…matmul_0" in text and "…matmul_1" in text and "digits$" not in text and "\nbuffer.copy" in text
    assert summarize_profile(profile, by="op", top=1).totals[0].name == "digits$async_dispatch_matmul_0"


def test_print_profile_escapes_hostile_names():
    rows = [replace(row, op="\x1b[31m[red]op[/red]", onnx_nodes=("[bold]n",)) for row in example().rows]
    text = shown(replace(example(), rows=rows, model="[link=x]m", notes=["[blink]note"]), width=120)
    assert "\x1b" not in text
    for name in ("[red]op[/red]", "[bold]n", "[link=x]m", "[blink]note"):
        assert name in text


def test_print_profile_without_rows_prints_reason():
    text = shown(replace(example(), rows=[], calls=[], notes=["the runtime has no profiler"]))
    assert text.splitlines() == ["digits_cnn on sim, iree 3.13.0 on local-task", "  the runtime has no profiler"]


def test_summarize_profile_limits_totals_to_top():
    record = summarize_profile(example(), by="node", top=2)
    assert [total.name for total in record.totals] == ["fc1, relu1", "fc2"]
    assert (record.groups, record.rows, record.iterations) == (4, 12, 3)
    assert record.overhead == pytest.approx(0.25)
    assert json.loads(json.dumps(record.to_json(), allow_nan=False))["totals"][0]["onnx_nodes"] == ["fc1", "relu1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 B/s"), (999.0, "999 B/s"), (1.5e3, "1.5 kB/s"), (3.2e9, "3.2 GB/s"), (7e14, "700 TB/s")],
)
def test_si_formats_number_with_prefix(value, text):
    assert format_si(value, "B/s") == text


# ---- which profile is meant


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_profile(example(), folder / "digits")
    write_profile(example("other"), folder / "other")
    return folder


@pytest.fixture
def store(tmp_path: Path, written: Path) -> RunStore:
    """Return a store with runs of one, two and zero profiled models."""
    store = RunStore(tmp_path / "hil-runs")
    for title, cases in (("one", ["digits"]), ("two", ["digits", "other"]), ("none", [])):
        run = store.create(title, {})
        for case in cases:
            (run.make_case_folder(case) / "profile").symlink_to(written / case)
        (run.folder / "not-a-case").mkdir()
    return store


def named(store: RunStore, title: str) -> str:
    (folder,) = store.root.glob(f"*-{title}-*")
    return folder.name


def test_find_profile_accepts_directory_trace_and_run(store, written):
    run = named(store, "one")
    assert find_profile(str(written / "digits"), store=store) == written / "digits"
    assert find_profile(str(written / "digits" / "trace.pftrace.gz"), store=store).name == "trace.pftrace.gz"
    for text in (run, run[:-1], str(store.root / run)):
        assert find_profile(text, store=store) == store.root / run / "digits" / "profile"
    assert find_profile(run, "digits", store=store) == store.root / run / "digits" / "profile"


def test_find_profile_requires_case_for_multiple_cases(store, written):
    run = named(store, "two")
    for text, expected in ((run, store.root / run / "other" / "profile"), (str(written), written / "other")):
        with pytest.raises(UsageError, match="several cases: digits, other") as caught:
            find_profile(text, store=store)
        assert "--case" in caught.value.hint
        assert find_profile(text, "other", store=store) == expected
        with pytest.raises(UsageError, match="no profile for case 'digit'") as caught:
            find_profile(text, "digit", store=store)
        assert caught.value.hint == "did you mean 'digits'? known cases: digits, other"


def test_find_profile_reports_missing_profile(store, tmp_path):
    run = named(store, "two")
    mistyped = run.replace("-two-", "-tow-")
    with pytest.raises(UsageError, match="is not a file, a directory or a run in") as caught:
        find_profile(mistyped, store=store)
    assert f"did you mean '{run}'" in caught.value.hint
    with pytest.raises(UsageError, match="has no profile\n") as caught:
        find_profile(named(store, "none"), store=store)
    assert "--profile DIR" in caught.value.hint
    with pytest.raises(UsageError, match="has no profile\n"):
        find_profile(str(tmp_path), store=store)
    with pytest.raises(UsageError, match="ambiguous run"):
        find_profile(run[:8], store=store)
    with pytest.raises(UsageError, match="run 'latest' not found"):
        find_profile("latest", store=RunStore(tmp_path / "empty"))


def test_directory_of_rejects_trace_without_rows(written, tmp_path):
    trace = written / "digits" / "trace.pftrace.gz"
    assert find_folder(trace) == written / "digits"
    assert trace_of(written / "digits") == trace_of(trace) == trace
    assert read_title(trace) == read_title(written / "digits") == "digits_cnn on sim"
    alone = tmp_path / "alone.pftrace.gz"
    alone.write_bytes(trace.read_bytes())
    assert (trace_of(alone), read_title(alone)) == (alone, "alone.pftrace.gz")
    with pytest.raises(UsageError, match="is only a trace"):
        find_folder(alone)
    with pytest.raises(UsageError, match="requires a directory or a run, got trace file"):
        find_profile(str(alone), "digits")


# ---- the commands


def test_show_command_reads_stored_run(store, tmp_path):
    run, picture = named(store, "one"), tmp_path / "p.svg"
    words = ["show", run, "--out", str(store.root), "--by", "type", "--top", "1"]
    text = CliRunner().invoke(command, [*words, "--plot", str(picture)]).output
    assert "Gemm+Relu" in text and f"drawn in {picture}" in text and picture.stat().st_size
    document = json.loads(CliRunner().invoke(command, [*words, "--json"]).output)
    assert document == {"schema": 1, **summarize_profile(example(), by="type", top=1).to_json()}
    check_document(document, "profile show")


def test_find_profile_rejects_directory_with_mixed_profiles(tmp_path):
    write_profile(example("older"), tmp_path / "out")
    write_profile(example(), tmp_path / "out" / "digits")
    with pytest.raises(UsageError, match="several cases: out, digits"):
        find_profile(str(tmp_path / "out"))
    assert find_profile(str(tmp_path / "out"), "digits") == tmp_path / "out" / "digits"
    assert find_profile(str(tmp_path / "out"), "out") == tmp_path / "out"


def test_merge_command_writes_single_trace(written, tmp_path):
    both = tmp_path / "both.pftrace.gz"
    words = ["merge", str(written / "digits"), str(written / "other"), "--trace", str(both)]
    said = CliRunner().invoke(command, words).output
    size = both.stat().st_size
    document = json.loads(CliRunner().invoke(command, [*words, "--json"]).output)
    assert said == f"written: {both}, {document['events']} events\n"
    assert [one["run"] for one in document["profiles"]] == [example().run, example("other").run]
    assert (document["trace"], document["bytes"]) == (str(both), size)
    check_document(document, "profile merge")
    alone = CliRunner().invoke(command, ["merge", str(written / "digits"), "--trace", str(both), "--json"])
    assert json.loads(alone.output)["events"] < document["events"]


def test_diff_command_reports_slower_operations(tmp_path):
    for name, slower in (("a", 1.0), ("b", 3.0)):
        # The timed runs take as long as the profiled runs.
        timed_ns = round((80 + 20 * slower) * US)
        made = example(name, iterations=20, slower=slower, timed_ns=timed_ns, timed_runs=20)
        write_profile(made, tmp_path / name)
    trace, picture = tmp_path / "both.pftrace.gz", tmp_path / "diff.png"
    words = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--trace", str(trace), "--plot", str(picture)]
    shown = CliRunner().invoke(command, words, env={"COLUMNS": "120"}).output
    assert "B is slower than A: the timed run takes 1.4 times as long" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("slower fc2")]
    assert line.split()[2:9] == ["20", "us", "60", "us", "+40", "us", "3.000"]
    assert trace.stat().st_size and picture.stat().st_size
    document = json.loads(CliRunner().invoke(command, [*words, "--json"]).output)
    (slower,) = [one for one in document["ops"] if one["change"] == "slower"]
    assert (document["schema"], slower["name"], slower["ratio"]) == (1, "fc2", pytest.approx(3.0))
    assert (document["trace"], document["plot"]) == (str(trace), str(picture))
    check_document(document, "profile diff")


def test_diff_command_compares_only_timed_runs_of_runtimes(tmp_path):
    write_profile(example("a", iterations=20, timed_ns=90 * US, timed_runs=20), tmp_path / "a")
    other = replace(example("b", iterations=20, timed_ns=25 * US, timed_runs=20), runtime="onnxruntime 1.31.1")
    write_profile(other, tmp_path / "b")
    words = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    shown = CliRunner().invoke(command, words).output
    assert "B is faster than A: the timed run takes 0.278 times as long" in shown
    assert "slower" not in shown and "operations by share of the run; times are not comparable" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("fc1;relu1")]
    assert line.split() == ["fc1;relu1", "60.0%", "60.0%", "60", "us", "60", "us", "(+300%)"]
    assert "(+300%): the profiler adds this much to a run of B; use the times" in shown
    document = json.loads(CliRunner().invoke(command, [*words, "--json"]).output)
    assert (document["timed"]["change"], document["ops"][0]["ratio"]) == ("faster", None)
    assert document["b_overhead"] == pytest.approx(3.0)
    check_document(document, "profile diff")


def test_commands_do_not_wrap_cells_in_pipe(tmp_path):
    long = "main$async_dispatch_0_" + "conv_2d_nchw_" * 8 + "f32"
    rows = [replace(row, op=long) if row.op == "matmul_0" else row for row in example().rows]
    write_profile(replace(example(), rows=rows), tmp_path / "a")
    for name, words in ((long, ["show", str(tmp_path / "a")]), ("fc1;relu1", ["diff", *[str(tmp_path / "a")] * 2])):
        lines = CliRunner().invoke(command, words).output.splitlines()
        first = next(line for line in lines if line.startswith(name))
        assert "60.0%" in first and "60 us (+25%)" in first
