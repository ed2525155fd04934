"""Repeat a stored trace: calls in order, with state from the board's calls."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_boards import FakeBoards, FakeProgram, fake_boards, fake_choice

from hil.controller.pipeline import stages
from hil.controller.pipeline.settings.options import Job
from hil.controller.workloads.traces.comparing import Judging
from hil.controller.workloads.traces.run import run_trace
from hil.controller.workloads.traces.stored import compare_stored, find_traces, load_one
from hil.controller.workloads.traces.trace import CallProgram, ModuleCall, Trace
from hil.core.results import Artifact, Model, Outcome, RunResult
from hil.core.tensors import Array, TensorSpec
from hil.errors import RunCrashed, UsageError

__all__ = ["fake_boards"]
X = TensorSpec("x", "float32", (2,))
SUM = TensorSpec("sum", "float32", (2,))


class Quiet:
    """A screen that ignores progress."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def added(self: FakeProgram, inputs: Mapping[str, Array], **_: Any) -> tuple[RunResult, Any]:
    """Return x plus the sum so far, and the same as the new sum."""
    self.board.note("run", self.artifact.function)
    now = inputs["x"] + inputs["sum"]
    return RunResult("fake 1", {"y": now, "new": now}, ((0, 5),)), SimpleNamespace(warmup_ns=0, fetch_s=0.0)


@pytest.fixture(autouse=True)
def _objects(monkeypatch: pytest.MonkeyPatch, fake_boards: FakeBoards, tmp_path: Path) -> None:
    def import_model(path: Path, *, function: str = "", **_: Any) -> Model:
        return Model(path.stem, "mlir", path, {path.name: path}, "blake3:0", function, (X, SUM), (X, SUM))

    def compile_model(model: Model, *, runtime: str, **_: Any) -> Artifact:
        return Artifact(runtime, "p", {}, {"p": "blake3:0"}, model.function, "none", inputs=(X, SUM), outputs=(X, SUM))

    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(stages, "choose_importer", lambda generate: import_model)
    monkeypatch.setattr(stages, "compile_model", compile_model)
    monkeypatch.setattr(FakeProgram, "run", added)
    loaded = property(lambda self: SimpleNamespace(function=self.artifact.function, inputs=(X, SUM), outputs=(X, SUM)))
    monkeypatch.setattr(FakeProgram, "loaded", loaded)


def array(*values: float) -> Array:
    return np.array(values, np.float32)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Save a trace of three additions of a backend, and the reference's trace."""
    module = tmp_path / "traces" / "Adder"
    module.mkdir(parents=True)
    (module / "model.mlir").write_text("module {}")
    program = CallProgram(module / "model.mlir", "add", "onnxruntime", ("sum",), ("sum",))
    sums = [array(2, 3), array(4, 6), array(6, 9)]
    calls = [
        ModuleCall("add", (array(2, 3),), (one,), state={"sum": one}, assigned=("sum",), program=program)
        for one in sums
    ]
    reference = Trace("Adder", "tf", "three", calls=[replace(call, program=None) for call in calls])
    folder = reference.save(module / "tf_ref" / "traces" / "three")
    Trace("Adder", "iree_x", "three", calls=calls, initial={"sum": array(0, 0)}, reference=folder).save(
        module / "iree_x" / "traces" / "three"
    )
    return module


def outcomes(record: Mapping[str, Any]) -> list[str]:
    return [case["outcome"] for case in record["cases"]]


def again(stored: Path, against: Path | None = None, **settings: Any) -> dict[str, Any]:
    job = Job(models=(stored / "iree_x" / "traces" / "three",), out=stored.parent / "runs", **settings)
    return run_trace(job, against, screen=Quiet(), choice=fake_choice()).to_json()


def test_call_receives_state_of_earlier_calls(stored):
    record = again(stored)
    assert outcomes(record) == ["PASS"] * 3 and record["exit_code"] == 0
    names = [output["name"] for output in record["cases"][2]["verdicts"][0]["outputs"]]
    assert names == ["0", "variable sum"] and record["cases"][0]["verdicts"][0]["against"] == "tf"
    made, _ = load_one(Path(record["folder"]))
    assert [call.state["sum"].tolist() for call in made.calls] == [[2, 3], [4, 6], [6, 9]]
    assert made.ran_by == "fake 1" and made.reference == (stored / "tf_ref" / "traces" / "three").resolve()


def test_moved_trace_preserves_program_and_reference_paths(stored):
    other = stored.rename(stored.parent / "Elsewhere")
    assert outcomes(again(other)) == ["PASS"] * 3
    outside = CallProgram(stored.parent / "model.mlir", "add", "iree")
    call = ModuleCall("add", (), (array(1, 2),), program=outside)
    Trace("Adder", "iree_x", "odd", calls=[call]).save(other / "iree_x" / "traces" / "odd")
    with pytest.raises(UsageError, match="points outside"):
        load_one(other / "iree_x" / "traces" / "odd")


def test_wrong_call_passes_state_but_failed_call_does_not(stored, fake_boards):
    place = stored / "tf_ref" / "traces" / "three"
    wrong = Trace.load(place)
    wrong.calls[0] = replace(wrong.calls[0], outputs=(array(7, 7),))
    wrong.save(stored / "other" / "traces" / "three")
    record = again(stored, stored / "other" / "traces" / "three")
    assert outcomes(record) == ["FAIL", "PASS", "PASS"] and record["exit_code"] == 1
    fake_boards.scripts["unix:/fake/a"] = {("run", "add"): RunCrashed("died")}
    record = again(stored)
    assert outcomes(record) == ["RUN_CRASH", "SKIP", "SKIP"] and record["exit_code"] == 3
    assert [case["reason"] for case in record["cases"][1:]] == [
        "variable sum has no value: call_0_add did not return a value",
        "variable sum has no value: call_1_add did not return a value",
    ]
    made, _ = load_one(Path(record["folder"]))
    assert made.calls == [] and made.error == "call_0_add: died"


def test_unrepeatable_trace_raises_usage_error(stored):
    job = Job(models=(stored / "tf_ref" / "traces" / "three",), out=stored.parent / "runs")
    damaged = stored / "iree_damaged" / "traces" / "three"
    shutil.copytree(stored / "iree_x" / "traces" / "three", damaged)
    (damaged / "call_1" / "output_0.npy").write_bytes(b"")
    with pytest.raises(UsageError, match="has calls without a program") as caught:
        run_trace(job, screen=Quiet(), choice=fake_choice())
    assert caught.value.hint == f"use a trace with programs: {stored / 'iree_x' / 'traces' / 'three'}"
    short = Trace.load(stored / "tf_ref" / "traces" / "three")
    short.calls.pop()
    short.save(stored / "short" / "traces" / "three")
    with pytest.raises(UsageError, match="3 on iree_x, 2 on tf"):
        again(stored, stored / "short" / "traces" / "three")
    with pytest.raises(UsageError, match="no trace found in"):
        find_traces(stored / "tf_ref" / "traces" / "three" / "call_0")


def test_compare_stored_matches_traces_by_name(stored):
    one, other = stored / "iree_x", stored / "tf_ref"
    assert [found.outcome for found in compare_stored(one, other, Judging())] == [Outcome.PASS]
    extra = Trace.load(other / "traces" / "three")
    extra.calls[1] = replace(extra.calls[1], state={"sum": array(0, 6)})
    extra.save(other / "traces" / "other")
    lacking, same = sorted(compare_stored(one, other, Judging()), key=lambda found: found.outcome.value)
    assert (same.outcome, lacking.outcome) == (Outcome.PASS, Outcome.FAIL) and "only" in lacking.reason
    (wrong,) = compare_stored(one, other / "traces" / "other", Judging())
    assert wrong.outcome is Outcome.FAIL and wrong.to_record().calls[1].outcome is Outcome.FAIL
    assert "variable sum" in wrong.reason and len(wrong.lines()) > 3
