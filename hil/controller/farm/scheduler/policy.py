"""Which waiting job gets which free board, and which can get none. Pure: the same question has the same answer.

A board that may only be checked goes to its health job, and health jobs go before all others. Then, one board after
another:

1. In each class (high, normal, low) the user comes next who has least of the boards now, then who had least of late;
   of that user's projects likewise; of the project's jobs the one that has waited longest.
2. Of the classes' next jobs the highest goes. A job counts as one class higher for every ``aging_s`` that it has
   waited, up to high, so that a stream of high jobs starves nobody; among equals the user's share decides as above.
   Waiting makes no job of a class pass another user's of the same class: sharing is for that.
3. It gets, of the boards that match, the one that the fewest other waiting jobs could have; of several such boards
   one that is warm for it.

Of one project's jobs a later one goes first where a board is warm for it, unless the first has waited for ``aging_s``.
What a job must avoid it is never given: the caller names there only boards without which there are others.

A job that ended on a board is tried on another where the infrastructure failed: a wrong answer, a compile error or a
time-out is what it was run to learn.
"""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

from hil.controller.farm.messages import BoardState, JobResult, Kind, Priority
from hil.controller.farm.scheduler.health import GIVEN_UP
from hil.controller.farm.selector import parse

_CLASS = {Priority.LOW: 0, Priority.NORMAL: 1, Priority.HIGH: 2}
_HIGHEST = max(_CLASS.values())
_Turn: TypeAlias = "tuple[float, ...]"
# How far behind the first of a project's jobs one is looked for that a board is warm for.
_LOOK = 32


@dataclass(frozen=True)
class Waiting:
    """A queued job, or what all jobs of a lane have in common."""

    id: int  # 0 of a lane
    # user, project: whom it is counted for.
    user: str
    project: str = ""
    priority: Priority = Priority.NORMAL
    waits_s: float = 0.0  # how long it has been queued
    selector: str = ""  # what a board must be (:mod:`.selector`); "" is any
    board: str = ""
    avoid: frozenset[str] = frozenset()  # boards that it must not be given
    affinity: str = ""  # what a board may be warm for; "" is nothing
    kind: Kind = Kind.RUN  # what it does; health jobs are apart
    lane: str = ""

    def matches(self, name: str, labels: Mapping[str, Any]) -> bool:
        """Whether it may ever have this board."""
        return self.board in ("", name) and parse(self.selector).matches(labels)

    def takes(self, free: Free) -> bool:
        """Whether it may have this board now."""
        if (free.health_only and self.kind is not Kind.HEALTH) or free.name in self.avoid:
            return False
        return self.matches(free.name, free.labels)

    def allowed(self, boards: Iterable[BoardRow]) -> Waiting:
        """The same today: it avoids the boards where it failed only while another may serve it."""
        others = (one for one in boards if one.may_serve and one.name not in self.avoid)
        if not self.avoid or any(self.matches(one.name, one.labels) for one in others):
            return self
        return replace(self, avoid=frozenset())


@dataclass(frozen=True)
class Free:
    """A board that has no job."""

    name: str
    labels: Mapping[str, Any] = field(default_factory=dict)  # what selectors see
    warm: frozenset[str] = frozenset()  # the affinities of what lies on it
    health_only: bool = False  # whether it must be checked before anything else


@dataclass(frozen=True)
class Use:
    """What a user's project has of the boards."""

    running: int = 0  # boards that it has now
    board_s: float = 0.0  # seconds of boards that it had, those long ago counted less


def assign(
    waiting: Sequence[Waiting], free: Sequence[Free], use: Mapping[tuple[str, str], Use], aging_s: float
) -> list[tuple[int, str]]:
    """Give free boards to waiting jobs: job and board, the most urgent first; no job and no board twice.

    Args:
        use: of each user and project that has or had boards.
        aging_s: a job counts as one class higher each time it has waited for so long.
    """
    given = _health(waiting, free)
    taken = {board for _, board in given}
    boards = [board for board in free if not board.health_only and board.name not in taken]
    jobs = [job for job in waiting if job.kind is not Kind.HEALTH]
    return given + (_Round(jobs, boards, use, aging_s).grants() if jobs and boards else [])


def turns(
    waiting: Sequence[Waiting], boards: Sequence[Free], use: Mapping[tuple[str, str], Use], aging_s: float
) -> list[int]:
    """The order in which waiting jobs would be given boards if each board came free again and again.

    Jobs that none of the boards will do for are not in it, and neither are checks of boards.
    """
    jobs = [job for job in waiting if job.kind is not Kind.HEALTH]
    return [job for job, _ in _Round(jobs, boards, use, aging_s, endless=True).grants()]


def _health(waiting: Iterable[Waiting], free: Iterable[Free]) -> list[tuple[int, str]]:
    names = {board.name for board in free}
    checks: dict[str, int] = {}
    for job in sorted(waiting, key=_age):
        if job.kind is Kind.HEALTH and job.board in names:
            checks.setdefault(job.board, job.id)
    return [(job, board) for board, job in checks.items()]


def _age(job: Waiting) -> tuple[float, int]:
    return -job.waits_s, job.id


class _Shares:
    """Who has how much of the boards, as the boards are given away."""

    def __init__(self, use: Mapping[tuple[str, str], Use]) -> None:
        self._of: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0.0])
        for (user, project), had in use.items():
            self.add(user, project, had)

    def add(self, user: str, project: str, had: Use) -> None:
        """A user's project has, or had, something of the boards."""
        for key in ((user,), (user, project)):
            self._of[key][0] += had.running
            self._of[key][1] += had.board_s

    def of(self, job: Waiting) -> tuple[float, ...]:
        """What the job's user has, and its project: the less, the sooner it is its turn."""
        return (*self._of.get((job.user,), (0, 0.0)), *self._of.get((job.user, job.project), (0, 0.0)))


class _Round:
    """One giving away of boards; where it is ``endless`` each is free again at once. Sets of boards are bits of an int:
    bit N is board N.
    """

    def __init__(
        self,
        jobs: Sequence[Waiting],
        boards: Sequence[Free],
        use: Mapping[tuple[str, str], Use],
        aging_s: float,
        *,
        endless: bool = False,
    ) -> None:
        self._boards, self._endless = boards, endless
        self._left = (1 << len(boards)) - 1
        self._aging_s = aging_s
        self._shares = _Shares(use)
        self._masks: dict[tuple[str, str, frozenset[str]], int] = {}
        self._matching: dict[str, int] = {}
        self._warm: dict[str, int] = defaultdict(int)
        for number, board in enumerate(boards):
            for affinity in board.warm:
                self._warm[affinity] |= 1 << number
        queues: dict[tuple[int, str, str], deque[Waiting]] = defaultdict(deque)
        self._wanted = [0] * len(boards)
        many: dict[int, int] = defaultdict(int)
        for job in sorted(jobs, key=_age):
            if mask := self._mask(job):
                queues[_CLASS[job.priority], job.user, job.project].append(job)
                many[mask] += 1
        for mask, count in many.items():
            for number in _bits(mask):
                self._wanted[number] += count
        # Of each class: whose turn it was when that was last asked, and their jobs. It only ever becomes later.
        self._heaps: dict[int, list[tuple[_Turn, deque[Waiting]]]] = defaultdict(list)
        for (rank, _, _), queue in queues.items():
            heapq.heappush(self._heaps[rank], (self._turn(queue[0]), queue))

    def grants(self) -> list[tuple[int, str]]:
        """Job and board until no job is left that a board would do for."""
        given: list[tuple[int, str]] = []
        while self._left and (queue := self._next()):
            job = self._warmed(queue)
            number = self._best(job)
            queue.remove(job)
            if not self._endless:
                self._left &= ~(1 << number)
            self._shares.add(job.user, job.project, Use(running=1))
            given.append((job.id, self._boards[number].name))
        return given

    def _next(self) -> deque[Waiting] | None:
        """The jobs of the project whose turn it is."""
        heads = [(rank, queue) for rank, heap in self._heaps.items() if (queue := self._first(heap))]
        return max(heads, key=lambda one: self._urgency(*one), default=(0, None))[1]

    def _first(self, heap: list[tuple[_Turn, deque[Waiting]]]) -> deque[Waiting] | None:
        """Of a class: the jobs of the project whose turn it is."""
        while heap:
            turn, queue = heap[0]
            while queue and not self._mask(queue[0]) & self._left:
                queue.popleft()
            if not queue:
                heapq.heappop(heap)
            elif turn == (now := self._turn(queue[0])):
                return queue
            else:
                heapq.heapreplace(heap, (now, queue))
        return None

    def _turn(self, job: Waiting) -> _Turn:
        """When it is a job's turn in its class: less is sooner."""
        return (*self._shares.of(job), *_age(job))

    def _urgency(self, rank: int, queue: deque[Waiting]) -> tuple[float, ...]:
        """Of a class's next job: the highest class, then the least share, then who has waited longest, all told."""
        job = queue[0]
        aged = min(rank + job.waits_s // self._aging_s, _HIGHEST)
        return (aged, *(-one for one in self._shares.of(job)), rank * self._aging_s + job.waits_s, -job.id)

    def _warmed(self, queue: deque[Waiting]) -> Waiting:
        """The first job, or one behind it that is warm on a board which the first would have had cold."""
        first = queue[0]
        could = self._mask(first) & self._left
        if first.waits_s >= self._aging_s or could & self._warm.get(first.affinity, 0):
            return first
        behind = (job for job in islice(queue, _LOOK) if self._mask(job) & could & self._warm.get(job.affinity, 0))
        return next(behind, first)

    def _best(self, job: Waiting) -> int:
        """The board that a job gets."""
        warm = self._warm.get(job.affinity, 0)
        free = _bits(self._mask(job) & self._left)
        return min(free, key=lambda number: (self._wanted[number], not warm >> number & 1, number))

    def _mask(self, job: Waiting) -> int:
        """The boards that will do for a job."""
        key = (job.selector, job.board, job.avoid)
        if key not in self._masks:
            mask = self._matches(job.selector)
            for number in _bits(mask):
                name = self._boards[number].name
                if name in job.avoid or job.board not in ("", name):
                    mask &= ~(1 << number)
            self._masks[key] = mask
        return self._masks[key]

    def _matches(self, text: str) -> int:
        if text not in self._matching:
            selector = parse(text)
            found = [number for number, board in enumerate(self._boards) if selector.matches(board.labels)]
            self._matching[text] = sum(1 << number for number in found)
        return self._matching[text]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def after_attempt(
    result: JobResult, kind: Kind, attempts: int, max_attempts: int, *, held: bool = False
) -> JobResult | None:
    """A job's final result after an attempt; None where it goes back to the queue. A lease whose holder had (``held``)
    the board does not: another board would be a surprise.
    """
    if not result.infrastructure or kind is Kind.HEALTH or held:
        return result
    if attempts < max_attempts:
        return None
    reason = f"{result.reason or 'the infrastructure failed'} (attempt {attempts} of {max_attempts})"
    return replace(result, reason=reason)


@dataclass(frozen=True)
class BoardRow:
    """A board, as far as matching goes."""

    name: str
    labels: Mapping[str, Any]  # with its name, site, host and kind of hardware among them
    state: BoardState
    held: bool  # whether nothing new may begin on it
    attended: bool  # whether its worker is heard of
    busy: bool  # whether a lease on it is not over
    unchecked: bool  # whether nothing is known of its health for long
    warm: frozenset[str]

    @property
    def may_serve(self) -> bool:
        """Whether jobs may have it, now or as soon as it is free and checked."""
        return self.attended and not self.held and self.state in (BoardState.ONLINE, BoardState.SUSPECT)

    @property
    def free(self) -> Free | None:
        """The board as one that is free, be it for health jobs alone; None where it is not."""
        if self.busy or self.held or not self.attended or self.state is BoardState.OFFLINE:
            return None
        healthy = self.state is BoardState.ONLINE and not self.unchecked
        return Free(self.name, self.labels, self.warm, health_only=not healthy)

    @property
    def doubtful(self) -> bool:
        """Whether it is free and thought to be healthy, but nobody has looked for long."""
        return self.free is not None and self.state is BoardState.ONLINE and self.unchecked


def unrunnable(jobs: Iterable[Mapping[str, Any]], boards: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Find the queued jobs that no board can run, and why: all that match failed their checks again and again.

    A board that is offline or held back may come back at any moment, so it counts as no reason: ``boards`` has none.
    """

    @functools.cache
    def reason(selector: str, pinned: str) -> str:
        wanted = parse(selector)
        fit = [one for one in boards if pinned in ("", one["name"]) and wanted.matches(one["labels"])]
        failed = [one for one in fit if one["state"] == BoardState.QUARANTINED.value and one["failures"] >= GIVEN_UP]
        return "; ".join(f"{one['name']}: {one['reason']}" for one in failed[:3]) if len(failed) == len(fit) else ""

    reasons = {job["name"]: reason(job["selector"], job["pinned"]) for job in jobs}
    return {name: why for name, why in reasons.items() if why}
