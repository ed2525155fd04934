"""How boards are, written down: what happens to one, what becomes of it, and the checks that follow.

The rule itself is :mod:`hil.controller.farm.scheduler.health`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hil.controller.farm.messages import BoardState, JobResult, JobSpec, JobState, Kind, Priority, Submission
from hil.controller.farm.scheduler import health
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.database import Tx
from hil.controller.farm.store.event_log import note_board
from hil.controller.farm.store.job_repo import FARM, enqueue, finish
from hil.controller.farm.store.records import JobRow, fetched
from hil.errors import EXIT_BOARD

_CHECK_TIMEOUT_S = 600.0

_CHANGE = """
    update hil.boards
    set state = %(state)s, failures = %(failures)s, reason = %(reason)s,
        checked_at = case when %(healthy)s then clock_timestamp() when %(doubted)s then null else checked_at end,
        check_at = clock_timestamp() + make_interval(secs => %(check_in_s)s)
    where name = %(board)s
"""
_UNCHECKED = """
    select name, failures, state from hil.boards as board
    where state in ('suspect', 'quarantined') and hold = '' and worker <> ''
        and (check_at is null or check_at <= clock_timestamp())
        and (%(boards)s::text[] is null or name = any(%(boards)s))
        and not exists (select from hil.jobs where checks = board.name and state in ('queued', 'running'))
"""
_WAITING_CHECK = """
    select job.*, submission.jobs, submission.user_name, submission.project, submission.board as pinned,
        submission.max_attempts
    from hil.jobs as job join hil.submissions as submission on submission.id = job.submission
    where job.checks = %s and job.state = 'queued'
"""


async def change(tx: Tx, board: str, event: health.Event, settings: FarmSettings) -> None:
    """Something happened to a board: note what it is now, and have it checked where that is due."""
    query = "select state, failures, reason from hil.boards where name = %s for update"
    rows = await fetched(tx, query, [board])
    state, failures, reason = BoardState(rows[0]["state"]), rows[0]["failures"], rows[0]["reason"]
    to = health.after(state, failures, event, settings)
    if (to.state, to.failures) != (state, failures) or to.doubted or event.what is health.EventKind.HEALTHY:
        values = {
            "board": board,
            "state": to.state.value,
            "failures": to.failures,
            "reason": "" if to.state is BoardState.ONLINE else to.reason or reason,
            "healthy": event.what is health.EventKind.HEALTHY,
            "doubted": to.doubted,
            "check_in_s": to.check_in_s,
        }
        await tx.execute(_CHANGE, values)
    if to.state is not state or to.failures != failures:
        await note_board(tx, to.state.value, board, to.reason)
    if to.state is BoardState.OFFLINE:
        await call_off_check(tx, board, to.reason)
    await order_checks(tx, [board])


async def order_checks(tx: Tx, boards: Sequence[str] | None = None) -> int:
    """Queue a health job for each board that is to be checked now and has none; returns how many."""
    found = await fetched(tx, _UNCHECKED, {"boards": boards})
    for row in found:
        # Its host may switch the power of a board that failed already.
        options = {"state": row["state"], "failures": row["failures"]}
        order = Submission(
            title=f"check of {row['name']}",
            specs=(JobSpec(Kind.HEALTH, options),),
            board=row["name"],
            priority=Priority.HIGH,
            timeout_s=_CHECK_TIMEOUT_S,
            max_attempts=1,
        )
        await enqueue(tx, order, FARM, "", checks=row["name"])
    return len(found)


async def call_off_check(tx: Tx, board: str, reason: str) -> None:
    """A check that only waits is not waited for: its board is gone."""
    for row in await fetched(tx, _WAITING_CHECK, [board]):
        result = JobResult(EXIT_BOARD, "BOARD_LOST", f"called off: {reason}", infrastructure=True)
        await finish(tx, JobRow.of(row, row["id"]), result, state=JobState.CANCELLED)


async def saw_it_work(tx: Tx, board: str) -> None:
    """A job ran through on an online board: that is as good as a check."""
    await tx.execute(
        "update hil.boards set checked_at = clock_timestamp() where name = %s and state = 'online'", [board]
    )
