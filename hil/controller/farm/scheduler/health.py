"""State machine of a board's health. Pure functions.

An infrastructure error makes a board suspect, regardless of the cause (LAVA's rule). A suspect board only receives a
health job. If the job passes, the board is online. If the job fails, the board is quarantined and checked at increasing
intervals. A board that a user outside of the farm has is quarantined and checked at constant intervals. A board without
a worker is offline. When the worker returns, a board that was healthy recently and had no events since is online.
Otherwise the board is suspect.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hil.controller.farm.messages import BoardState
from hil.controller.farm.settings import FarmSettings

# After this many failed checks in a row, jobs do not wait for the board. The same number of lost checks in a row counts
# as a failed check.
GIVEN_UP = 3
_DOUBLINGS = 30  # limit of the exponent; quarantine_most_s applies earlier


class EventKind(str, Enum):
    """Type of a board event."""

    ATTENDED = "attended"  # a host's worker presents the board
    HEALTHY = "healthy"  # health job passed
    UNHEALTHY = "unhealthy"  # health job failed
    CHECK_LOST = "check lost"  # health job without a result: the worker dropped it or was lost
    BUSY = "busy"  # health job without a check: a user outside of the farm has the board
    INFRASTRUCTURE = "infrastructure"  # a job failed because of the board or the farm
    LOST = "lost"  # no heartbeat of the worker
    UNCHECKED = "unchecked"  # no recent health result
    RETRY = "retry"  # quarantine expired, or an admin resumed the board


@dataclass(frozen=True)
class Event:
    """Event of a board."""

    what: EventKind
    reason: str = ""  # details as text
    # For ATTENDED: True if the board was healthy recently and had no events since.
    checked: bool = False


@dataclass(frozen=True)
class HealthChange:
    """New state of a board."""

    state: BoardState
    failures: int  # failed checks in a row
    check_in_s: float | None  # delay of the next check (0: when the board is free); None: no check
    reason: str  # reason as text, for the board's row and event

    @property
    def doubted(self) -> bool:
        """Whether earlier health results no longer count, so that the board must pass a new check."""
        return self.check_in_s is not None


_USUAL = FarmSettings()


def apply_event(state: BoardState, failures: int, event: Event, settings: FarmSettings = _USUAL) -> HealthChange:
    """Return a board's new state after an event."""
    what, why = event.what, event.reason
    if what is EventKind.LOST:
        return HealthChange(BoardState.OFFLINE, failures, None, why or "no heartbeat from the host")
    if what is EventKind.HEALTHY:
        # A board without a worker stays offline.
        now = BoardState.OFFLINE if state is BoardState.OFFLINE else BoardState.ONLINE
        return HealthChange(now, 0, None, why or "health check passed")
    if what is EventKind.BUSY and state is not BoardState.OFFLINE:
        # A board in use has no fault: the number of failures and the delay do not increase, and jobs keep waiting.
        return HealthChange(BoardState.QUARANTINED, failures, settings.quarantine_s, why or "the board is in use")
    if (
        what is EventKind.CHECK_LOST
        and failures + 1 < GIVEN_UP
        and state not in (BoardState.OFFLINE, BoardState.QUARANTINED)
    ):
        return HealthChange(BoardState.SUSPECT, failures + 1, 0.0, why or "the health check ended without a result")
    if what in (EventKind.UNHEALTHY, EventKind.CHECK_LOST):
        failed = failures + 1
        wait_s = min(settings.quarantine_s * 2 ** min(failed - 1, _DOUBLINGS), settings.quarantine_most_s)
        reason = f"health check failed{f' {failed} times in a row' if failed > 1 else ''}: {why or 'unknown reason'}"
        if state is BoardState.OFFLINE:
            return HealthChange(state, failed, None, reason)
        return HealthChange(BoardState.QUARANTINED, failed, wait_s, reason)
    if what is EventKind.ATTENDED:
        return _decide_on_attend(state, failures, event)
    if state is BoardState.OFFLINE or (state is BoardState.QUARANTINED and what is not EventKind.RETRY):
        # Plan no new check: offline boards are checked before they become online, and quarantined boards keep their
        # check time.
        return HealthChange(state, failures, None, why)
    return HealthChange(BoardState.SUSPECT, failures, 0.0, why or _WHY[what])


_WHY = {
    EventKind.INFRASTRUCTURE: "a job had an infrastructure failure",
    EventKind.UNCHECKED: "health check overdue",
    EventKind.RETRY: "health check requested",
}


def _decide_on_attend(state: BoardState, failures: int, event: Event) -> HealthChange:
    if state is not BoardState.OFFLINE:
        return HealthChange(state, failures, None, event.reason)
    if event.checked and not failures:
        return HealthChange(BoardState.ONLINE, 0, None, event.reason or "the host is back")
    reason = "not checked since the last failure" if failures else "health check overdue"
    return HealthChange(BoardState.SUSPECT, failures, 0.0, event.reason or reason)
