"""`hil.load_run`: stored runs as data frames, and as tables in notebooks."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from support.run_records import bench_record
from support.suite_runs import case, comparison, suite_run

import hil
from hil.controller.records.base import make_record
from hil.controller.records.decisions.evaluation import EvaluatedSample, EvaluationRecord
from hil.controller.storage.runs import Run, RunStore, write_json
from hil.controller.workloads.evaluation.stored import open_samples, write_evaluation
from hil.controller.workloads.loaded_run import LoadedRun
from hil.controller.workloads.traces.stored import compare_stored
from hil.controller.workloads.traces.trace import ModuleCall, Trace
from hil.errors import UsageError

FAILING = case("m_conv1", "FAIL", model="m", device_p50_ns=1_500_000.0, outputs=(comparison(max_abs="inf"),))
PASSING = case("m_relu1", "PASS", model="m", message="")


@pytest.fixture
def run(tmp_path: Path) -> LoadedRun:
    return hil.load_run(suite_run(tmp_path / "nightly", [FAILING, PASSING]))


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_cases_are_rows_of_data_frame(run, frame):
    cases = run.cases(frame)
    assert type(cases).__module__.split(".")[0] == frame
    assert list(cases["id"]) == ["m_conv1", "m_relu1"]
    assert list(cases["outcome"]) == ["FAIL", "PASS"]
    assert cases["device_p50_ms"][0] == 1.5
    assert cases["max_abs"][0] == math.inf  # a string in the record


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_outputs_are_rows_of_data_frame(run, frame):
    outputs = run.outputs(frame)
    assert list(outputs["id"]) == ["m_conv1", "m_relu1"]
    assert list(outputs["name"]) == ["y", "y"]


@pytest.mark.parametrize(("installed", "expected"), [({"pandas", "polars"}, "pandas"), ({"polars"}, "polars")])
def test_data_frame_uses_first_installed_library(run, monkeypatch, installed, expected):
    for name in {"pandas", "polars"} - installed:
        monkeypatch.setitem(sys.modules, name, None)
    assert type(run.cases()).__module__.split(".")[0] == expected


def test_missing_library_is_usage_error(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="data frames need pandas") as caught:
        run.cases("pandas")
    assert caught.value.hint == "pip install pandas"
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(UsageError, match="data frames need pandas or polars"):
        run.outputs()


def test_unknown_library_is_usage_error(run):
    with pytest.raises(UsageError, match="unknown library 'panda'") as caught:
        run.cases("panda")
    assert caught.value.hint == "did you mean 'pandas'? expected one of pandas, polars"


def test_notebook_shows_cases_as_escaped_table(run, tmp_path):
    assert '<td style="text-align: left">m_conv1</td>' in run._repr_html_()
    assert repr(run) == f"<LoadedRun {run.id}: 1 PASS, 1 FAIL>"
    script = "<script>alert(1)</script>"
    shown = hil.load_run(suite_run(tmp_path / "other", [case("a", "FAIL", message=script)]))._repr_html_()
    assert script not in shown and "&lt;script&gt;" in shown


def test_run_is_found_by_id_and_prefix(tmp_path):
    stored = RunStore(tmp_path).create("model", {}, "20261130-010203-model-ab12")
    for name in ("latest", "20261130", stored.id, stored.folder):
        assert repr(hil.load_run(name, out=tmp_path)) == f"<LoadedRun {stored.id}: no cases>"


def test_suite_run_is_found_by_prefix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunStore().create("model", {}, "20261130-010203-model-ab12")
    suite_run(Path("hil-suites/20261130-020304-nets-iree-cd34"), [PASSING])
    for name in ("latest", "20261130-02"):
        assert hil.load_run(name).folder == Path("hil-suites/20261130-020304-nets-iree-cd34")
    assert hil.load_run("20261130-01").folder == Path("hil-runs/20261130-010203-model-ab12")


def test_directory_without_run_is_usage_error(tmp_path):
    with pytest.raises(UsageError, match="is a directory, but not a run"):
        hil.load_run(tmp_path)


def test_missing_run_is_usage_error(tmp_path):
    with pytest.raises(UsageError, match="run 'nightly' not found"):
        hil.load_run("nightly", out=tmp_path)


@pytest.fixture
def stored(tmp_path: Path) -> Run:
    return RunStore(tmp_path / "hil-runs").create("model", {})


@pytest.fixture
def bench(stored: Run) -> LoadedRun:
    write_json(stored.folder / "bench.json", bench_record().to_json())
    (stored.folder / "samples.csv").write_text(
        "side,round,batch,copy,start_ns,duration_ns,instructions\nA,0,0,0,100,25,\nA,0,1,0,200,35,\nA,0,2,0,3"
    )
    return hil.load_run(stored.folder)


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_sides_of_bench_are_rows_of_data_frame(bench, frame):
    sides, side = bench.sides(frame), bench_record().sides[0]
    assert side.times is not None
    assert list(sides["label"]) == ["A"] and list(sides["board"]) == [side.board]
    assert sides["p50_ms"][0] == side.times.p50_ns / 1e6
    assert sides["compile_s"][0] == side.timings.compile_s


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_complete_iterations_of_bench_are_rows_of_data_frame(bench, frame):
    samples = bench.samples(frame)
    assert list(samples["side"]) == ["A", "A"]
    assert list(samples["duration_ns"]) == [25, 35]


def test_iterations_of_prompts_name_prompt(bench):
    bench.folder.joinpath("samples.csv").rename(bench.folder / "samples-story.csv")
    assert list(bench.samples("pandas")["prompt"]) == ["story", "story"]


def test_damaged_iterations_are_usage_error(bench):
    for line in ("A,0,0,0,one,2,", "A,0", "A," + "1" * 200_000):
        (bench.folder / "samples.csv").write_text(f"side\n{line}\n")
        with pytest.raises(UsageError, match=r"samples\.csv is damaged"):
            bench.samples()
    (bench.folder / "samples.csv").unlink()
    with pytest.raises(UsageError, match=r"has no samples\.csv"):
        bench.samples()


@pytest.fixture
def evaluation(stored: Run) -> LoadedRun:
    values = {
        **{"schema": 1, "id": stored.id, "folder": "", "created": 0.0, "finished": True, "name": "m", "model": "m"},
        "settings": {"dataset": "d.npz", "metric": "top1"},
        "identity": {"samples": 3, "names": "", "model": "", "reference_model": ""},
        **{"board": "sim", "runtime": "iree", "reference": "onnxruntime", "is_higher_better": True},
        **{"is_share": True, "evaluated": 2, "stopped_early": False, "allowed_drop": None},
        "scores": {
            **{"board": 0.5, "reference": "inf", "difference": "-inf", "p_value": 1.0, "differing": 1, "worst": []},
            "interval": {"low": -0.5, "high": 0.1, "level": 0.95, "method": "tango"},
        },
        **{"outcome": "SKIP", "reason": "no verdict", "hint": "", "exit_code": 0},
    }
    write_evaluation(make_record(values, EvaluationRecord), stored.folder)
    with open_samples(stored.folder) as append:
        for name, score, answer in (("a", 1.0, [3]), ("b", 0.0, [4])):
            side = {"evidence": None, "value": 1.0, "answer": [3]}
            values = {"name": name, "board": {**side, "value": score, "answer": answer}, "reference": side}
            append(make_record(values, EvaluatedSample))
    return hil.load_run(stored.folder)


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_scores_and_samples_of_evaluation_are_data_frames(evaluation, frame):
    scores, samples = evaluation.scores(frame), evaluation.samples(frame)
    assert list(scores["board_score"]) == [0.5] and scores["reference_score"][0] == math.inf
    assert (scores["low"][0], scores["evaluated"][0], scores["samples"][0]) == (-0.5, 2, 3)
    assert list(samples["name"]) == ["a", "b"] and list(samples["difference"]) == [0.0, -1.0]
    assert [list(answer) for answer in samples["board_answer"]] == [[3], [4]]


def test_run_without_bench_or_evaluation_is_usage_error(stored, run):
    for loaded in (hil.load_run(stored.folder), run):
        for table in (loaded.sides, loaded.scores, loaded.samples):
            with pytest.raises(UsageError, match=r"is not a(n evaluation| bench)|is neither a bench nor"):
                table()
        with pytest.raises(UsageError, match="no trace found"):
            loaded.calls()


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Store a trace on two backends; the second call differs."""
    x = np.array([[1.0, 2.0], [np.nan, 4.0]], np.float32)
    for backend, y in (("tf", 1.0), ("iree", 1.5)):
        calls = [
            ModuleCall("first", (x,), (x,)),
            ModuleCall("train", (), ({"loss": np.float32([y])},), 1e-3, 0.0, {"w": x}, ("w",)),
        ]
        Trace("Net", backend, "once", calls=calls).save(tmp_path / "Net" / backend / "traces" / "once")
    made, reference = (tmp_path / "Net" / name for name in ("iree", "tf"))
    (comparison,) = compare_stored(made, reference)
    comparison.save(made / "traces" / "once")
    return tmp_path / "Net"


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_calls_of_traces_are_rows_of_data_frame(traces, frame):
    loaded = hil.load_run(traces)
    assert repr(loaded) == "<LoadedRun Net: 2 traces>" and len(loaded.cases(frame)) == 0
    calls = loaded.calls(frame)
    assert list(calls["trace"]) == ["iree/traces/once"] * 2 + ["tf/traces/once"] * 2
    assert list(calls["method"]) == ["first", "train"] * 2 and list(calls["assigned"]) == [0, 1] * 2
    assert list(calls["outcome"])[:2] == ["PASS", "FAIL"]
    assert list(loaded.traces["iree/traces/once"].calls[1].outputs[0]["loss"]) == [1.5]


@pytest.mark.parametrize("frame", ["pandas", "polars"])
def test_tensors_of_traces_are_rows_of_data_frame(traces, frame):
    tensors = hil.load_run(traces / "iree").tensors(frame)
    assert list(tensors["kind"]) == ["input", "output", "output", "assigned"]
    assert [list(shape) for shape in tensors["shape"]] == [[2, 2], [2, 2], [1], [2, 2]]
    assert (tensors["min"][0], tensors["max"][0]) == (1.0, 4.0)
    assert tensors["passed"][2] == False  # noqa: E712 - a value of the library
    assert tensors["max_abs"][2] == 0.5


def test_comparison_of_older_trace_is_not_shown(traces):
    trace = Trace.load(traces / "iree/traces/once")
    trace.created += 1
    comparison = (traces / "iree/traces/once/comparison.json").read_text()
    trace.save(traces / "iree/traces/once")
    (traces / "iree/traces/once/comparison.json").write_text(comparison)
    assert hil.load_run(traces / "iree").calls("polars")["outcome"].is_null().all()
