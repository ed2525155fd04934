"""Decide whether a candidate's program gives wrong outputs, on a board that may make any run fail.

A wrong program never passes, so a single pass proves that a candidate is good. A single failure proves nothing: the
board may have caused it. A candidate is bad only after so many failures that board faults are an unlikely cause. This
number depends on the share of runs with board faults so far. After every failure, the good program runs for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hil.controller.records.decisions.gate import TrialOutcome
from hil.core.results import BOARD_OUTCOMES, Outcome

# Skip a candidate after this many board errors without a complete run between them.
MAX_BOARD_ERRORS = 5
# Skip a candidate after this many failures of a kind that is not searched.
MAX_OTHER_FAILURES = 5
# Skip a candidate without a result after this many runs.
_MAX_RUNS = 30
_MIN_FAILURES = 2
# Largest probability that board faults alone caused all failures.
_CHANCE = 0.001


@dataclass(frozen=True)
class ProgramAnswer:
    """Result of a single run of a program.

    Attributes:
        is_from_host: whether the case ended before the board was used. Such a result does not depend on the board.
    """

    outcome: Outcome
    reason: str = ""
    is_from_host: bool = False


@dataclass(frozen=True)
class Trial:
    """Result of a candidate's test.

    Attributes:
        is_board_error: whether the candidate was skipped because of the board.
    """

    outcome: TrialOutcome
    reason: str
    is_board_error: bool = False


@dataclass
class FaultRate:
    """Share of runs that failed because of the board."""

    runs: int = 0
    faults: int = 0

    def add(self, *, faults: int = 0, runs: int = 1) -> None:
        """Add runs of programs that are known to be correct, and the number of these runs that failed."""
        self.runs += runs
        self.faults += faults

    def excludes_faults(self, failures: int) -> bool:
        """Return whether board faults are an unlikely cause for this many failures in a row.

        The prior distribution of the share is uniform (Laplace's rule of succession).
        """
        share = (self.faults + 1) / (self.runs + 2)
        return failures >= _MIN_FAILURES and share**failures < _CHANCE


def decide_answers(
    run: Callable[[], ProgramAnswer],
    run_good: Callable[[], ProgramAnswer] | None,
    *,
    is_searched: Callable[[Outcome], bool],
    rate: FaultRate,
) -> Trial:
    """Run a candidate's program until it passes, or until it is certain that it fails.

    Args:
        run: runs the program once.
        run_good: runs a program that passed before; None if there is no such program.
        is_searched: returns whether an outcome is the failure to search. Candidates with other failures are skipped.
        rate: updated with the runs.
    """
    failures, others, errors = 0, 0, 0
    for _ in range(_MAX_RUNS):
        answer = run()
        if answer.outcome in BOARD_OUTCOMES:
            rate.add(faults=1)
            errors += 1
            if errors >= MAX_BOARD_ERRORS:
                return Trial("skipped", f"{answer.outcome.value} {errors} times in a row: {answer.reason}", True)
            continue
        errors = 0
        if answer.outcome.exit_code == 0:
            rate.add(faults=failures + others, runs=failures + others + 1)
            return Trial("good", answer.outcome.value)
        text = f"{answer.outcome.value}: {answer.reason}"
        if not is_searched(answer.outcome):
            others += 1
            if answer.is_from_host or others >= MAX_OTHER_FAILURES:
                return Trial("skipped", text)
            continue
        if answer.is_from_host:
            return Trial("bad", text)
        failures, others = failures + 1, 0
        if run_good is not None:
            rate.add(faults=int(run_good().outcome.exit_code != 0))
        if rate.excludes_faults(failures):
            return Trial("bad", f"{text} ({failures} runs)")
    return Trial("skipped", f"no clear result after {_MAX_RUNS} runs: {failures} failed", True)
