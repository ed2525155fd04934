from __future__ import annotations

import inspect

from hil import errors
from hil.core.results import Outcome, exit_code_of


def test_every_error_with_an_outcome_has_that_outcomes_exit_code():
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        # A command that is refused a tolerance ends as bad usage; only in a suite is that the outcome of a case.
        if issubclass(kind, errors.HilError) and kind.outcome and kind is not errors.VacuousTolerance:
            # One case of several that is not run changes nothing; a command that ends with it ran nothing.
            of_outcome = Outcome(kind.outcome).exit_code
            assert kind.exit_code == (errors.EXIT_NOTHING_RAN if kind is errors.NotRun else of_outcome)


def test_an_error_says_what_where_and_what_to_do():
    error = errors.LoadFailed("no room", hint="make some").located(stage="push", board="rpi5")
    assert str(error) == "no room [push, board rpi5]\n  hint: make some"
    assert error.located(stage="later", board="other").stage == "push"
    assert str(errors.BoardBusy()) == "Another session holds the board."


def test_the_gravest_exit_code_wins():
    outcome = Outcome
    assert exit_code_of([outcome.PASS, outcome.XFAIL]) == 0
    assert exit_code_of([outcome.PASS, outcome.FAIL]) == 1
    assert exit_code_of([outcome.XPASS]) == 1
    assert exit_code_of([outcome.FAIL, outcome.TIMEOUT]) == 3
    assert exit_code_of([outcome.BOARD_LOST, outcome.RUN_CRASH, outcome.FAIL]) == 4
    assert exit_code_of([]) == 5
    assert exit_code_of([outcome.SKIP]) == 5
