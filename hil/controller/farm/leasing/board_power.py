"""Power actions and images of users on boards: who may do them, and the board's state before and after.

While the host works on a free board, the board is drained, so that no job starts. Afterwards, a check runs before the
next job. A board that was switched off stays drained until somebody switches it on. A quarantined board with a new
image is checked immediately.
"""

from __future__ import annotations

from dataclasses import dataclass

from hil.controller.farm.database.database import Tx
from hil.controller.farm.leasing import transitions
from hil.controller.farm.leasing.allocator import grant_boards
from hil.controller.farm.leasing.boards import get_board_state
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.messages import POWER_ACTIONS, PROVISION, Kind, Principal, Right, Role
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
    """Power action, or image, that the host may do now."""

    board: str
    action: str  # a power action, or PROVISION
    user: str
    lease: int  # lease of the requesting user; 0 if the board is free
    force: bool  # True if the board may have any lease
    reason: str  # reason for which the board is drained during the action
    drained: bool  # True if this request drained the board
    file: str = ""  # name of the image
    image: str = ""  # digest of the image in the store


@serialize_calls
async def begin_power_action(
    tx: Tx, who: Principal, name: str, action: str, file: str = "", image: str = ""
) -> PowerRequest:
    """Check that a user may switch a board's power, or write an image, and drain a free board.

    Args:
        file: for an image: name of the file.
        image: for an image: digest of the file in the store.

    Raises:
        AccessRefused: the user lacks the right, or a different user has the board.
        FarmError: the board is offline, or is being checked.
        UsageError: the board does not exist, or the host cannot do the action.
    """
    if action not in (*POWER_ACTIONS, PROVISION):
        raise UsageError(f"unknown power action {action[:50]!r}", hint=f"expected one of {', '.join(POWER_ACTIONS)}")
    is_image = action == PROVISION
    right = Right.PROVISION if is_image else Right.POWER
    if not who.has_right(right):
        raise AccessRefused(
            f"permission denied for {who.user}: the token lacks the right {right.value}",
            hint=f"an admin creates such a token: hil farm token add {who.user} --role submitter --right {right.value}",
        )
    await get_board_state(tx, name)
    [board] = await fetch_rows(tx, _BOARD, [name])
    check_board_access(who, name, read_access(board["card"].get("access")))
    if is_image:
        _check_image_host(name, board["worker"], board["card"].get("provisions", False))
    else:
        _check_host(name, action, board["worker"], board["card"].get("power", []))
    leases = await fetch_rows(tx, _LEASE, [name])
    is_admin = who.role is Role.ADMIN
    for lease in leases:
        # A job that waits for a reset can run on another board. An image would change the board under the job.
        if lease["user"] != who.user and (is_image or not is_admin):
            _refuse_busy(name, lease["user"], lease["kind"], is_image=is_image)
        if is_image and lease["kind"] != Kind.LEASE.value:
            raise FarmError(f"{name} runs your job", hint="wait until the job ends, or cancel the job")
    own = next((lease["id"] for lease in leases if lease["user"] == who.user), 0)
    what = f"image {file} by " if is_image else _OFF_REASON if action == OFF else f"power {action} by "
    reason = make_storable(f"{what}{who.user}")
    drained = not board["hold"] and (not leases or action in (OFF, PROVISION))
    if drained:
        await tx.execute(_HOLD, [reason, name])
    what = f"{file} ({image}) by {who.user}" if is_image else f"{action} by {who.user}"
    await note_board(tx, "provision" if is_image else "power", name, what)
    return PowerRequest(name, action, who.user, own, is_admin and not is_image, reason, drained, file, image)


@serialize_calls
async def end_power_action(
    tx: Tx, queue: LeaseQueue, request: PowerRequest, error: str, settings: FarmSettings
) -> None:
    """Record the end of a power action, and return the board to service.

    A board that was drained for a different reason stays drained.

    Args:
        error: error of the host; "" after success.
    """
    name, is_image = request.board, request.action == PROVISION
    if error:
        action = request.file if is_image else request.action
        event = "provision_failed" if is_image else "power_failed"
        await note_board(tx, event, name, f"{action} by {request.user}: {error}")
    elif is_image:
        await note_board(tx, "provisioned", name, f"{request.file} ({request.image}) by {request.user}")
    if request.action == OFF and not error:
        return
    [board] = await fetch_rows(tx, "select hold_reason from hil.boards where name = %s", [name])
    # An earlier action may still run, with an equal reason.
    ours = [request.reason] if request.drained else []
    if request.action != OFF and not error and board["hold_reason"].startswith(_OFF_REASON):
        ours.append(board["hold_reason"])
    is_free = bool(await fetch_rows(tx, _FREE, [name, ours]))
    if is_free or is_image:
        # After an image, earlier checks of a quarantined board do not count.
        kind = health.EventKind.RETRY if is_image else health.EventKind.INFRASTRUCTURE
        await transitions.change_board(tx, name, health.Event(kind, request.reason), settings)
    if is_free:
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


def _check_image_host(name: str, worker: str, provisions: bool) -> None:
    if not worker:
        raise FarmError(f"{name} is offline: no host can write the image", hint="start the board's host")
    if not provisions:
        raise UsageError(
            f"the host of {name} cannot write images",
            hint="add the table [provision] to the board's config on its host; update hosts of older releases",
        )


def _refuse_busy(name: str, user: str, kind: str, *, is_image: bool) -> None:
    if kind == "health":
        raise FarmError(f"{name} is being checked", hint="retry when the check has ended: hil farm boards")
    hint = f"wait for its end: hil farm drain {name} --wait" if is_image else "wait until the job ends, or ask an admin"
    raise AccessRefused(f"{name} is used by {user}", hint=hint)
