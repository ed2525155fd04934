"""What must hold after a farm was beaten: pure checks over what the database and the agents' own journals say.

Each gives violations, in words; none is what is wanted. :mod:`test_farm_chaos_checks` plants some.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass
class Session:
    """A session as an agent's journal tells it; one without an end was cut off with its agent."""

    fence: int
    begun: int
    ended: int | None = None


@dataclass
class Board:
    """What an agent's journal tells: its sessions in order, and what ran, as (what, fence, begin, end)."""

    name: str
    sessions: list[Session] = field(default_factory=list)
    runs: list[tuple[str, int, int, int | None]] = field(default_factory=list)


def read_journal(store: Path) -> list[Event]:
    """The lines of an agent's journal, the older file first; a last line that was cut off is none."""
    lines: list[Event] = []
    for name in ("journal.jsonl.1", "journal.jsonl"):
        if (store / name).exists():
            for line in (store / name).read_text().splitlines():
                try:
                    lines.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
    return lines


def board_of(name: str, events: Iterable[Event]) -> Board:
    """Sessions and runs out of a journal. What an agent that was killed left open ended before the next one began."""
    board = Board(name)
    open_runs: dict[tuple[int, str], int] = {}
    for event in events:
        what, at, fence = str(event["what"]), int(event["at_ns"]), int(event.get("fence", 0))
        if what == "agent started":
            # Its workers died with it: nothing of the former agent goes on.
            open_runs.clear()
            for session in board.sessions:
                session.ended = session.ended or at
        elif what == "session opened":
            board.sessions.append(Session(fence, at))
        elif what == "session ended":
            for session in reversed(board.sessions):
                if session.fence == fence and session.ended is None:
                    session.ended = at
                    break
        elif what.endswith(" begins"):
            name = what.removesuffix(" begins")
            open_runs[fence, name] = len(board.runs)
            board.runs.append((name, fence, at, None))
        elif what.endswith(" ended") and (fence, what.removesuffix(" ended")) in open_runs:
            number = open_runs.pop((fence, what.removesuffix(" ended")))
            board.runs[number] = (*board.runs[number][:3], at)
    return board


def board_violations(board: Board) -> Iterator[str]:
    """Two jobs at once, or one out of its fence, on one board."""
    highest = 0
    last: Session | None = None
    for session in board.sessions:
        if session.fence < highest:
            yield f"{board.name}: a session with fence {session.fence} after one with {highest}"
        if last is not None and (last.ended is None or last.ended > session.begun):
            yield f"{board.name}: sessions {last.fence} and {session.fence} at once"
        highest, last = max(highest, session.fence), session
    for what, fence, begun, ended in board.runs:
        if not any(
            one.fence == fence and one.begun <= begun and (one.ended is None or begun <= one.ended)
            for one in board.sessions
        ):
            yield f"{board.name}: {what} ran under fence {fence} outside of every session of that fence"
        higher = [one for one in board.sessions if one.fence > fence]
        if any(begun >= one.begun for one in higher):
            yield f"{board.name}: {what} began under fence {fence} when a higher one was there"
        if ended is not None and (beside := max((ended - one.begun for one in higher), default=0)) > 0:
            seconds = f"{beside / 1e9:.3f} s"
            yield f"{board.name}: {what} under fence {fence} went on for {seconds} beside a session of a higher one"


def lease_violations(leases: Sequence[Row], boards: Mapping[str, Board]) -> Iterator[str]:
    """Leases that overlap, sessions that no lease explains, and results of leases that never had their board.

    Args:
        leases: rows with board, fence, job, kind, granted_at and ended_at (seconds), and counted (it gave the
            job's result).
        boards: journals by board.
    """
    by_board: dict[str, list[Row]] = {}
    for lease in leases:
        by_board.setdefault(lease["board"], []).append(lease)
    for name, mine in by_board.items():
        mine.sort(key=lambda lease: lease["fence"])
        for before, after in itertools.pairwise(mine):
            if before["ended_at"] is None or before["ended_at"] > after["granted_at"]:
                yield f"{name}: leases {before['fence']} and {after['fence']} at once"
            if before["fence"] == after["fence"]:
                yield f"{name}: two leases of fence {after['fence']}"
    fences = {(lease["board"], lease["fence"]) for lease in leases}
    seen = {(name, session.fence) for name, board in boards.items() for session in board.sessions}
    for lease in leases:
        # A check may end with that the board did not answer.
        ran = lease["counted"] and lease["kind"] != "health"
        if ran and (lease["board"], lease["fence"]) not in seen:
            yield f"{lease['board']}: job {lease['job']} has a result, and never had it by {lease['fence']}"
    for name, board in boards.items():
        for session in board.sessions:
            if (name, session.fence) not in fences:
                yield f"{name}: a session with fence {session.fence}, which no lease has"


def result_violations(jobs: Sequence[Row], expected: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """A job without its one final result, or with the wrong one.

    Args:
        jobs: rows with name, state, results (how many), exit_code, outcome, reason.
        expected: name -> exit code and outcome.
    """
    names = Counter(job["name"] for job in jobs)
    for name in expected:
        if names[name] != 1:
            yield f"job {name} is there {names[name]} times"
    for job in jobs:
        if job["state"] != "done":
            yield f"job {job['name']} is {job['state']}"
        if job["results"] != 1:
            yield f"job {job['name']} has {job['results']} results"
        elif job["name"] in expected and (job["exit_code"], job["outcome"]) != expected[job["name"]]:
            code, outcome = expected[job["name"]]
            yield (
                f"job {job['name']} ended with {job['exit_code']} {job['outcome']} ({job['reason']}), "
                f"not with {code} {outcome}"
            )


def retry_violations(leases: Sequence[Row], final: Collection[str]) -> Iterator[str]:
    """A job that went on after it had its result, or that was tried again after a result of its own.

    Args:
        leases: rows with job (its name), fence, granted_at, reason and counted (its report became the result).
        final: names of the jobs that have a result which some lease gave.
    """
    by_job: dict[str, list[Row]] = {}
    for lease in leases:
        by_job.setdefault(lease["job"], []).append(lease)
    for name, mine in by_job.items():
        mine.sort(key=lambda lease: lease["granted_at"])
        counted = [lease for lease in mine if lease["counted"]]
        if name in final and len(counted) != 1:
            yield f"job {name}: {len(counted)} leases say that theirs is the result"
        if counted and mine[-1] is not counted[0]:
            yield f"job {name}: it was given a board after its result"
