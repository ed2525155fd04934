"""Records written during a run are complete whenever the run ends."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.waiting import eventually

from hil.compare.verdict import compare
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.compilations import Compilations
from hil.controller.pipeline.records.record import Recorder, list_cached_stages
from hil.controller.pipeline.settings.options import Options
from hil.controller.storage.runs import Run, RunStore
from hil.core.results import Artifact, Outcome, RunResult
from hil.errors import EXIT_INTERRUPTED

NAN = {"y": np.array([np.nan, 1.0], np.float32)}


@pytest.fixture
def run(tmp_path) -> Run:
    return RunStore(tmp_path).create("three-models", {"seed": 1})


@pytest.fixture
def cases() -> list[Case]:
    return [Case(name, Path(f"{name}.onnx"), Options(), Path()) for name in ("a", "b", "c")]


def written(run: Run) -> dict:
    return json.loads((run.folder / "run.json").read_text())


def ran(case: Case) -> Case:
    result, reference = RunResult("board", NAN), RunResult("oracle", NAN)
    verdicts = (compare(result, reference),)
    return replace(case, result=result, references=(reference,), verdicts=verdicts, outcome=Outcome.PASS)


def test_recorder_writes_changed_case_with_all_others(run, cases):
    recorder = Recorder(run, ["a", "b", "c"], cases)
    recorder.keep(replace(cases[1], inputs={"x": np.zeros(2, np.float32)}), "inputs")
    recorder.write(cases[0])
    assert [case["name"] for case in written(run)["cases"]] == ["a", "b", "c"]
    assert [len(case["inputs"]) for case in written(run)["cases"]] == [0, 1, 0]
    assert not written(run)["finished"]
    assert written(run)["request"] == {"seed": 1}


def test_recorder_delays_stage_updates_until_next_write(run, cases):
    recorder = Recorder(run, ["a", "b", "c"], cases)
    recorder.write()
    recorder.write_soon(replace(cases[0], stage="compile"))
    recorder.write_soon(replace(cases[1], stage="import"))
    eventually(lambda: [case["stage"] for case in written(run)["cases"]] == ["compile", "import", cases[2].stage])
    recorder.write_soon(replace(cases[0], stage="load"))
    recorder.end(ran(cases[2]))
    assert written(run)["cases"][0]["stage"] == "load"
    recorder.write_soon(replace(cases[0], stage="run"))
    recorder.forget()
    run.discard()
    time.sleep(0.3)
    assert not run.folder.exists()


def test_recorder_writes_failed_case_during_other_case(run, cases):
    recorder = Recorder(run, ["a", "b", "c"], cases)
    recorder.write()
    recorder.write(replace(cases[2], outcome=Outcome.COMPILE_ERROR, stage="compile"))
    recorder.end(cases[0])
    assert [case["outcome"] for case in written(run)["cases"]] == [None, None, "COMPILE_ERROR"]


def test_recorder_record_equals_final_file(run, cases):
    recorder = Recorder(run, ["a", "b", "c"], cases)
    for case in map(ran, reversed(cases)):
        for what in ("outputs", "references"):
            recorder.keep(case, what)
        recorder.end(case)
    before = written(run)
    record = recorder.finish()
    assert written(run) == {**before, "exit_code": 0, "outcome": "PASS", "finished": True}
    assert record.to_json()["cases"] == before["cases"]
    assert "nan" in json.dumps(before["cases"])


@pytest.mark.parametrize("skipped", [0, 2])
def test_recorder_outcome_ignores_skipped_case(run, cases, skipped):
    recorder = Recorder(run, ["a", "b", "c"], cases)
    for number, case in enumerate(cases):
        recorder.end(replace(ran(case), outcome=Outcome.SKIP) if number == skipped else ran(case))
    assert recorder.finish().outcome is Outcome.PASS


def test_recorder_preserves_order_of_resumed_cases(run, cases):
    cases = list(map(ran, cases))
    first = Recorder(run, ["a", "b", "c"], cases)
    first.end(cases[1])
    again = RunStore(run.folder.parent).open(run.id)
    again.record.cases = again.record.cases[1:2]
    fresh = [Case(name, Path(f"{name}.onnx"), Options(), Path()) for name in ("a", "c")]
    recorder = Recorder(again, ["a", "b", "c"], fresh)
    recorder.write()
    assert [(case["name"], case["outcome"]) for case in written(run)["cases"]] == [
        ("a", None),
        ("b", "PASS"),
        ("c", None),
    ]


def test_recorder_interrupt_preserves_finished_outcomes(run, cases):
    recorder = Recorder(run, ["a", "b", "c"], cases)
    recorder.end(ran(cases[0]))
    recorder.write(ran(cases[1]))
    recorder.interrupt()
    assert [case["outcome"] for case in written(run)["cases"]] == ["PASS", None, None]
    assert written(run)["exit_code"] == EXIT_INTERRUPTED


def test_repeated_compilations_are_not_cached_stages(cases):
    program = Artifact("iree", "m.vmfb", {}, {"m.vmfb": "blake3:0"}, "main", "iree-compile", cached=True)
    case = replace(cases[0], artifact=program)
    assert list_cached_stages(case) == ["compile"]
    assert list_cached_stages(replace(case, compilations=Compilations(2, ()))) == []
