"""Cached farm history. Charts need many events, so the cache fetches only new events."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hil.controller.farm.messages import ENDED, JobState
from hil.controller.farm.timeline import Stay, find_lease_periods
from hil.controller.records.lab.farm import FarmEvent, FarmJob
from hil.errors import UsageError

# Maximum events and jobs to cache, newest first.
MOST_EVENTS, MOST_JOBS = 20_000, 5_000
# Newest events and jobs to fetch for an update. The second number of events applies if the first does not reach back to
# known events.
_EVENTS_AGAIN, _MORE_EVENTS, _JOBS_AGAIN = 200, 2000, 100
# Events can arrive out of order, so an update also fetches this many known events.
_LATE = 50
# Fetch at most this many jobs separately. If more jobs changed, fetch all jobs.
_ONE_BY_ONE = 10
_BOARDS_KEPT = 8
# Prefetch a farm's jobs if it has at least this many events.
_MANY = 2000
_BEGUN = [state.value for state in JobState if state is not JobState.QUEUED]

Ask = Callable[..., Any]


class FarmPast:
    """Newest events and jobs as :meth:`.FarmLink.ask` returns them, oldest first.

    Methods take a function that queries the farm, and raise the errors of that function.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._every = _Events("")
        self._of_boards: dict[str, _Events] = {}
        self._jobs = _Jobs()
        self._stays: dict[
            str, tuple[Sequence[FarmEvent], Sequence[Stay]]
        ] = {}  # board -> events and the stays derived from them

    def prepare(self, ask: Ask) -> None:
        """Prefetch events and, for a busy farm, jobs."""
        if len(self.events(ask)) >= _MANY:
            self.list_jobs(ask)

    def events(self, ask: Ask, board: str = "") -> Sequence[FarmEvent]:
        """Return the newest events, optionally for a single board."""
        with self._lock:
            if not board or self._every.count < MOST_EVENTS:
                every = self._every.read(ask)
                if not board:
                    return every
                if len(every) < MOST_EVENTS:  # the farm has no older events
                    return [one for one in every if one.board == board]
            if board not in self._of_boards:
                if len(self._of_boards) >= _BOARDS_KEPT:
                    del self._of_boards[next(iter(self._of_boards))]
                self._of_boards[board] = _Events(board)
            return self._of_boards[board].read(ask)

    def list_lease_periods(self, ask: Ask, board: str = "") -> tuple[Sequence[Stay], bool]:
        """Return the periods in which jobs used boards, and True if earlier periods may be missing."""
        with self._lock:
            events = self.events(ask, board)
            kept, found = self._stays.get(board, (None, []))
            if kept is not events:
                found = find_lease_periods(events)
                self._stays[board] = (events, found)
                while len(self._stays) > _BOARDS_KEPT:
                    del self._stays[next(iter(self._stays))]
            return found, len(events) >= MOST_EVENTS

    def list_jobs(self, ask: Ask) -> Sequence[FarmJob]:
        """Return the newest jobs."""
        with self._lock:
            return self._jobs.read(ask, self._every.read(ask))


class _Events:
    def __init__(self, board: str) -> None:
        self._which = {"board": board} if board else {}
        self._known: dict[int, FarmEvent] = {}  # sorted by event id
        self._listed: list[FarmEvent] = []

    @property
    def count(self) -> int:
        """Known event count."""
        return len(self._known)

    def read(self, ask: Ask) -> Sequence[FarmEvent]:
        for limit in (_EVENTS_AGAIN, _MORE_EVENTS) if self._known else (_EVENTS_AGAIN,):
            new = self._fetch_events(ask, limit)
            if self._continues_known(new, limit):
                break
        else:
            self._known, self._listed = {}, []
            new = self._fetch_events(ask, MOST_EVENTS) if len(new) == limit else new
        told = {one.id: one for one in new if one.id not in self._known}
        if told:
            late = self._known and next(iter(told)) < next(reversed(self._known))
            self._known |= told
            if late:
                self._known = {number: self._known[number] for number in sorted(self._known)}
            for number in list(itertools.islice(self._known, max(0, len(self._known) - MOST_EVENTS))):
                del self._known[number]
            self._listed = list(self._known.values())
        return self._listed

    def _fetch_events(self, ask: Ask, limit: int) -> Sequence[FarmEvent]:
        found: Sequence[FarmEvent] = ask("events", limit=limit, **self._which)
        return found

    def _continues_known(self, new: Sequence[FarmEvent], limit: int) -> bool:
        """Return True if the new events overlap the known ones and belong to the same farm."""
        if not (self._known and new):
            return False
        last, again = next(reversed(self._known)), self._known.get(new[0].id)
        if again is None or again.at != new[0].at or new[-1].id < last:
            return False
        return len(new) < limit or new[0].id <= last - _LATE


class _Jobs:
    def __init__(self) -> None:
        self._known: dict[str, FarmJob] = {}
        self._seen = 0  # last processed event id

    def read(self, ask: Ask, events: Sequence[FarmEvent]) -> Sequence[FarmJob]:
        seen, self._seen = self._seen, events[-1].id if events else 0
        lost = self._seen < seen or (len(events) >= MOST_EVENTS and events[0].id > seen - _LATE)
        if lost or not self._fetch_changes(ask, {one.job for one in events if one.id > seen - _LATE}):
            self._known = {}
            self._store_rows(ask("jobs", limit=MOST_JOBS))
        for name in list(self._known)[: max(0, len(self._known) - MOST_JOBS)]:
            del self._known[name]
        return list(self._known.values())

    def _fetch_changes(self, ask: Ask, stirred: set[str]) -> bool:
        """Fetch new and changed jobs. Return False if all jobs must be fetched."""
        new: Sequence[FarmJob] = ask("jobs", limit=_JOBS_AGAIN) if self._known else ()
        again = self._known.get(new[0].name) if new else None
        if again is None or again.queued_at != new[0].queued_at:
            return False
        self._store_rows(new)
        # Jobs that started recently are usually among the newest running and ended jobs.
        begun: Sequence[FarmJob] = ask("jobs", state=_BEGUN, limit=_JOBS_AGAIN)
        self._store_rows([one for one in begun if one.name in self._known])
        told = {one.name for one in (*new, *begun)}
        # Ended jobs do not change.
        left = [name for name in stirred - told if name in self._known and self._known[name].state not in ENDED]
        if len(left) > _ONE_BY_ONE:
            return False
        for name in left:
            try:
                self._store_rows([ask("job", name=name)])
            except UsageError:  # the farm has deleted the job
                del self._known[name]
        return True

    def _store_rows(self, rows: Sequence[FarmJob]) -> None:
        self._known |= {row.name: row for row in rows}
