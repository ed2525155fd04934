"""Queue positions and waiting reasons of jobs. Pure functions, with the rules of the scheduling policy."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hil.controller.farm.messages import BoardRequest, BoardState, Kind
from hil.controller.farm.scheduler.candidates import BoardRow, BoardUse, FreeBoard, WaitingJob
from hil.controller.farm.scheduler.policy import NO_LIMITS, order_turns
from hil.controller.farm.selector import find_nearest, parse
from hil.controller.farm.settings import FarmLimits
from hil.controller.records.lab.farm import FarmJob
from hil.controller.storage.screen.texts import format_count

# Limits for a reason text: boards per state, drain reasons, and characters per drain reason.
_MAX_LISTED = 3
_HOLD_REASONS, _HOLD_CHARACTERS = 3, 120


@dataclass(frozen=True)
class Outlook:
    """Queue position of a waiting job."""

    job: int
    position: int  # position among jobs that compete for the same boards, from 1; 0: no match
    why: str


def list_outlooks(
    waiting: Sequence[WaitingJob],
    boards: Sequence[BoardRow],
    use: Mapping[tuple[str, str], BoardUse],
    aging_s: float,
    most: int,
    limits: FarmLimits = NO_LIMITS,
) -> list[Outlook]:
    """Return at most ``most`` waiting jobs in scheduling order. Jobs without a matching board are last.

    Args:
        use: board use of every user and project.
        aging_s: a job moves up one priority class for every such period of waiting.
        limits: limits of users.
    """
    used: Counter[str] = Counter()
    for (user, _), had in use.items():
        used[user] += had.running

    fitting: dict[str, frozenset[str]] = {}

    def find_fitting(job: WaitingJob) -> frozenset[str]:
        key = job.lane or str(job.id)
        if key not in fitting:
            fitting[key] = frozenset(one.name for one in boards if job.matches(one))
        return fitting[key]

    by_id = {job.id: job for job in waiting}
    every = [FreeBoard(one.name, one.labels, one.warm, access=one.access) for one in boards]
    order = order_turns(waiting, every, use, aging_s)
    before: Counter[frozenset[str]] = Counter()
    found = []
    for job in (by_id[number] for number in order[:most]):
        fit = find_fitting(job)
        ahead = sum(count for others, count in before.items() if others & fit)
        why = explain_waiting(job, [one for one in boards if one.name in fit], ahead)
        most_boards = limits.get_limits(job.user).boards
        if used[job.user] >= most_boards:
            why = f"{job.user} uses {format_count(used[job.user], 'board')}, the limit is {most_boards:.0f}; {why}"
        found.append(Outlook(job.id, ahead + 1, why))
        before[fit] += 1
    named = set(order)
    hopeless = [job for job in waiting if job.id not in named][: most - len(found)]
    return found + [Outlook(job.id, 0, _explain_no_match(job, boards)) for job in hopeless]


def explain_waiting(job: WaitingJob, boards: Sequence[BoardRow], ahead: int) -> str:
    """Return a line that says why no matching board is available for a job.

    Args:
        ahead: number of earlier jobs that can use any of the boards.
    """
    states: dict[str, list[str]] = {}
    hold_reasons: set[str] = set()
    for one in boards:
        state = _describe_state(job, one)
        if state == _HELD and (one.hold_reason in hold_reasons or len(hold_reasons) < _HOLD_REASONS):
            hold_reasons.add(one.hold_reason)
            state = f"is {one.hold_reason[:_HOLD_CHARACTERS]}"
        states.setdefault(state, []).append(one.name)
    said = [
        f"{_format_names(names)} {state if len(names) == 1 else _make_plural(state)}" for state, names in states.items()
    ]
    jobs = f"{ahead} {'job' if ahead == 1 else 'jobs'} ahead"
    needs = f"needs {len(job.parts)} boards at once" if job.more else ""
    return "; ".join(filter(None, [needs, *said, jobs if ahead else ""]))


def find_blocked(jobs: Iterable[FarmJob], boards: Sequence[BoardRow]) -> dict[str, str]:
    """Return the reason for every queued job whose matching boards are all out of service.

    Args:
        jobs: queued jobs.
        boards: all boards of the farm.
    """

    @functools.cache
    def find_reason(selector: str, pinned: str, more: tuple[tuple[str, str], ...]) -> str:
        others = tuple(BoardRequest(*one) for one in more)
        job = WaitingJob(0, "", selector=selector, board=pinned, more=others, kind=Kind.HEALTH)
        fit = [one for one in boards if job.matches(one)]
        if job.matches_all(one for one in fit if one.may_serve):
            return ""
        return explain_waiting(job, fit, 0) if fit else _explain_no_match(job, boards)

    reasons = {job.name: find_reason(job.selector, job.pinned, _list_more(job)) for job in jobs}
    return {name: why for name, why in reasons.items() if why}


def _list_more(job: FarmJob) -> tuple[tuple[str, str], ...]:
    return tuple((one.selector, one.board) for one in job.more)


_HELD = "is drained"


def _make_plural(state: str) -> str:
    return f"are {state.removeprefix('is ')}" if state.startswith("is ") else state


def _describe_state(job: WaitingJob, board: BoardRow) -> str:
    if board.held:
        return _HELD
    if not board.attended or board.state is BoardState.OFFLINE:
        return "is offline"
    if board.state is BoardState.QUARANTINED:
        return "is quarantined"
    if board.name in job.avoid:
        return "failed this job before"
    if not board.access.allows(job.user, job.groups) and job.kind is not Kind.HEALTH:
        return f"is not open to {job.user}"
    if board.reserved_by not in ("", job.user):
        return f"is reserved for {board.reserved_by}"
    if board.busy:
        return "is busy"
    return "is waiting for a health check" if board.state is BoardState.SUSPECT or board.unchecked else "is free"


def _format_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _explain_no_match(job: WaitingJob, boards: Sequence[BoardRow]) -> str:
    known = {one.name for one in boards}
    if missing := [part.board for part in job.parts if part.board and part.board not in known]:
        return f"board {missing[0]} not found"
    if job.more:
        return f"fewer than {len(job.parts)} boards match the requests"
    close = find_nearest(parse(job.selector), {one.name: one.labels for one in boards if job.board in ("", one.name)})
    return "; ".join(["no board matches", *(f"{name}: {', '.join(misses)}" for name, misses in close if misses)])
