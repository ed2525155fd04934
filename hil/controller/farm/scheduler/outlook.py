"""When it is a waiting job's turn, and why it waits: pure, and by the same rule as boards are given."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hil.controller.farm.messages import BoardState
from hil.controller.farm.scheduler.policy import BoardRow, Free, Use, Waiting, turns
from hil.controller.farm.selector import nearest, parse

# Of boards of which the same is to be said so many are named.
_NAMED = 3


@dataclass(frozen=True)
class Outlook:
    """What a waiting job can expect."""

    job: int
    position: int  # among the jobs that wait for any of the same boards, from 1; 0 where no board is like that
    why: str


def outlooks(
    waiting: Sequence[Waiting],
    boards: Sequence[BoardRow],
    use: Mapping[tuple[str, str], Use],
    aging_s: float,
    most: int,
) -> list[Outlook]:
    """The waiting jobs in the order of their turns, at most so many; those that no board will ever do for come last.

    Args:
        use: of each user and project that has or had boards.
        aging_s: a job counts as one class higher each time it has waited for so long.
    """

    @functools.cache
    def fitting(selector: str, pinned: str) -> frozenset[str]:
        wanted = parse(selector)
        return frozenset(one.name for one in boards if pinned in ("", one.name) and wanted.matches(one.labels))

    by_id = {job.id: job for job in waiting}
    order = turns(waiting, [Free(one.name, one.labels, one.warm) for one in boards], use, aging_s)
    before: Counter[frozenset[str]] = Counter()
    found = []
    for job in (by_id[number] for number in order[:most]):
        fit = fitting(job.selector, job.board)
        ahead = sum(count for others, count in before.items() if others & fit)
        found.append(Outlook(job.id, ahead + 1, why_waiting(job, [one for one in boards if one.name in fit], ahead)))
        before[fit] += 1
    named = set(order)
    hopeless = [job for job in waiting if job.id not in named][: most - len(found)]
    return found + [Outlook(job.id, 0, _no_board(job, boards)) for job in hopeless]


def why_waiting(job: Waiting, boards: Sequence[BoardRow], ahead: int) -> str:
    """Why a job has none of the boards that it may have, in a line.

    Args:
        ahead: how many jobs that wait for any of them come before it.
    """
    states: dict[str, list[str]] = {}
    for one in boards:
        states.setdefault(_state(job, one), []).append(one.name)
    said = [f"{_names(names)} {state if len(names) == 1 else _PLURAL[state]}" for state, names in states.items()]
    jobs = f"{ahead} {'job comes' if ahead == 1 else 'jobs come'} before it"
    return "; ".join([*said, *([jobs] if ahead else [])])


_PLURAL = {
    "is busy": "are busy",
    "is free": "are free",
    "is held back": "are held back",
    "is offline": "are offline",
    "is quarantined": "are quarantined",
    "is to be checked first": "are to be checked first",
    "failed it before": "failed it before",
}


def _state(job: Waiting, board: BoardRow) -> str:
    if not board.attended or board.state is BoardState.OFFLINE:
        return "is offline"
    if board.held:
        return "is held back"
    if board.state is BoardState.QUARANTINED:
        return "is quarantined"
    if board.name in job.avoid:
        return "failed it before"
    if board.busy:
        return "is busy"
    return "is to be checked first" if board.state is BoardState.SUSPECT or board.unchecked else "is free"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _no_board(job: Waiting, boards: Sequence[BoardRow]) -> str:
    if job.board and all(one.name != job.board for one in boards):
        return f"the farm has no board {job.board}"
    close = nearest(parse(job.selector), {one.name: one.labels for one in boards if job.board in ("", one.name)})
    return "; ".join(["no board is like that", *(f"{name}: {', '.join(misses)}" for name, misses in close if misses)])
