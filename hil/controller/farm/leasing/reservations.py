"""Reservations: a board that only one user can use for some time in the future.

Some time before the start (``reserve_lead_s``), the board starts no jobs of other users. A job that still runs at the
start keeps the board up to its end.
"""

from __future__ import annotations

import math
import time
from datetime import datetime, timezone

from hil.controller.farm.database.database import Tx
from hil.controller.farm.messages import BoardState, Principal, Role
from hil.controller.farm.scheduler.candidates import BoardRow
from hil.controller.farm.selector import parse
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.event_log import note_board
from hil.controller.farm.store.records import fetch_rows, make_storable, read_board_rows, serialize_calls
from hil.controller.records.lab.farm import FarmReservation
from hil.errors import AccessRefused, FarmError, NoSuchBoard, UsageError

_MAX_DAYS, _MAX_OF_USER = 60, 20
_MIN_SECONDS = 60.0
_DAY_SECONDS = 86400.0
# Maximum age of the start: a reservation may begin now.
_LATE_SECONDS = 60.0
_TAKEN = """
    select board from hil.reservations where begins_at < to_timestamp(%(end)s) and ends_at > to_timestamp(%(begin)s)
"""
_LATER = "select board, count(*) as many from hil.reservations where ends_at > clock_timestamp() group by board"
_OWN = "select count(*) as many from hil.reservations where user_name = %s and ends_at > clock_timestamp()"
_INSERT = """
    insert into hil.reservations (user_name, project, board, begins_at, ends_at)
    values (%(user)s, %(project)s, %(board)s, to_timestamp(%(begin)s), to_timestamp(%(end)s)) returning id
"""
_LIST = """
    select id, user_name as "user", project, board, begins_at, ends_at from hil.reservations
    where ends_at > clock_timestamp() order by begins_at, id
"""


@serialize_calls
async def reserve(
    tx: Tx, who: Principal, selector: str, begin: float, seconds: float, settings: FarmSettings
) -> FarmReservation:
    """Reserve a matching board that is not reserved in this time. Prefers boards in service.

    Args:
        begin: start in seconds since the epoch.
        seconds: duration.

    Raises:
        UsageError: the time is invalid, or exceeds the user's limit.
        NoSuchBoard: no board of the farm matches.
        FarmError: all matching boards are reserved, or the user has too many reservations.
    """
    _check_time(who, begin, seconds, settings)
    wanted = parse(selector)
    boards = [one for one in await read_board_rows(tx, settings) if wanted.matches(one.labels)]
    if not boards:
        raise NoSuchBoard(f"no board matches {selector!r}", hint="hil farm boards lists all boards")
    boards = [one for one in boards if one.access.allows(who.user, who.board_groups)]
    if not boards:
        raise AccessRefused(
            f"permission denied for {who.user}: all boards that match {selector!r} are restricted",
            hint="hil farm access shows which boards you may use",
        )
    [own] = await fetch_rows(tx, _OWN, [who.user])
    if own["many"] >= _MAX_OF_USER:
        raise FarmError(
            f"{who.user} already has {_MAX_OF_USER} reservations", hint="cancel one: hil farm reservations --cancel ID"
        )
    times = {"begin": begin, "end": begin + seconds}
    taken = {row["board"] for row in await fetch_rows(tx, _TAKEN, times)}
    free = [one for one in boards if one.name not in taken]
    if not free:
        raise FarmError(
            "the only matching board is reserved in this time"
            if len(boards) == 1
            else f"all {len(boards)} matching boards are reserved in this time",
            hint="hil farm reservations lists the times",
        )
    many = {row["board"]: row["many"] for row in await fetch_rows(tx, _LATER)}
    board = min(free, key=lambda one: (not _is_in_service(one), many.get(one.name, 0), one.name))
    [made] = await fetch_rows(tx, _INSERT, {"user": who.user, "project": who.project, "board": board.name, **times})
    span = f"from {_format_time(begin)} to {_format_time(begin + seconds)}"
    await note_board(tx, "reserved", board.name, make_storable(f"by {who.user} {span}"))
    return FarmReservation(
        id=made["id"],
        user=who.user,
        project=who.project,
        board=board.name,
        begins_at=_to_text(begin),
        ends_at=_to_text(begin + seconds),
    )


@serialize_calls
async def cancel_reservation(tx: Tx, who: Principal, number: int) -> str:
    """Delete a reservation and return its board. Raises UsageError or AccessRefused."""
    query = "select user_name, board from hil.reservations where id = %s and ends_at > clock_timestamp() for update"
    rows = await fetch_rows(tx, query, [number])
    if not rows:
        raise UsageError(f"reservation {number} not found", hint="hil farm reservations lists all reservations")
    if rows[0]["user_name"] != who.user and who.role is not Role.ADMIN:
        raise AccessRefused(
            f"reservation {number} belongs to {rows[0]['user_name']}", hint="only its owner or an admin can cancel it"
        )
    await tx.execute("delete from hil.reservations where id = %s", [number])
    board = str(rows[0]["board"])
    await note_board(tx, "unreserved", board, f"by {who.user}")
    return board


async def list_reservations(tx: Tx) -> list[FarmReservation]:
    """Return the current and future reservations."""
    return [
        FarmReservation(**{**row, "begins_at": row["begins_at"].isoformat(), "ends_at": row["ends_at"].isoformat()})
        for row in await fetch_rows(tx, _LIST)
    ]


def _check_time(who: Principal, begin: float, seconds: float, settings: FarmSettings) -> None:
    now = time.time()
    if not (math.isfinite(begin) and now - _LATE_SECONDS <= begin <= now + _MAX_DAYS * _DAY_SECONDS):
        raise UsageError(f"a reservation must begin in the next {_MAX_DAYS} days")
    longest_s = min(settings.limits.get_limits(who.user).lease_hours * 3600, _MAX_DAYS * _DAY_SECONDS)
    if not (math.isfinite(seconds) and _MIN_SECONDS <= seconds <= longest_s):
        raise UsageError(
            f"a reservation of {who.user} must last from {_MIN_SECONDS:g} s to {longest_s / 3600:.3g} h",
            hint="use --for, or ask an admin for a higher limit",
        )


def _is_in_service(board: BoardRow) -> bool:
    return board.attended and not board.held and board.state in (BoardState.ONLINE, BoardState.SUSPECT)


def _to_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat()


def _format_time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M} UTC"
