"""Which jobs are tried again, and how they end when they are not."""

from __future__ import annotations

import pytest

from hil.controller.farm.messages import JobResult, Kind
from hil.controller.farm.scheduler.policy import after_attempt

LOST = JobResult(4, "BOARD_LOST", "the cable was cut", infrastructure=True)


@pytest.mark.parametrize(
    "result",
    [
        JobResult(0, "PASS"),
        JobResult(1, "FAIL", "y differs"),
        JobResult(3, "COMPILE_ERROR", "no such operator"),
        JobResult(3, "TIMEOUT", "it took longer than its time limit"),
        JobResult(4, "BOARD_LOST", "the runtime is not on the board"),
        JobResult(130, "", "cancelled by ada"),
    ],
    ids=lambda result: result.outcome or "CANCELLED",
)
@pytest.mark.parametrize("kind", Kind)
def test_what_the_job_was_run_to_learn_is_its_result_at_once(result: JobResult, kind: Kind):
    assert after_attempt(result, kind, 1, 5) == result


@pytest.mark.parametrize("kind", [Kind.RUN, Kind.BUNDLE, Kind.SUITE, Kind.LEASE])
def test_the_infrastructures_failures_are_tried_elsewhere_up_to_the_limit(kind: Kind):
    assert after_attempt(LOST, kind, 1, 3) is None
    assert after_attempt(LOST, kind, 2, 3) is None
    final = after_attempt(LOST, kind, 3, 3)
    assert final is not None
    assert (final.exit_code, final.outcome) == (4, "BOARD_LOST")
    assert final.reason == "the cable was cut (attempt 3 of 3)"


def test_a_limit_that_was_lowered_meanwhile_holds():
    assert after_attempt(LOST, Kind.RUN, 4, 3) is not None


def test_one_attempt_is_one():
    assert after_attempt(LOST, Kind.RUN, 1, 1) is not None


def test_a_failed_check_is_never_repeated_elsewhere():
    assert after_attempt(LOST, Kind.HEALTH, 1, 3) == LOST


def test_a_holder_is_not_given_another_board_under_its_hands():
    assert after_attempt(LOST, Kind.LEASE, 1, 3, held=True) == LOST


def test_a_failure_without_a_reason_is_told_all_the_same():
    nameless = JobResult(4, infrastructure=True)
    assert after_attempt(nameless, Kind.RUN, 1, 2) is None
    final = after_attempt(nameless, Kind.RUN, 2, 2)
    assert final is not None
    assert final.reason == "the infrastructure failed (attempt 2 of 2)"
