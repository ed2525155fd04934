"""Evaluations on fake boards: scores, early stop, resuming, and failures."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_boards import FakeBoards, FakeProgram, X, Y, fake_boards, fake_case, lost

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.decisions.evaluation import EvaluationRecord, EvaluationSettings
from hil.controller.storage.runs import RunStore, lock_folder
from hil.controller.workloads.evaluation.job import run_evaluation
from hil.controller.workloads.evaluation.show import print_evaluation
from hil.controller.workloads.evaluation.stored import find_evaluation, read_samples
from hil.core.results import Model, RunResult, Stage
from hil.errors import ImportFailed, RunCrashed, UsageError

__all__ = ["fake_boards"]
DIGEST = f"blake3:{0:064}"
MODEL = Model("m", "onnx", Path("m.onnx"), {}, DIGEST, "main", (X,), (Y,))
# The model doubles its input. An even label is the class 0, an odd label is the class 1.
LABELS = np.arange(200) % 2


class Quiet:
    """Progress without output."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, name: str, stages: int) -> None: ...
    def stage(self, name: str, number: int, text: str) -> None: ...
    def end(self, name: str, outcome: str = "", reason: str = "") -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)

    def interrupt(self, command: str) -> None:
        self.notes.append(command)


@pytest.fixture
def evaluate(
    fake_boards: FakeBoards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., EvaluationRecord]:
    """Return a function that evaluates a doubling model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))

    def begin(self: Runner, path: Path, options: Any, folder: Path, **_: Any) -> Case:
        case = fake_case("m")
        if path.name == "broken.onnx":
            return case.with_error(ImportFailed("not a model"), Stage.IMPORT)
        assert case.artifact is not None
        artifact = replace(case.artifact, digests={"p": DIGEST})
        return replace(case, path=path, folder=folder, model=MODEL, artifact=artifact, inputs=None, references=())

    def refer(self: Runner, case: Case) -> Case:
        assert case.inputs is not None
        return replace(case, references=(RunResult("reference 1", {"y": case.inputs["x"] * 2}),))

    monkeypatch.setattr(Runner, "begin", begin)
    monkeypatch.setattr(Runner, "refer_early", refer)
    x = np.stack([1 - LABELS, LABELS], axis=1).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, label=LABELS)

    def call(metric: str = "top1", max_drop: float | None = None, **more: Any) -> EvaluationRecord:
        settings = EvaluationSettings(
            dataset="d.npz", metric=metric, max_drop=max_drop, reference_model=more.pop("reference_model", "")
        )
        job = Job(models=(Path("m.onnx"),), board="unix:/fake/a")
        return run_evaluation(job, settings, screen=Quiet(), **more)

    return call


def wrong_program(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Make the board swap the classes of a share of the samples."""
    run, count = FakeProgram.run, 0

    def wrong(self: FakeProgram, inputs: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        is_wrong = int(count * share) > int((count - 1) * share)
        return run(self, {"x": inputs["x"][::-1]} if is_wrong else inputs, **options)

    monkeypatch.setattr(FakeProgram, "run", wrong)


def test_evaluation_loads_program_once(evaluate: Callable[..., EvaluationRecord], fake_boards: FakeBoards) -> None:
    record = evaluate()
    assert (record.evaluated, record.outcome, record.exit_code) == (200, "SKIP", 0)
    assert record.scores is not None and record.scores.board == record.scores.reference == 1
    assert fake_boards.did.count("load m") == 1 and fake_boards.did.count("run m") == 200
    stored = RunStore().open("latest")
    assert find_evaluation(stored) == record
    assert [case.outcome for case in stored.record.cases] == ["SKIP"] and stored.record.exit_code == 0


def test_evaluation_reports_worse_samples(
    evaluate: Callable[..., EvaluationRecord], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong_program(monkeypatch, 0.1)
    record = evaluate()
    assert record.scores is not None
    assert (record.scores.board, record.scores.differing, len(record.scores.worst)) == (0.9, 20, 10)
    assert record.scores.p_value == pytest.approx(2 * 0.5**20)
    found = record.scores.interval
    assert found is not None and found.method == "tango" and found.low < -0.1 < found.high < 0
    from hil.controller.storage.screen.console import make_table_console

    print_evaluation(make_table_console(), record)
    shown = capsys.readouterr().out
    assert "board        90.00 %" in shown and "worst samples" in shown


@pytest.mark.parametrize(("share", "outcome", "code"), [(0.0, "PASS", 0), (0.5, "FAIL", 1)])
def test_evaluation_stops_when_answer_is_clear(
    share: float, outcome: str, code: int, evaluate: Callable[..., EvaluationRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_program(monkeypatch, share)
    record = evaluate(max_drop=5)
    assert (record.outcome, record.exit_code, record.stopped_early) == (outcome, code, True)
    assert record.evaluated < 150 and record.allowed_drop == 0.05
    assert record.scores is not None and record.scores.interval is not None
    assert record.scores.interval.method == "betting" and record.scores.p_value is None


def test_metric_without_range_runs_all_samples(
    evaluate: Callable[..., EvaluationRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProgram, "factor", 3)
    Path("own.py").write_text("HIGHER_IS_BETTER = False\ndef score(outputs, label): return outputs['y'].sum()\n")
    record = evaluate("own.py", 49)
    assert (record.evaluated, record.outcome, record.allowed_drop) == (200, "FAIL", pytest.approx(0.98))
    assert record.scores is not None and record.scores.interval is not None
    assert (record.scores.interval.low, record.scores.interval.high) == (1, 1)
    assert evaluate("own.py", 51).outcome == "PASS"


def test_evaluation_resumes_after_board_loss(
    evaluate: Callable[..., EvaluationRecord], fake_boards: FakeBoards, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate()
    run, count = FakeProgram.run, 0

    def lose(self: FakeProgram, inputs: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 8:
            raise lost()
        return run(self, inputs, **options)

    monkeypatch.setattr(FakeProgram, "run", lose)
    record = evaluate()
    assert (record.outcome, record.exit_code, record.evaluated) == ("BOARD_LOST", 4, 7)
    assert f"hil eval --resume {record.id}" in record.hint
    # A killed process leaves an incomplete line.
    samples = Path(record.folder, "samples.jsonl")
    samples.write_text(samples.read_text() + '{"name": "1')
    fake_boards.opened.clear()
    done = evaluate(resume=record.id)
    assert (done.outcome, done.evaluated, done.scores) == ("SKIP", 200, whole.scores)
    assert fake_boards.did.count("run m") == 193
    assert len(read_samples(Path(done.folder))) == 200
    again = evaluate(resume=record.id)
    assert again == done and fake_boards.did.count("run m") == 193


def test_changed_dataset_cannot_resume(evaluate: Callable[..., EvaluationRecord]) -> None:
    record = evaluate()
    np.savez("d.npz", x=np.zeros((3, 2), np.float32), label=[0, 1, 0])
    with pytest.raises(UsageError, match="the dataset changed"):
        evaluate(resume=record.id)
    np.savez("d.npz", x=np.zeros((200, 2), np.float32), label=LABELS)
    with pytest.raises(UsageError, match="the dataset changed"):
        evaluate(resume=record.id)
    Path(record.folder, "eval.json").unlink()
    with pytest.raises(UsageError, match="is not an evaluation"):
        evaluate(resume=record.id)


def test_changed_metric_cannot_resume(evaluate: Callable[..., EvaluationRecord]) -> None:
    Path("own.py").write_text("def score(outputs, label): return 1\n")
    record = evaluate("own.py")
    Path("own.py").write_text("def score(outputs, label): return 0\n")
    with pytest.raises(UsageError, match="the metric changed"):
        evaluate(resume=record.id)


def test_running_evaluation_cannot_resume(evaluate: Callable[..., EvaluationRecord]) -> None:
    record = evaluate()
    with lock_folder(Path(record.folder)), pytest.raises(UsageError, match="in use by a different hil process"):
        evaluate(resume=record.id)


def test_samples_count_once(evaluate: Callable[..., EvaluationRecord]) -> None:
    folder = Path(evaluate().folder)
    samples, file = read_samples(folder), folder / "samples.jsonl"
    file.write_text(file.read_text() * 2)
    assert read_samples(folder) == samples


def test_reference_model_is_part_of_identity(evaluate: Callable[..., EvaluationRecord]) -> None:
    record = evaluate(reference_model="float.onnx")
    assert (record.outcome, record.identity.reference_model) == ("SKIP", DIGEST)
    failed = evaluate(reference_model="broken.onnx")
    assert (failed.outcome, failed.exit_code, failed.reason) == ("REFERENCE_ERROR", 3, "not a model")


def test_crash_names_sample(evaluate: Callable[..., EvaluationRecord], fake_boards: FakeBoards) -> None:
    fake_boards.scripts["unix:/fake/a"] = {("run", "m"): RunCrashed("the worker died")}
    record = evaluate()
    assert (record.outcome, record.exit_code, record.evaluated, record.scores) == ("RUN_CRASH", 3, 0, None)
    assert record.reason.startswith("sample ") and "the worker died" in record.reason


def test_interrupt_returns_scores_so_far(
    evaluate: Callable[..., EvaluationRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, count = FakeProgram.run, 0

    def interrupt(self: FakeProgram, inputs: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            signal.raise_signal(signal.SIGINT)
        return run(self, inputs, **options)

    monkeypatch.setattr(FakeProgram, "run", interrupt)
    record = evaluate()
    assert (record.exit_code, record.finished, record.evaluated, record.outcome) == (130, False, 4, None)
    assert record.scores is not None and record.scores.board == 1
    assert evaluate(resume=record.id).evaluated == 200


def test_invalid_sample_keeps_finished_samples(evaluate: Callable[..., EvaluationRecord]) -> None:
    Path("own.py").write_text("def score(outputs, label): return 1 / int(label)\n")
    with pytest.raises(UsageError, match=r"sample \d+: own.py:score failed: ZeroDivisionError"):
        evaluate("own.py")
    Path("own.py").write_text("def score(outputs, label):\n    return 1\n")
    assert evaluate("own.py").evaluated == 200
