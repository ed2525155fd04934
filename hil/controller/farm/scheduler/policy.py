"""Scheduling policy: assign free boards to waiting jobs. Pure and deterministic.

The policy assigns health jobs first. A board that needs a check only receives a health job. The policy assigns the
other boards in rounds:

1. Each class (high, normal, low) selects the next job by fair share. The user with the fewest boards now comes first;
   ties go to the user with the least recent use. The same rule selects a project of this user. The job is the project's
   oldest job.
2. The highest class among these jobs wins. A job moves up one class per ``aging_s`` of waiting, up to high, so that
   high jobs cannot starve other jobs. The user's share breaks ties. Within a class, users are ordered by fair share
   only: a longer wait does not move a job ahead of other users.
3. The job receives the matching board that the fewest other waiting jobs can use. Among equal boards, a board that
   is warm for the job is preferred.

Within a project, a later job may overtake the first job if a board is warm for the later job. This rule ends when the
first job has waited ``aging_s``. A job never receives a board in ``avoid``. Callers leave ``avoid`` empty if no other
board matches.

A job with several boards gets all of them or none. While some of them are busy, other jobs may use the free ones. After
``gather_s`` of waiting, the job keeps matching free boards at its turn, until all of them are free. The turns are the
same as above, so such jobs cannot block each other: the job with the earlier turn gets the board.

After an infrastructure failure, a job is retried on a different board. A wrong result, a compile error or a timeout
is a final result.
"""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from hil.controller.farm.messages import BoardState, JobResult, Kind, Priority
from hil.controller.farm.scheduler.board_matching import iterate_bits, match_requests
from hil.controller.farm.scheduler.candidates import EVERYONE, BoardUse, FreeBoard, WaitingJob
from hil.controller.farm.scheduler.health import GIVEN_UP
from hil.controller.farm.selector import parse
from hil.controller.farm.settings import FarmLimits
from hil.controller.records.lab.farm import FarmJob
from hil.core.results import Outcome

_CLASS = {Priority.LOW: 0, Priority.NORMAL: 1, Priority.HIGH: 2}
_HIGHEST = max(_CLASS.values())
_Turn: TypeAlias = "tuple[float, ...]"
NO_LIMITS = FarmLimits()
# Jobs per project to search for a job with a warm board.
_LOOK = 32


def assign(
    waiting: Sequence[WaitingJob],
    free: Sequence[FreeBoard],
    use: Mapping[tuple[str, str], BoardUse],
    aging_s: float,
    limits: FarmLimits = NO_LIMITS,
    *,
    busy: Sequence[FreeBoard] = (),
    gather_s: float = 0.0,
) -> list[tuple[int, str]]:
    """Assign free boards to waiting jobs. Returns pairs of job and board, most urgent first.

    A job with multiple boards has a pair for each of its boards, in the order of its requests.

    Args:
        use: board use of every user and project.
        aging_s: a job moves up one priority class for every such period of waiting.
        limits: limits of users.
        busy: boards in service with a job. No job keeps a free board unless its other boards are free or busy.
        gather_s: a job with multiple boards that has waited so long keeps free boards.
    """
    given = _assign_health_jobs(waiting, free)
    taken = {board for _, board in given}
    boards = [board for board in free if not board.health_only and board.name not in taken]
    jobs = [job for job in waiting if job.kind is not Kind.HEALTH]
    if not jobs or not boards:
        return given
    gathering = _Gathering(tuple(busy), gather_s)
    return given + _AssignmentRound(jobs, boards, use, aging_s, limits, gathering=gathering).assign_boards()


def order_turns(
    waiting: Sequence[WaitingJob], boards: Sequence[FreeBoard], use: Mapping[tuple[str, str], BoardUse], aging_s: float
) -> list[int]:
    """Return the order in which jobs would be assigned if boards became free right after every assignment.

    The result omits health jobs and jobs without a matching board.
    """
    jobs = [job for job in waiting if job.kind is not Kind.HEALTH]
    turns = _AssignmentRound(jobs, boards, use, aging_s, endless=True).assign_boards()
    return list(dict.fromkeys(job for job, _ in turns))


def _assign_health_jobs(waiting: Iterable[WaitingJob], free: Iterable[FreeBoard]) -> list[tuple[int, str]]:
    names = {board.name for board in free}
    checks: dict[str, int] = {}
    for job in sorted(waiting, key=_make_age_key):
        if job.kind is Kind.HEALTH and job.board in names:
            checks.setdefault(job.board, job.id)
    return [(job, board) for board, job in checks.items()]


def _make_age_key(job: WaitingJob) -> tuple[float, int]:
    return -job.waits_s, job.id


class _Shares:
    """Board use per user and project, updated during assignment."""

    def __init__(self, use: Mapping[tuple[str, str], BoardUse]) -> None:
        self._of: dict[tuple[str, ...], list[float]] = defaultdict(lambda: [0, 0.0])
        for (user, project), had in use.items():
            self.add(user, project, had)

    def add(self, user: str, project: str, had: BoardUse) -> None:
        """Add board use of a user's project."""
        for key in ((user,), (user, project)):
            self._of[key][0] += had.running
            self._of[key][1] += had.board_s

    def count_boards(self, user: str) -> int:
        """Return the number of boards that a user uses."""
        return int(self._of.get((user,), (0, 0.0))[0])

    def of(self, job: WaitingJob) -> tuple[float, ...]:
        """Return the use of the job's user and project as a sort key; less use goes first."""
        return (*self._of.get((job.user,), (0, 0.0)), *self._of.get((job.user, job.project), (0, 0.0)))


@dataclass(frozen=True)
class _Gathering:
    """Terms for jobs with multiple boards."""

    busy: tuple[FreeBoard, ...] = ()
    after_s: float = 0.0


class _AssignmentRound:
    """One round of assignments. With ``endless``, a board becomes free right after every assignment.

    Sets of boards are bit masks: bit N is board N.
    """

    def __init__(
        self,
        jobs: Sequence[WaitingJob],
        boards: Sequence[FreeBoard],
        use: Mapping[tuple[str, str], BoardUse],
        aging_s: float,
        limits: FarmLimits = NO_LIMITS,
        *,
        endless: bool = False,
        gathering: _Gathering = _Gathering(),
    ) -> None:
        self._boards, self._endless, self._limits, self._gathering = boards, endless, limits, gathering
        self._is_reserved = any(board.reserved_by for board in boards)
        self._left = (1 << len(boards)) - 1
        self._aging_s = aging_s
        self._shares = _Shares(use)
        self._masks: dict[tuple[object, ...], int] = {}
        self._is_restricted = any(board.access != EVERYONE for board in boards)
        self._matching: dict[str, int] = {}
        self._warm: dict[str, int] = defaultdict(int)
        for number, board in enumerate(boards):
            for affinity in board.warm:
                self._warm[affinity] |= 1 << number
        queues: dict[tuple[int, str, str], deque[WaitingJob]] = defaultdict(deque)
        self._wanted = [0] * len(boards)
        many: dict[int, int] = defaultdict(int)
        for job in sorted(jobs, key=_make_age_key):
            if mask := self._get_board_mask(job):
                queues[_CLASS[job.priority], job.user, job.project].append(job)
                many[mask] += 1
        for mask, count in many.items():
            for number in iterate_bits(mask):
                self._wanted[number] += count
        # Class -> heap of projects with their jobs, ordered by the last computed sort key. A key can only increase.
        self._heaps: dict[int, list[tuple[_Turn, deque[WaitingJob]]]] = defaultdict(list)
        for (rank, _, _), queue in queues.items():
            heapq.heappush(self._heaps[rank], (self._make_turn_key(queue[0]), queue))

    def assign_boards(self) -> list[tuple[int, str]]:
        """Assign boards while there are boards and matching jobs."""
        given: list[tuple[int, str]] = []
        while self._left and (queue := self._select_queue()):
            job = self._select_job(queue)
            numbers = self._select_boards(job) if job.more else [self._select_board(job)]
            queue.remove(job)
            if not self._endless:
                for number in numbers:
                    self._left &= ~(1 << number)
            if numbers:
                self._shares.add(job.user, job.project, BoardUse(running=len(numbers)))
            given += [(job.id, self._boards[number].name) for number in numbers]
        return given

    def _select_boards(self, job: WaitingJob) -> list[int]:
        """Return the boards of a job with multiple boards, or an empty list if some of them are not free.

        After a long wait, the free ones are kept: other jobs of this round cannot use them.
        """
        if self._shares.count_boards(job.user) + len(job.parts) > self._limits.get_limits(job.user).boards:
            return []
        warm = self._warm.get(job.affinity, 0)
        masks = [self._get_part_mask(part) & self._left for part in job.parts]
        free = sorted(
            iterate_bits(self._left), key=lambda number: (self._wanted[number], not warm >> number & 1, number)
        )
        found = match_requests(masks, free)
        numbers = [number for number in found if number is not None]
        if len(numbers) == len(masks):
            return numbers
        if job.waits_s >= self._gathering.after_s and job.matches_all(self._list_obtainable(job)):
            for number in numbers:
                self._left &= ~(1 << number)
        return []

    def _list_obtainable(self, job: WaitingJob) -> list[FreeBoard]:
        """Return the boards that a job can get, now or when they are free."""
        return [one for one in (*self._boards, *self._gathering.busy) if job.takes(one)]

    def _select_queue(self) -> deque[WaitingJob] | None:
        """Return the jobs of the project with the next turn."""
        heads = [(rank, queue) for rank, heap in self._heaps.items() if (queue := self._select_class_queue(heap))]
        return max(heads, key=lambda one: self._make_urgency_key(*one), default=(0, None))[1]

    def _select_class_queue(self, heap: list[tuple[_Turn, deque[WaitingJob]]]) -> deque[WaitingJob] | None:
        """Return the jobs of the class's project with the next turn."""
        while heap:
            turn, queue = heap[0]
            if queue and self._has_reached_limit(queue[0].user):
                queue.clear()
            while queue and not self._get_board_mask(queue[0]) & self._left:
                queue.popleft()
            if not queue:
                heapq.heappop(heap)
            elif turn == (now := self._make_turn_key(queue[0])):
                return queue
            else:
                heapq.heapreplace(heap, (now, queue))
        return None

    def _has_reached_limit(self, user: str) -> bool:
        return self._shares.count_boards(user) >= self._limits.get_limits(user).boards

    def _make_turn_key(self, job: WaitingJob) -> _Turn:
        """Return the sort key of a job within the class. The job with the smallest key is next."""
        return (*self._shares.of(job), *_make_age_key(job))

    def _make_urgency_key(self, rank: int, queue: deque[WaitingJob]) -> tuple[float, ...]:
        """Return the urgency of a class's next job as a sort key: class after aging, then share, then waiting time."""
        job = queue[0]
        aged = min(rank + job.waits_s // self._aging_s, _HIGHEST)
        return (aged, *(-one for one in self._shares.of(job)), rank * self._aging_s + job.waits_s, -job.id)

    def _select_job(self, queue: deque[WaitingJob]) -> WaitingJob:
        """Return the first job, or a later job if a board has cached data only for the later job."""
        first = queue[0]
        could = self._get_board_mask(first) & self._left
        if first.waits_s >= self._aging_s or could & self._warm.get(first.affinity, 0):
            return first
        behind = (
            job for job in islice(queue, _LOOK) if self._get_board_mask(job) & could & self._warm.get(job.affinity, 0)
        )
        return next(behind, first)

    def _select_board(self, job: WaitingJob) -> int:
        """Return the number of the best board for a job."""
        warm = self._warm.get(job.affinity, 0)
        free = iterate_bits(self._get_board_mask(job) & self._left)
        return min(free, key=lambda number: (self._wanted[number], not warm >> number & 1, number))

    def _get_board_mask(self, job: WaitingJob) -> int:
        """Return the boards that match a job, as a bit mask."""
        if not job.more:
            return self._get_part_mask(job)
        mask = 0
        for part in job.parts:
            mask |= self._get_part_mask(part)
        return mask

    def _get_part_mask(self, job: WaitingJob) -> int:
        """Return the boards that match a job with one board."""
        owner = job.user if self._is_reserved or self._is_restricted else ""
        key = (job.selector, job.board, job.avoid, owner, job.groups if self._is_restricted else frozenset())
        if key not in self._masks:
            mask = self._get_selector_mask(job.selector)
            for number in iterate_bits(mask):
                board = self._boards[number]
                if not (
                    board.name not in job.avoid
                    and job.board in ("", board.name)
                    and board.reserved_by in ("", job.user)
                    and board.access.allows(job.user, job.groups)
                ):
                    mask &= ~(1 << number)
            self._masks[key] = mask
        return self._masks[key]

    def _get_selector_mask(self, text: str) -> int:
        if text not in self._matching:
            selector = parse(text)
            found = [number for number, board in enumerate(self._boards) if selector.matches(board.labels)]
            self._matching[text] = sum(1 << number for number in found)
        return self._matching[text]


def decide_after_attempt(
    result: JobResult,
    kind: Kind,
    attempts: int,
    max_attempts: int,
    *,
    held: bool = False,
    others: bool = False,
    interrupted: bool = False,
) -> JobResult | None:
    """Return a job's final result after an attempt, or None to retry.

    A lease that was in use (``held``) is not retried: the holder does not expect a different board.

    Args:
        others: True if other matching boards exist on which the job has not failed. ``BOARD_UNFIT`` results then do not
            count as attempts.
        interrupted: True if an operator stopped the board's host. The attempt then does not count, except for a
            command, which may have changed something.
    """
    if not result.infrastructure or kind is Kind.HEALTH or held:
        return result
    if interrupted and kind is not Kind.COMMAND:
        return None
    if attempts < max_attempts or (others and result.outcome == Outcome.BOARD_UNFIT.value):
        return None
    reason = f"{result.reason or 'infrastructure failure'} (attempt {attempts} of {max_attempts})"
    return result.replace(reason=reason)


def find_unrunnable(jobs: Iterable[FarmJob], boards: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return job -> reason, for queued jobs whose matching boards have all failed their checks repeatedly.

    Args:
        boards: boards in service. Offline and drained boards are left out, because they may return at any time.
    """

    @functools.cache
    def find_reason(selector: str, pinned: str) -> str:
        wanted = parse(selector)
        fit = [one for one in boards if pinned in ("", one["name"]) and wanted.matches(one["labels"])]
        failed = [one for one in fit if one["state"] == BoardState.QUARANTINED.value and one["failures"] >= GIVEN_UP]
        return "; ".join(f"{one['name']}: {one['reason']}" for one in failed[:3]) if len(failed) == len(fit) else ""

    reasons = {}
    for job in jobs:
        requests = [(job.selector, job.pinned), *((one.selector, one.board) for one in job.more)]
        reasons[job.name] = next(filter(None, (find_reason(*request) for request in requests)), "")
    return {name: why for name, why in reasons.items() if why}
