"""Detect failed jobs that the board may have caused. Pure functions. A check of the board then finds the cause."""

from __future__ import annotations

from hil.controller.farm.messages import JobResult, Kind
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.errors import EXIT_BOARD, EXIT_OK

# Failures that either the program or a stuck board can cause, except wrong results.
_FAILURES = frozenset({Outcome.LOAD_ERROR, Outcome.RUN_ERROR, Outcome.RUN_CRASH, Outcome.TIMEOUT})
# Outcomes of a check that show a board fault. Failures on the host do not show a board fault.
_UNFIT = _FAILURES | BOARD_OUTCOMES | {Outcome.FAIL, Outcome.UNSTABLE}
_JOBS = (Kind.RUN, Kind.BUNDLE, Kind.SUITE)
_MAX_REASON = 500


def is_suspicious(kind: Kind, result: JobResult) -> bool:
    """Return True if a stuck board is a possible cause of the job's failure."""
    if kind not in _JOBS or result.infrastructure:
        return False
    outcomes = {result.outcome, *(str(case.get("outcome", "")) for case in result.record.get("cases", ()))}
    return not outcomes.isdisjoint(one.value for one in _FAILURES)


def judge_after_probe(result: JobResult, probe: JobResult) -> JobResult:
    """Return a job's result after a check of the board. If the check failed, the result is ``BOARD_UNFIT``."""
    if probe.exit_code == EXIT_OK or probe.outcome not in {one.value for one in _UNFIT}:
        return result
    reason = (
        f"the board can no longer run programs: {probe.reason or probe.outcome}; "
        f"the job itself ended with {result.outcome or result.exit_code}: {result.reason}"
    )
    unfit = Outcome.BOARD_UNFIT.value
    return result.replace(exit_code=EXIT_BOARD, outcome=unfit, reason=reason[:_MAX_REASON], infrastructure=True)
