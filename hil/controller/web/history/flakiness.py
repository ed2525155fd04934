"""Flakiness of a case: how often its outcome changed between consecutive sessions. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hil.controller.storage.outcomes import classify_outcome

# Number of newest sessions to count. Older sessions say little about the case today.
SESSIONS = 50
# Kinds of outcomes of the case itself. Skipped cases and failures of the board do not count.
_COUNTED = ("pass", "fail", "error")


@dataclass(frozen=True)
class Flakiness:
    """Changes of a case's outcome between passing and failing."""

    changes: int
    sessions: int

    @property
    def score(self) -> float:
        """Share of changes in percent: 0 for a stable case, 100 if every session differs from the one before."""
        return 100 * self.changes / (self.sessions - 1) if self.sessions > 1 else 0.0

    @property
    def is_flaky(self) -> bool:
        """True if the case changed more often than by one regression and the fix."""
        return self.changes > 2


def measure_flakiness(outcomes: Sequence[str]) -> Flakiness:
    """Count the changes in the newest outcomes.

    Args:
        outcomes: outcomes before expectations, in time order.
    """
    kinds = [kind for outcome in outcomes if outcome and (kind := classify_outcome(outcome)) in _COUNTED][-SESSIONS:]
    fails = [kind != "pass" for kind in kinds]
    return Flakiness(sum(was != now for was, now in itertools.pairwise(fails)), len(fails))
