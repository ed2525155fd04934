"""What becomes of a board by what happens to it. Pure.

An infrastructure error makes a board suspect, whoever's fault it was (LAVA's rule): only a health job is given to it
then. A healthy one is online again; a failed one puts it into quarantine, from which it is checked again after ever
longer times. A board that nobody attends is offline; once it is attended again it is online if it was healthy not long
ago and nothing happened to it since, else suspect.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hil.controller.farm.messages import BoardState
from hil.controller.farm.settings import FarmSettings

# So many checks in a row that fail: the board is one that nobody need wait for. As many that are lost are a failure.
GIVEN_UP = 3
_DOUBLINGS = 30  # beyond them the longest time has long been reached


class EventKind(str, Enum):
    """What can happen to a board."""

    ATTENDED = "attended"  # a worker of a host presents it
    HEALTHY = "healthy"  # its health job passed
    UNHEALTHY = "unhealthy"  # its health job failed
    CHECK_LOST = "check lost"  # its health job has no result: its worker let it go, or was not heard of
    INFRASTRUCTURE = "infrastructure"  # a job on it failed, and not for the job's own sake
    LOST = "lost"  # its worker is not heard of
    UNCHECKED = "unchecked"  # nothing is known of its health for long
    RETRY = "retry"  # its time in quarantine is over, or somebody says that it is mended


@dataclass(frozen=True)
class Event:
    """Something that happened to a board."""

    what: EventKind
    reason: str = ""  # more of it, in words
    # of ATTENDED: whether it was seen to be healthy not long ago, and nothing happened to it since.
    checked: bool = False


@dataclass(frozen=True)
class Change:
    """What becomes of the board."""

    state: BoardState
    failures: int  # failed checks in a row
    check_in_s: float | None  # check it after so long (0: as soon as it is free); None: nothing is to be checked
    reason: str  # why, in words, for its row and its event

    @property
    def doubted(self) -> bool:
        """Whether what was known of its health counts no more: it must pass a check before it is online."""
        return self.check_in_s is not None


_USUAL = FarmSettings()


def after(state: BoardState, failures: int, event: Event, settings: FarmSettings = _USUAL) -> Change:
    """The board's state after an event."""
    what, why = event.what, event.reason
    if what is EventKind.LOST:
        return Change(BoardState.OFFLINE, failures, None, why or "its host is not heard of")
    if what is EventKind.HEALTHY:
        # What nobody attends any more stays offline; it is online once it is attended again.
        now = BoardState.OFFLINE if state is BoardState.OFFLINE else BoardState.ONLINE
        return Change(now, 0, None, why or "it passed its check")
    if (
        what is EventKind.CHECK_LOST
        and failures + 1 < GIVEN_UP
        and state not in (BoardState.OFFLINE, BoardState.QUARANTINED)
    ):
        return Change(BoardState.SUSPECT, failures + 1, 0.0, why or "its check was lost")
    if what in (EventKind.UNHEALTHY, EventKind.CHECK_LOST):
        failed = failures + 1
        wait_s = min(settings.quarantine_s * 2 ** min(failed - 1, _DOUBLINGS), settings.quarantine_most_s)
        reason = f"its check failed{f' {failed} times in a row' if failed > 1 else ''}: {why or 'no reason was given'}"
        if state is BoardState.OFFLINE:
            return Change(state, failed, None, reason)
        return Change(BoardState.QUARANTINED, failed, wait_s, reason)
    if what is EventKind.ATTENDED:
        return _attended(state, failures, event)
    if state is BoardState.OFFLINE or (state is BoardState.QUARANTINED and what is not EventKind.RETRY):
        # It is checked before it is online in any case; a quarantine that was set goes on.
        return Change(state, failures, None, why)
    return Change(BoardState.SUSPECT, failures, 0.0, why or _WHY[what])


_WHY = {
    EventKind.INFRASTRUCTURE: "a job on it failed for the infrastructure's sake",
    EventKind.UNCHECKED: "it was not checked for long",
    EventKind.RETRY: "it is to be checked again",
}


def _attended(state: BoardState, failures: int, event: Event) -> Change:
    if state is not BoardState.OFFLINE:
        return Change(state, failures, None, event.reason)
    if event.checked and not failures:
        return Change(BoardState.ONLINE, 0, None, event.reason or "its host is back")
    reason = "it was not checked since it failed" if failures else "it was not checked for long"
    return Change(BoardState.SUSPECT, failures, 0.0, event.reason or reason)
