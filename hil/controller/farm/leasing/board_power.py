"""Power actions of users on boards: who may do them, and the board's state before and after.

While the host works on a free board, the board is drained, so that no job starts. Afterwards, a check runs before the
next job. A board that was switched off stays drained until somebody switches it on.
"""

from __future__ import annotations

from dataclasses import dataclass

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing import transitions
from hil.controller.farm.leasing.allocator import grant_boards
from hil.controller.farm.leasing.boards import get_board_state
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.messages import POWER_ACTIONS, Principal, Right, Role
from hil.controller.farm.scheduler import health
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.board_access import check_board_access
from hil.controller.farm.store.event_log import note_board
from hil.controller.farm.store.records import LEASES, fetch_rows, make_storable, read_access, serialize_calls
from hil.errors import AccessRefused, FarmError, UsageError

OFF = "off"
_OFF_REASON = "switched off by "
_BOARD = "select worker, hold, hold_reason, card from hil.boards where name = %s for update"
_LEASE = f"""
    select lease.id, submission.user_name as user, job.kind from {LEASES}
    where lease.board = %s and lease.ended_at is null
"""
_HOLD = "update hil.boards set hold = 'draining', hold_reason = %s where name = %s"
_FREE = "update hil.boards set hold = '', hold_reason = '' where name = %s and hold_reason = any(%s) returning name"


@dataclass(frozen=True)
class PowerRequest:
    """Power action that the host may do now."""

    board: str
    action: str
    user: str
    lease: int  # lease of the requesting user; 0 if the board is free
    force: bool  # True if the board may have any lease
    reason: str  # reason for which the board is drained during the action
    drained: bool  # True if this request drained the board


@serialize_calls
async def begin_power_action(tx: Tx, who: Principal, name: str, action: str) -> PowerRequest:
    """Check that a user may switch a board's power, and drain a free board.

    Raises:
        AccessRefused: the user lacks the right, or a different user has the board.
        FarmError: the board is offline, or is being checked.
        UsageError: the board does not exist, or the host cannot do the action.
    """
    if action not in POWER_ACTIONS:
        raise UsageError(f"unknown power action {action[:50]!r}", hint=f"expected one of {', '.join(POWER_ACTIONS)}")
    if not who.has_right(Right.POWER):
        raise AccessRefused(
            f"permission denied for {who.user}: the token lacks the right {Right.POWER.value}",
            hint=f"an admin creates such a token: hil farm token add {who.user} --role submitter --right power",
        )
    await get_board_state(tx, name)
    [board] = await fetch_rows(tx, _BOARD, [name])
    check_board_access(who, name, read_access(board["card"].get("access")))
    _check_host(name, action, board["worker"], board["card"].get("power", []))
    leases = await fetch_rows(tx, _LEASE, [name])
    is_admin = who.role is Role.ADMIN
    for lease in leases:
        if lease["user"] != who.user and not is_admin:
            _refuse_busy(name, lease["user"], lease["kind"])
    own = next((lease["id"] for lease in leases if lease["user"] == who.user), 0)
    reason = make_storable(f"{_OFF_REASON if action == OFF else f'power {action} by '}{who.user}")
    drained = not board["hold"] and (not leases or action == OFF)
    if drained:
        await tx.execute(_HOLD, [reason, name])
    await note_board(tx, "power", name, f"{action} by {who.user}")
    return PowerRequest(name, action, who.user, own, is_admin, reason, drained)


@serialize_calls
async def end_power_action(
    tx: Tx, queue: LeaseQueue, request: PowerRequest, error: str, settings: FarmSettings
) -> None:
    """Record the end of a power action, and return the board to service.

    A board that was drained for a different reason stays drained.

    Args:
        error: error of the host; "" after success.
    """
    name = request.board
    if error:
        await note_board(tx, "power_failed", name, f"{request.action} by {request.user}: {error}")
    if request.action == OFF and not error:
        return
    [board] = await fetch_rows(tx, "select hold_reason from hil.boards where name = %s", [name])
    # An earlier action may still run, with an equal reason.
    ours = [request.reason] if request.drained else []
    if request.action != OFF and not error and board["hold_reason"].startswith(_OFF_REASON):
        ours.append(board["hold_reason"])
    if await fetch_rows(tx, _FREE, [name, ours]):
        what = health.Event(health.EventKind.INFRASTRUCTURE, request.reason)
        await transitions.change_board(tx, name, what, settings)
        await grant_boards(tx, queue, settings, [name])


def _check_host(name: str, action: str, worker: str, actions: list[str]) -> None:
    if not worker:
        raise FarmError(f"{name} is offline: no host can switch its power", hint="start the board's host")
    if action not in actions:
        known = ", ".join(actions) or "none"
        raise UsageError(
            f"the host of {name} cannot do the power action {action}; available: {known}",
            hint="add the table [power] to the board's config on its host; hosts of older releases have no actions",
        )


def _refuse_busy(name: str, user: str, kind: str) -> None:
    if kind == "health":
        raise FarmError(f"{name} is being checked", hint="retry when the check has ended: hil farm boards")
    raise AccessRefused(f"{name} is used by {user}", hint="wait until the job ends, or ask an admin")
