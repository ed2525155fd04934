from __future__ import annotations

import inspect

from hil import errors
from hil.core.results import Outcome, exit_code_of


def test_error_exit_code_matches_outcome():
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        # A vacuous tolerance is bad usage for a command; only in a suite does it become the outcome of a case.
        if issubclass(kind, errors.HilError) and kind.outcome and kind is not errors.VacuousTolerance:
            # In a suite, one skipped case changes nothing; a command that skips its only case ran nothing.
            of_outcome = Outcome(kind.outcome).exit_code
            assert kind.exit_code == (errors.EXIT_NOTHING_RAN if kind is errors.NotRun else of_outcome)


def test_error_text_contains_location_and_hint():
    error = errors.LoadFailed("no room", hint="make some").locate(stage="push", board="rpi5")
    assert str(error) == "no room [push, board rpi5]\n  hint: make some"
    assert error.locate(stage="later", board="other").stage == "push"
    assert str(errors.BoardBusy()) == "The board is in use by another session."


def test_exit_code_of_returns_most_severe_outcome():
    outcome = Outcome
    assert exit_code_of([outcome.PASS, outcome.XFAIL]) == 0
    assert exit_code_of([outcome.PASS, outcome.FAIL]) == 1
    assert exit_code_of([outcome.XPASS]) == 1
    assert exit_code_of([outcome.FAIL, outcome.TIMEOUT]) == 3
    assert exit_code_of([outcome.BOARD_LOST, outcome.RUN_CRASH, outcome.FAIL]) == 4
    assert exit_code_of([]) == 5
    assert exit_code_of([outcome.SKIP]) == 5
