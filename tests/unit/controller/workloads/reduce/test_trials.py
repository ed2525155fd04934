"""The journal of a reduction, without a board."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.pipeline.case import Case
from hil.controller.records.decisions.reduce import ReduceFailure, ReduceRecord
from hil.controller.workloads.reduce.trials import RECORD, Candidate, RunsSpent, Trials
from hil.core.results import Outcome
from hil.errors import BoardLost, RunCrashed

KIND = "the worker was killed by SIGSEGV during run"


@dataclass
class FakeTrials(Trials):
    """Trials whose programs end with the texts of a list, in order."""

    def _run_case(self, case: Case, runner: Any) -> Case:
        text = self.options.texts.pop(0)
        if text == "lost":
            raise BoardLost("the board stopped responding")
        return case.with_error(RunCrashed(text), "run") if text else case

    @property
    def _runner(self) -> Any:
        def begin(path: Path, options: Any, folder: Path, name: str) -> Any:
            return FakeCase(outcome=None)

        return SimpleNamespace(begin=begin)


@dataclass
class FakeCase:
    outcome: Outcome | None
    reason: str = ""
    stage: str = "run"
    result: None = None
    error: None = None

    def with_error(self, error: RunCrashed, stage: str) -> FakeCase:
        return FakeCase(Outcome.RUN_CRASH, error.message, stage)


@pytest.fixture
def trials(tmp_path, monkeypatch):
    monkeypatch.setattr("hil.controller.workloads.reduce.trials.replace", lambda options, **values: options)

    def make(*texts: str, record: ReduceRecord | None = None, max_runs: int = 8) -> FakeTrials:
        failure = ReduceFailure(outcome=Outcome.RUN_CRASH, stage="run", reason=KIND, kind=KIND, sqnr_db=None)
        new = ReduceRecord(
            schema=1,
            id="r",
            created=0.0,
            request={},
            model="m.onnx",
            max_runs=max_runs,
            failure=failure,
            nodes_before=9,
        )
        nothing: Any = None
        options: Any = SimpleNamespace(texts=list(texts))
        screen: Any = SimpleNamespace(stage=lambda *_: None)
        pool: Any = SimpleNamespace(save_consoles=lambda is_last: [])
        return FakeTrials(record or new, tmp_path, options, nothing, (), pool, nothing, screen)

    return make


def write(nodes: int):
    def make(folder: Path) -> Candidate:
        (folder / "model.onnx").write_text(str(nodes))
        return Candidate(folder / "model.onnx", {}, nodes)

    return make


def test_only_same_failure_replaces_smallest_model(trials):
    found = trials(KIND, "the worker was killed by SIGILL during run", "")
    assert found.test("a", "", write(5))
    assert not found.test("b", "", write(3))
    assert not found.test("c", "", write(2))
    assert found.best is not None and found.best.model.read_text() == "5"
    assert [folder.name for folder in (found.folder / "work").iterdir()] == ["1"]


def test_journal_answers_finished_runs(trials):
    first = trials(KIND, "", "lost")
    assert first.test("a", "", write(5)) and not first.test("b", "", write(3))
    with pytest.raises(BoardLost):
        first.test("c", "", write(2))
    stored = json.loads((first.folder / RECORD).read_text())
    assert [(one["key"], one["same"]) for one in stored["trials"]] == [("a", True), ("b", False)]

    resumed = trials(KIND, record=first.record)
    assert resumed.test("a", "", write(5)) and not resumed.test("b", "", write(3)) and resumed.test("c", "", write(2))
    assert resumed.best is not None and resumed.best.nodes == 2


def test_limit_keeps_a_run_for_the_result(trials):
    found = trials("", "", max_runs=3)
    assert not found.test("a", "", write(5)) and not found.test("b", "", write(4))
    with pytest.raises(RunsSpent):
        found.test("c", "", write(3))
    assert not found.test("b", "", write(4))


def test_notes_of_resumed_reductions_are_not_repeated(trials):
    found = trials()
    for text in ("a", "b", "a"):
        found.add_note(text)
    assert found.record.notes == ["a", "b"]


def test_invalid_candidate_needs_no_run(trials):
    found = trials()
    assert not found.test("a", "", lambda folder: None)
    assert found.record.trials == []
