"""Which jobs are tried again, and how they end when they are not."""

from __future__ import annotations

import pytest

from hil.controller.farm.retry import Final, Retry, decide
from hil.controller.farm.words import Kind, Result

LOST = Result(4, "BOARD_LOST", "the cable was cut", infrastructure=True)


@pytest.mark.parametrize(
    "result",
    [
        Result(0, "PASS"),
        Result(1, "FAIL", "y differs"),
        Result(3, "COMPILE_ERROR", "no such operator"),
        Result(3, "TIMEOUT", "it took longer than its time limit"),
        Result(4, "BOARD_LOST", "the runtime is not on the board"),
        Result(130, "", "cancelled by ada"),
    ],
    ids=lambda result: result.outcome or "CANCELLED",
)
@pytest.mark.parametrize("kind", Kind)
def test_what_the_job_was_run_to_learn_is_its_result_at_once(result: Result, kind: Kind):
    assert decide(result, kind, 1, 5) == Final(result)


@pytest.mark.parametrize("kind", [Kind.RUN, Kind.BUNDLE, Kind.SUITE, Kind.LEASE])
def test_the_infrastructures_failures_are_tried_elsewhere_up_to_the_limit(kind: Kind):
    assert decide(LOST, kind, 1, 3) == Retry("the cable was cut")
    assert decide(LOST, kind, 2, 3) == Retry("the cable was cut")
    final = decide(LOST, kind, 3, 3)
    assert isinstance(final, Final)
    assert (final.result.exit_code, final.result.outcome) == (4, "BOARD_LOST")
    assert final.result.reason == "the cable was cut (attempt 3 of 3)"


def test_a_limit_that_was_lowered_meanwhile_holds():
    assert isinstance(decide(LOST, Kind.RUN, 4, 3), Final)


def test_one_attempt_is_one():
    assert isinstance(decide(LOST, Kind.RUN, 1, 1), Final)


def test_a_failed_check_is_never_repeated_elsewhere():
    assert decide(LOST, Kind.HEALTH, 1, 3) == Final(LOST)


def test_a_holder_is_not_given_another_board_under_its_hands():
    assert decide(LOST, Kind.LEASE, 1, 3, held=True) == Final(LOST)


def test_a_failure_without_a_reason_is_told_all_the_same():
    nameless = Result(4, infrastructure=True)
    assert decide(nameless, Kind.RUN, 1, 2) == Retry("the infrastructure failed")
    final = decide(nameless, Kind.RUN, 2, 2)
    assert isinstance(final, Final)
    assert final.result.reason == "the infrastructure failed (attempt 2 of 2)"
