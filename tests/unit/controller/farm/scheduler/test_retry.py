"""Test which jobs are retried, and their result otherwise."""

from __future__ import annotations

import pytest

from hil.controller.farm.messages import JobResult, Kind
from hil.controller.farm.scheduler.policy import decide_after_attempt

LOST = JobResult(4, "BOARD_LOST", "the cable was cut", infrastructure=True)


@pytest.mark.parametrize(
    "result",
    [
        JobResult(0, "PASS"),
        JobResult(1, "FAIL", "y differs"),
        JobResult(3, "COMPILE_ERROR", "no such operator"),
        JobResult(3, "TIMEOUT", "time limit exceeded"),
        JobResult(4, "BOARD_LOST", "the runtime is not on the board"),
        JobResult(130, "", "cancelled by ada"),
    ],
    ids=lambda result: result.outcome or "CANCELLED",
)
@pytest.mark.parametrize("kind", Kind)
def test_retry_preserves_final_result_of_job(result: JobResult, kind: Kind):
    assert decide_after_attempt(result, kind, 1, 5) == result


@pytest.mark.parametrize("kind", [Kind.RUN, Kind.BUNDLE, Kind.SUITE, Kind.LEASE])
def test_retry_repeats_infrastructure_failure_up_to_limit(kind: Kind):
    assert decide_after_attempt(LOST, kind, 1, 3) is None
    assert decide_after_attempt(LOST, kind, 2, 3) is None
    final = decide_after_attempt(LOST, kind, 3, 3)
    assert final is not None
    assert (final.exit_code, final.outcome) == (4, "BOARD_LOST")
    assert final.reason == "the cable was cut (attempt 3 of 3)"


@pytest.mark.parametrize("kind", [Kind.RUN, Kind.BUNDLE, Kind.SUITE, Kind.LEASE])
def test_retry_ignores_limit_after_stop_of_host(kind: Kind):
    assert decide_after_attempt(LOST, kind, 3, 3, interrupted=True) is None
    assert decide_after_attempt(LOST, kind, 1, 3, interrupted=True, held=True) == LOST


def test_retry_counts_interrupted_command():
    assert decide_after_attempt(LOST, Kind.COMMAND, 1, 1, interrupted=True) is not None
    assert decide_after_attempt(LOST, Kind.COMMAND, 1, 2, interrupted=True) is None


def test_retry_applies_lowered_attempt_limit():
    assert decide_after_attempt(LOST, Kind.RUN, 4, 3) is not None


def test_retry_stops_at_limit_of_single_attempt():
    assert decide_after_attempt(LOST, Kind.RUN, 1, 1) is not None


def test_retry_skips_failed_health_check():
    assert decide_after_attempt(LOST, Kind.HEALTH, 1, 3) == LOST


def test_retry_skips_lease_with_active_holder():
    assert decide_after_attempt(LOST, Kind.LEASE, 1, 3, held=True) == LOST


def test_retry_adds_reason_to_unexplained_failure():
    nameless = JobResult(4, infrastructure=True)
    assert decide_after_attempt(nameless, Kind.RUN, 1, 2) is None
    final = decide_after_attempt(nameless, Kind.RUN, 2, 2)
    assert final is not None
    assert final.reason == "infrastructure failure (attempt 2 of 2)"


UNFIT = JobResult(4, "BOARD_UNFIT", "the disk is full", infrastructure=True)


def test_retry_ignores_unfit_boards_while_fit_boards_remain():
    assert decide_after_attempt(UNFIT, Kind.RUN, 9, 3, others=True) is None
    final = decide_after_attempt(UNFIT, Kind.RUN, 3, 3)
    assert final is not None and final.outcome == "BOARD_UNFIT"
    assert decide_after_attempt(LOST, Kind.RUN, 3, 3, others=True) is not None
