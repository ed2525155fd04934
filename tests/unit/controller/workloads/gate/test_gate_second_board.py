"""Gates whose suspects were measured on the second board."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.histories import history_entry

from hil.controller.pipeline.settings.options import Job
from hil.controller.records.base import make_record
from hil.controller.records.decisions.gate import GateRecord
from hil.controller.storage.runs import RunStore, write_json
from hil.controller.workloads.gate.judge import Remeasurement
from hil.controller.workloads.gate.plan import GateCase
from hil.controller.workloads.gate.programs import ProgramRestorer
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.controller.workloads.gate.run import DOCUMENT, GateJob, run_gate
from hil.errors import UsageError

UNUSED: Any = None


def store_gate(folder: Path, second_board: str) -> str:
    """Store an interrupted gate with a verdict. Return its name."""
    run = RunStore(folder).create("gate", {}, "gate")
    key = {"kind": "run", "model": "m", "case": "m", "board": "lab", "runtime": "iree"}
    side = {"commit": "", "run": "r2", "outcome": "FAIL", "reason": "", "p50_ns": None}
    side |= {"compiler": "", "runtime": "", "program": ""}
    verdict = {"series": "s", "key": key, "verdict": "broken", "reason": "", "suspect": "", "new": side, "old": None}
    record = {
        **{"schema": 1, "id": run.id, "folder": str(run.folder), "created": 1.0, "finished": False, "history": "h"},
        **{"baseline": "main", "commit": "", "min_effect": 0.02, "budget_s": 9.0, "fail_on": [], "unmeasured": []},
        **{"verdicts": [{**verdict, "second_board": second_board}], "exit_code": 3, "over": "flag"},
    }
    write_json(run.folder / DOCUMENT, make_record(record, GateRecord).to_json())
    return str(run.id)


def resume(folder: Path, name: str, second_board: str) -> None:
    store: Any = SimpleNamespace(place="h", series=list)  # without series, a resumed gate ends with an error
    gate = GateJob(Job((), out=folder), "main", second_board=second_board, resume=name, over="flag")
    run_gate(gate, store, UNUSED, UNUSED)


@pytest.mark.parametrize("given", ["", "sim-bf16"])
def test_search_on_second_board_needs_the_same_board_to_resume(tmp_path: Path, given: str) -> None:
    name = store_gate(tmp_path, "sim-f16")
    with pytest.raises(UsageError, match="uses --second-board"):
        resume(tmp_path, name, given)


@pytest.mark.parametrize(("stored", "given"), [("sim-f16", "sim-f16"), ("", ""), ("", "sim-f16")])
def test_search_resumes_with_boards_of_its_verdicts(tmp_path: Path, stored: str, given: str) -> None:
    name = store_gate(tmp_path, stored)
    with pytest.raises(UsageError, match="has no measurement"):
        resume(tmp_path, name, given)


@pytest.mark.parametrize("options", [{"second_board": "sim-f61"}, {"job": Job((), board="nope")}])
def test_unknown_board_is_a_usage_error(tmp_path: Path, options: dict[str, Any]) -> None:
    store: Any = SimpleNamespace(place="h", series=list)
    with pytest.raises(UsageError, match="unknown board"):
        run_gate(GateJob(**{"job": Job((), out=tmp_path), "baseline": "main", **options}), store, UNUSED, UNUSED)


@pytest.mark.parametrize(("board", "name"), [("second", "second"), ("", "sim")])
def test_noise_is_estimated_from_rounds_of_the_measuring_board(
    monkeypatch: pytest.MonkeyPatch, board: str, name: str
) -> None:
    asked: list[str] = []

    def find_rounds(name: str) -> Sequence[Sequence[float]]:
        asked.append(name)
        return []

    monkeypatch.setattr(Remeasurer, "measure_turns", lambda *_, **__: None)
    measurer = Remeasurer(
        ProgramRestorer(UNUSED, Job((), board=board), UNUSED), UNUSED, UNUSED, 0.02, UNUSED, find_rounds
    )
    board_of_sides = SimpleNamespace(config=SimpleNamespace(has_time=True))
    sides: Any = [SimpleNamespace(batches=[], board=board_of_sides)] * 2
    measurer._measure_times(GateCase(history_entry("r2")), Remeasurement(), sides, 0.0, [], UNUSED)
    assert asked == [name]


def test_commit_of_gate_is_digits_or_known_to_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    store: Any = SimpleNamespace(place="h", series=list)
    with pytest.raises(UsageError, match="commit 'no-such-branch' is not in"):
        run_gate(GateJob(Job((), out=tmp_path), "main", commit="no-such-branch"), store, UNUSED, UNUSED)
    with pytest.raises(UsageError, match="has no measurement of commit feed"):
        run_gate(GateJob(Job((), out=tmp_path), "main", commit="feed"), store, UNUSED, UNUSED)
