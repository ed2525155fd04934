"""Conditions that must hold after a chaos test: pure functions of the database's rows and the agents' journals.

Each function yields violations as text. :mod:`test_farm_chaos_checks` tests the functions with planted violations.
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
    """Session in an agent's journal. A session without an end was interrupted when its agent was killed."""

    fence: int
    begun: int
    ended: int | None = None


@dataclass
class Board:
    """Content of an agent's journal: the sessions in order, and the runs as (what, fence, begin, end)."""

    name: str
    sessions: list[Session] = field(default_factory=list)
    runs: list[tuple[str, int, int, int | None]] = field(default_factory=list)


def read_journal(store: Path) -> list[Event]:
    """Return the lines of an agent's journal, the older file first. An incomplete last line is ignored."""
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
    """Return the sessions and runs of a journal. The open sessions of a killed agent end when the next agent starts."""
    board = Board(name)
    open_runs: dict[tuple[int, str], int] = {}
    for event in events:
        what, at, fence = str(event["what"]), int(event["at_ns"]), int(event.get("fence", 0))
        if what == "agent started":
            # The workers died with the agent, so no run of the earlier agent continues.
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
    """Yield violations on a board: two jobs at the same time, or a job outside of its fence."""
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
    """Yield leases that overlap, sessions without a lease, and results of leases that never used their board.

    Args:
        leases: rows with board, fence, job, kind, granted_at and ended_at (seconds), and counted (the lease gave the
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
        # A health check can end because the board does not respond.
        ran = lease["counted"] and lease["kind"] != "health"
        if ran and (lease["board"], lease["fence"]) not in seen:
            yield f"{lease['board']}: job {lease['job']} has a result, and never had it by {lease['fence']}"
    for name, board in boards.items():
        for session in board.sessions:
            if (name, session.fence) not in fences:
                yield f"{name}: a session with fence {session.fence}, which no lease has"


def result_violations(jobs: Sequence[Row], expected: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    """Yield jobs without exactly one final result, and jobs with a wrong result.

    Args:
        jobs: rows with name, state, results (number of results), exit_code, outcome, reason.
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
    """Yield jobs that continued after their result, and jobs that were repeated although an attempt gave a result.

    Args:
        leases: rows with job (its name), fence, granted_at, reason and counted (its report became the result).
        final: names of the jobs whose result is from a lease.
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
