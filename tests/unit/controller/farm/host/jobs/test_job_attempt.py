from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.run_records import run_case, run_record

from hil.controller.farm.host.jobs.job_attempt import LineProgress, _build_result
from hil.controller.farm.host.lease_runner import make_failed_result
from hil.controller.records.run import RunCase
from hil.errors import (
    AccessRefused,
    BoardBusy,
    BoardLost,
    CompileFailed,
    FarmError,
    StorageError,
    UsageError,
)


def case(outcome: str, name: str = "m", reason: str = "") -> RunCase:
    return run_case(name=name, outcome=outcome, reason=reason)


@pytest.mark.parametrize(
    ("code", "outcomes", "outcome", "infrastructure"),
    [
        (0, ["PASS"], "PASS", False),
        (0, ["SKIP", "PASS"], "PASS", False),
        (0, ["XFAIL"], "XFAIL", False),
        (1, ["PASS", "FAIL"], "FAIL", False),
        (3, ["FAIL", "COMPILE_ERROR", "PASS"], "COMPILE_ERROR", False),
        (3, ["RUN_CRASH"], "RUN_CRASH", False),
        (4, ["FAIL", "BOARD_LOST", "COMPILE_ERROR"], "BOARD_LOST", True),
        (5, [], "", False),
        (5, ["SKIP"], "SKIP", False),
    ],
)
def test_result_marks_only_board_loss_as_infrastructure(code, outcomes, outcome, infrastructure):
    result = _build_result(run_record(*map(case, outcomes), exit_code=code), {})
    assert (result.exit_code, result.outcome, result.infrastructure) == (code, outcome, infrastructure)


def test_progress_hides_resume_command_from_submitter():
    lines: list[str] = []
    progress = LineProgress(lines.append)
    progress.interrupt("hil suite run --resume out")
    progress.note("a remark")
    assert lines == ["a remark"]


def test_progress_reports_cases_as_they_end():
    told: list[tuple[str, ...]] = []
    progress = LineProgress(lambda text: None, lambda *case: told.append(case))
    progress.end("net", "FAIL", "y differs")
    progress.end(SimpleNamespace(id="net_layer", outcome="PASS", message=""))
    assert told == [("net", "FAIL", "y differs"), ("net_layer", "PASS", "")]


def test_result_reason_names_most_severe_case():
    def reason_of(exit_code: int, *cases: RunCase) -> str:
        return _build_result(run_record(*cases, exit_code=exit_code), {}).reason

    assert reason_of(1, case("PASS", "a"), case("FAIL", "b", "3 of 4 differ")) == "b: 3 of 4 differ"
    assert reason_of(0, case("PASS")) == ""
    assert reason_of(5, case("SKIP", "a", "no such delegate")) == "a: no such delegate"


@pytest.mark.parametrize(
    ("error", "code", "infrastructure"),
    [
        (UsageError("no such model"), 2, False),
        (AccessRefused("not yours"), 2, False),
        (StorageError("the disk is full"), 4, True),
        (BoardLost("it stopped answering"), 4, True),
        (BoardBusy("fence 3 is too old"), 4, True),
        (FarmError("the store has it no more"), 4, True),
        (CompileFailed("outside of any case"), 4, True),
        (RuntimeError("a bug"), 4, True),
        (OSError("no space left"), 4, True),
        (TypeError("'<' not supported between 'str' and 'int'"), 70, False),
        (OverflowError("cannot convert float infinity to integer"), 70, False),
        (RecursionError("maximum recursion depth exceeded"), 70, False),
    ],
)
def test_failed_classifies_error_by_type(error, code, infrastructure):
    result = make_failed_result(error)
    assert (result.exit_code, result.infrastructure) == (code, infrastructure)
    assert str(error.args[0]) in result.reason


def test_failed_appends_hint_to_reason():
    assert make_failed_result(BoardLost("gone", hint="look at its power")).reason == "gone; look at its power"
