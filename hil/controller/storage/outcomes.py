"""Interpret stored outcomes, which may be from a newer version of hil."""

from __future__ import annotations

import functools

from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.errors import EXIT_OK, EXIT_STAGE

# Texts for a missing outcome: the run ended before the case, or the run does not have the case.
NOT_RUN, ABSENT = "not run", "absent"


def exit_code_for(outcome: str) -> int:
    """Return the exit code of a stored outcome. Outcomes from newer hil versions count as failures."""
    return Outcome(outcome).exit_code if outcome in Outcome.__members__ else EXIT_STAGE


@functools.lru_cache(256)  # called for many cases with few different outcomes
def is_failing(outcome: str) -> bool:
    """Return True if an outcome needs attention."""
    return exit_code_for(outcome) != EXIT_OK


def classify_outcome(outcome: str) -> str:
    """Return an outcome's kind: ``pass``, ``fail`` (mismatch), ``error``, ``board`` or ``quiet`` (no action needed)."""
    if outcome == Outcome.PASS.value:
        return "pass"
    if outcome in (Outcome.FAIL.value, Outcome.BLIND.value, Outcome.UNSTABLE.value, Outcome.XPASS.value):
        return "fail"
    if outcome in BOARD_OUTCOMES:
        return "board"
    return "error" if is_failing(outcome) else "quiet"
