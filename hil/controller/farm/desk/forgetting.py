"""Boards that no host presents any more, and never will: the farm forgets them, and nothing waits for them."""

from __future__ import annotations

from collections.abc import Sequence

from hil.controller.farm.desk.boards import known_board
from hil.controller.farm.desk.database import Tx
from hil.controller.farm.desk.matching import Lane, board_rows
from hil.controller.farm.desk.notes import note_board
from hil.controller.farm.desk.queueing import finish
from hil.controller.farm.desk.rows import JobRow, alone, fetched
from hil.controller.farm.terms import Terms
from hil.controller.farm.words import MOST_FENCE, Bearer, Result
from hil.errors import EXIT_BOARD, UsageError

# One that is presented again is new: nothing is known of its health, and nobody holds it back.
_FORGET = """
    update hil.boards
    set forgotten = true, hold = '', reason = '', failures = 0, checked_at = null, check_at = null, warm = '{}',
        fence = case when fence >= 0 then fence else coalesce(
            (select max(lease.fence) from hil.leases as lease where lease.board = name and lease.fence < %(most)s), 0)
        end
    where name = any(%(names)s)
    returning name, fence, (select before.fence from hil.boards as before where before.name = boards.name) as was
"""
_OWNER = "select host from hil.boards where name = %s and worker <> ''"
_ABSENT = """
    select name from hil.boards
    where state = 'offline' and hold = '' and worker = '' and not forgotten
        and coalesce(owned_until, added_at) < clock_timestamp() - make_interval(secs => %s)
    order by name
"""
_LANES = """
    select distinct on (job.lane) job.lane, job.kind, job.avoid, submission.user_name, submission.project,
        submission.priority, submission.selector, submission.board
    from hil.jobs as job join hil.submissions as submission on submission.id = job.submission
    where job.state = 'queued' order by job.lane
"""
_JOBS = """
    select job.id, job.submission, job.number, job.kind, job.state, job.attempts, job.affinity, job.avoid,
        submission.jobs, submission.user_name, submission.project, submission.board as pinned, submission.max_attempts
    from hil.jobs as job join hil.submissions as submission on submission.id = job.submission
    where job.state = 'queued' and job.lane = any(%s) order by job.id
"""


@alone
async def forget(tx: Tx, who: Bearer, name: str, terms: Terms) -> list[str]:
    """Forget a board; jobs that only it would have done have ended, and their names are returned.

    Raises:
        UsageError: there is no such board, or a host presents it.
    """
    await known_board(tx, name)
    if owners := await fetched(tx, _OWNER, [name]):
        raise UsageError(
            f"{name} is not gone: {owners[0]['host']} presents it", hint="end that host first, or hil farm drain it"
        )
    return await _forget(tx, [name], f"by {who.user}", terms)


@alone
async def forget_absent(tx: Tx, absent_s: float, terms: Terms) -> list[str]:
    """Forget the boards that no host has presented for so long, but for those that somebody drained; their names."""
    names = [row["name"] for row in await fetched(tx, _ABSENT, [absent_s])]
    if names:
        await _forget(tx, names, "no host presents it any more", terms)
    return names


async def _forget(tx: Tx, names: Sequence[str], reason: str, terms: Terms) -> list[str]:
    gone = await board_rows(tx, terms, names)
    for row in await fetched(tx, _FORGET, {"names": list(names), "most": MOST_FENCE}):
        mended = f"; its fence made no sense, and goes on after {row['fence']}" if row["was"] < 0 else ""
        await note_board(tx, "forgotten", row["name"], f"{reason}{mended}")
    left = await board_rows(tx, terms)
    lanes = [Lane.of(row) for row in await fetched(tx, _LANES)]
    lost = [
        lane.lane
        for lane in lanes
        if any(lane.matches(one.name, one.labels) for one in gone)
        and not any(lane.matches(one.name, one.labels) for one in left)
    ]
    ended = [JobRow.of(row, row["id"]) for row in await fetched(tx, _JOBS, [lost])]
    what = f"no board of the farm would do any more, since it forgot {', '.join(names)}"
    for job in ended:
        await finish(tx, job, Result(EXIT_BOARD, "BOARD_LOST", what, infrastructure=True))
    return [job.name for job in ended]
