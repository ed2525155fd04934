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

Whether a job that ended on a board is tried on another. Pure.

Only the infrastructure's failures are: a wrong answer, a compile error or a time-out is what the job was run to learn.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeAlias

from hil.controller.farm.messages import BoardState, JobResult, Kind, Priority, Submission
from hil.controller.farm.scheduler.health import GIVEN_UP
from hil.controller.farm.selector import parse

_CLASS = {Priority.LOW: 0, Priority.NORMAL: 1, Priority.HIGH: 2}
_HIGHEST = max(_CLASS.values())
_Turn: TypeAlias = "tuple[float, ...]"
# How far behind the first of a project's jobs one is looked for that a board is warm for.
_LOOK = 32


@dataclass(frozen=True)
class Waiting:
    """A queued job."""

    id: int
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
    """Give free boards to waiting jobs.

    Args:
        use: of each user and project that has or had boards.
        aging_s: a job counts as one class higher each time it has waited for so long.

    Returns:
        Job and board, the most urgent first: no job and no board twice.
    """
    given = _health(waiting, free)
    taken = {board for _, board in given}
    boards = [board for board in free if not board.health_only and board.name not in taken]
    jobs = [job for job in waiting if job.kind is not Kind.HEALTH]
    return given + (_Round(jobs, boards, use, aging_s).grants() if jobs and boards else [])


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
            self._add(user, project, had)

    def _add(self, user: str, project: str, had: Use) -> None:
        for key in ((user,), (user, project)):
            self._of[key][0] += had.running
            self._of[key][1] += had.board_s

    def give(self, job: Waiting) -> None:
        """A job has been given a board."""
        self._add(job.user, job.project, Use(running=1))

    def of(self, *who: str) -> tuple[float, ...]:
        """Of a user, or of a user's project: the less, the sooner it is its turn."""
        return tuple(self._of.get(who, (0, 0.0)))


class _Round:
    """One giving away of boards. Sets of boards are bits of an int: bit N is board N."""

    def __init__(
        self, jobs: Sequence[Waiting], boards: Sequence[Free], use: Mapping[tuple[str, str], Use], aging_s: float
    ) -> None:
        self._boards = boards
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
            self._left &= ~(1 << number)
            self._shares.give(job)
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
        return (*self._shares.of(job.user), *self._shares.of(job.user, job.project), *_age(job))

    def _urgency(self, rank: int, queue: deque[Waiting]) -> tuple[float, ...]:
        """Of a class's next job: the highest class, then the least share, then who has waited longest, all told."""
        job = queue[0]
        aged = min(rank + job.waits_s // self._aging_s, _HIGHEST)
        share = (*self._shares.of(job.user), *self._shares.of(job.user, job.project))
        return (aged, *(-one for one in share), rank * self._aging_s + job.waits_s, -job.id)

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


@dataclass(frozen=True)
class Retry:
    """The job goes back to the queue."""

    reason: str  # what failed, for its row and its event


@dataclass(frozen=True)
class Final:
    """The job is over."""

    result: JobResult


def after_attempt(
    result: JobResult, kind: Kind, attempts: int, max_attempts: int, *, held: bool = False
) -> Retry | Final:
    """What becomes of a job after an attempt.

    Args:
        attempts: the attempts so far, this one too.
        held: of a lease: whether its holder had the board already, so that another would be a surprise.
    """
    if not result.infrastructure or kind is Kind.HEALTH or held:
        return Final(result)
    reason = result.reason or "the infrastructure failed"
    if attempts < max_attempts:
        return Retry(reason)
    return Final(replace(result, reason=f"{reason} (attempt {attempts} of {max_attempts})"))


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


@dataclass(frozen=True)
class Lane:
    """What all jobs of a lane have in common."""

    lane: str
    kind: Kind
    user: str
    project: str
    priority: Priority
    selector: str
    board: str
    avoid: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Lane:
        """Of a row of the query that reads the lanes."""
        return cls(
            lane=row["lane"],
            kind=Kind(row["kind"]),
            user=row["user_name"],
            project=row["project"],
            priority=Priority(row["priority"]),
            selector=row["selector"],
            board=row["board"],
            avoid=frozenset(row["avoid"]),
        )

    def matches(self, name: str, labels: Mapping[str, Any]) -> bool:
        """Whether its jobs may ever have this board."""
        return self.board in ("", name) and parse(self.selector).matches(labels)

    def takes(self, free: Free) -> bool:
        """Whether its jobs may have this board now."""
        if (free.health_only and self.kind is not Kind.HEALTH) or free.name in self.avoid:
            return False
        return self.matches(free.name, free.labels)

    def allowed(self, boards: Iterable[BoardRow]) -> Lane:
        """The lane as it is today: its jobs avoid the boards where they failed only while another may serve them."""
        others = (one for one in boards if one.may_serve and one.name not in self.avoid)
        if not self.avoid or any(self.matches(one.name, one.labels) for one in others):
            return self
        return replace(self, avoid=frozenset())

    def waiting(self, id: int, affinity: str, waits_s: float = 0.0) -> Waiting:
        """One of its jobs, as the policy sees it."""
        return Waiting(
            id=id,
            user=self.user,
            project=self.project,
            priority=self.priority,
            waits_s=waits_s,
            selector=self.selector,
            board=self.board,
            avoid=self.avoid,
            affinity=affinity,
            kind=self.kind,
        )


def lane_of(order: Submission, user: str, project: str, lane: str = "") -> Lane:
    """The lane of an order's jobs."""
    return Lane(lane, order.specs[0].kind, user, project, order.priority, order.selector, order.board)


def unrunnable(jobs: Iterable[Mapping[str, Any]], boards: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Find the queued jobs that no board can run: all that match failed their checks again and again.

    A board that is offline or held back may come back at any moment, so it counts as no reason.

    Args:
        jobs: with ``name``, ``selector`` and ``pinned`` (the only board that will do, "" for any).
        boards: with ``name``, ``labels``, ``state``, ``failures`` and ``reason``; neither offline nor held back.

    Returns:
        Name of the job -> why.
    """
    reasons: dict[tuple[str, str], str] = {}
    found = {}
    for job in jobs:
        key = job["selector"], job["pinned"]
        if key not in reasons:
            selector = parse(job["selector"])
            fit = [one for one in boards if job["pinned"] in ("", one["name"]) and selector.matches(one["labels"])]
            failed = [
                one for one in fit if one["state"] == BoardState.QUARANTINED.value and one["failures"] >= GIVEN_UP
            ]
            text = "; ".join(f"{one['name']}: {one['reason']}" for one in failed[:3])
            reasons[key] = text if failed and len(failed) == len(fit) else ""
        if reasons[key]:
            found[job["name"]] = reasons[key]
    return found
