from __future__ import annotations

from types import SimpleNamespace

import pytest

from hil.controller.farm.host.job_attempt import LineProgress, _result
from hil.controller.farm.host.lease_runner import failed
from hil.controller.storage.runs import GO_ON
from hil.errors import (
    AccessRefused,
    BoardBusy,
    BoardLost,
    CompileFailed,
    FarmError,
    StorageError,
    UsageError,
)


def case(outcome: str, name: str = "m", reason: str = "") -> dict[str, str]:
    return {"name": name, "outcome": outcome, "reason": reason}


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
def test_only_a_lost_board_is_the_infrastructures_failure(code, outcomes, outcome, infrastructure):
    record = {"exit_code": code, "cases": [case(one) for one in outcomes]}
    result = _result(record, {})
    assert (result.exit_code, result.outcome, result.infrastructure) == (code, outcome, infrastructure)


def test_how_to_go_on_at_the_host_is_not_told_to_who_submitted():
    lines: list[str] = []
    progress = LineProgress(lines.append)
    progress.note(f"{GO_ON}hil suite run --resume out")
    progress.note("a remark")
    assert lines == ["a remark"]


def test_each_case_is_told_as_it_ends():
    told: list[tuple[str, ...]] = []
    progress = LineProgress(lambda text: None, lambda *case: told.append(case))
    progress.end("net", "FAIL", "y differs")
    progress.end(SimpleNamespace(id="net_layer", outcome="PASS", message=""))
    assert told == [("net", "FAIL", "y differs"), ("net_layer", "PASS", "")]


def test_the_reason_names_the_case_that_was_gravest():
    record = {"exit_code": 1, "cases": [case("PASS", "a"), case("FAIL", "b", "3 of 4 differ")]}
    assert _result(record, {}).reason == "b: 3 of 4 differ"
    assert _result({"exit_code": 0, "cases": [case("PASS")]}, {}).reason == ""
    assert (
        _result({"exit_code": 5, "cases": [case("SKIP", "a", "no such delegate")]}, {}).reason == "a: no such delegate"
    )


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
        (TypeError("'<' not supported between 'str' and 'int'"), 3, False),
        (OverflowError("cannot convert float infinity to integer"), 3, False),
        (RecursionError("maximum recursion depth exceeded"), 3, False),
    ],
)
def test_an_error_that_leaves_the_library_is_the_jobs_own_only_where_it_was_used_wrongly(error, code, infrastructure):
    result = failed(error)
    assert (result.exit_code, result.infrastructure) == (code, infrastructure)
    assert str(error.args[0]) in result.reason


def test_an_errors_hint_goes_with_its_reason():
    assert failed(BoardLost("gone", hint="look at its power")).reason == "gone; look at its power"
