"""Test whether the board may have caused a job's failure."""

from __future__ import annotations

import pytest

from hil.controller.farm.host.suspicion import is_suspicious, judge_after_probe
from hil.controller.farm.messages import JobResult, Kind

HUNG = JobResult(3, "TIMEOUT", "digits: the run took over 60 s", record={"cases": [{"outcome": "TIMEOUT"}]})


@pytest.mark.parametrize(
    ("kind", "result", "is_so"),
    [
        (Kind.RUN, HUNG, True),
        (Kind.RUN, JobResult(3, "TIMEOUT", "time limit of 9 s exceeded"), True),
        (Kind.BUNDLE, JobResult(3, "RUN_CRASH"), True),
        (Kind.SUITE, JobResult(3, "COMPILE_ERROR", record={"cases": [{"outcome": "LOAD_ERROR"}]}), True),
        (Kind.RUN, JobResult(0, "PASS"), False),
        (Kind.RUN, JobResult(1, "FAIL", "y differs"), False),
        (Kind.RUN, JobResult(3, "COMPILE_ERROR"), False),
        (Kind.RUN, JobResult(4, "BOARD_UNFIT", infrastructure=True), False),
        (Kind.HEALTH, HUNG, False),
        (Kind.LEASE, HUNG, False),
    ],
)
def test_hangs_and_crashes_are_suspicious(kind: Kind, result: JobResult, is_so: bool) -> None:
    assert is_suspicious(kind, result) is is_so


@pytest.mark.parametrize("outcome", ["TIMEOUT", "RUN_ERROR", "RUN_CRASH", "LOAD_ERROR", "FAIL", "BOARD_LOST"])
def test_failed_probe_marks_board_unfit(outcome: str) -> None:
    found = judge_after_probe(HUNG, JobResult(3, outcome, "small test model: it hangs"))
    assert (found.exit_code, found.outcome, found.infrastructure) == (4, "BOARD_UNFIT", True)
    assert "small test model: it hangs" in found.reason and "TIMEOUT: digits: the run took over 60 s" in found.reason


@pytest.mark.parametrize("probe", [JobResult(0, "PASS"), JobResult(3, "COMPILE_ERROR", "no disk"), JobResult(2)])
def test_probe_preserves_job_result_when_board_works(probe: JobResult) -> None:
    assert judge_after_probe(HUNG, probe) is HUNG
