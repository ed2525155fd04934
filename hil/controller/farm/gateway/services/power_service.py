"""Action ``power``: ask the board's host to switch the power, and wait for the result."""

from __future__ import annotations

import asyncio
import logging
import secrets

from hil.controller.farm.database.database import DatabaseAway
from hil.controller.farm.database.notifications import AGAIN, Change, drain_queue, publish_change
from hil.controller.farm.gateway.calls import GatewayCall
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.leasing.board_power import PowerRequest, begin_power_action, end_power_action
from hil.controller.farm.messages import BoardState
from hil.controller.farm.store import access, queries
from hil.controller.farm.store.records import fetch_rows
from hil.controller.records.lab.farm import SwitchedPower
from hil.errors import BoardError

_LOG = logging.getLogger("hil.farm.gateway")
# Maximum duration of an action: the config's power commands and the start of the board may take minutes.
LONGEST_SECONDS = 900.0
_LOOK_SECONDS, _AGAIN_SECONDS = 2.0, 1.0
_WORKER = "select worker from hil.boards where name = %s"


async def switch_power(
    context: GatewayContext, call: GatewayCall, name: str, action: str, *, detach: bool
) -> SwitchedPower:
    """Switch a board's power and return the board's state. If the caller disconnects, the action continues.

    Args:
        detach: return before the host has done it.

    Raises:
        AccessRefused, FarmError, UsageError: see :func:`.begin_power_action`.
        BoardError: the host could not do the action.
    """
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[None] = loop.create_future()
    result: asyncio.Future[str] = loop.create_future()
    context.spawn(_PowerAction(context, call, name, action).run(begun, result))
    await asyncio.shield(begun)
    if not detach and (error := await asyncio.shield(result)):
        raise BoardError(f"power {action} failed: {error}", board=name, hint="see hil farm events")
    async with context.db.transaction() as tx:
        states = {board.name: board.state for board in await queries.boards(tx)}
    return SwitchedPower(state=states.get(name, BoardState.OFFLINE.value))


class _PowerAction:
    """Power action from the check of permissions to its end, in a background task."""

    def __init__(self, context: GatewayContext, call: GatewayCall, name: str, action: str) -> None:
        self._context, self._call, self._name, self._action = context, call, name, action
        self._id = secrets.token_hex(8)

    async def run(self, begun: asyncio.Future[None], result: asyncio.Future[str]) -> None:
        """Run the action. Set the futures when the host has the request, and to the host's error ("" for success)."""
        with self._context.pubsub.subscribe() as changes:
            try:
                request, worker = await self._begin()
            except Exception as error:
                begun.set_exception(error)
                return
            begun.set_result(None)
            error_text = await self._wait_for_host(changes, request, worker)
        while True:
            try:
                async with self._context.db.transaction() as tx:
                    await end_power_action(tx, self._context.engine, request, error_text, self._context.settings)
                break
            except DatabaseAway:
                await asyncio.sleep(_AGAIN_SECONDS)
        self._context.dispatch.trigger_check()
        fields = {"board": self._name, "action": self._action, "user": request.user, "error": error_text}
        _LOG.info("power", extra=fields)
        result.set_result(error_text)

    async def _begin(self) -> tuple[PowerRequest, str]:
        """Check the request and send it. Return it with the board's worker."""
        async with self._context.db.transaction() as tx:
            request = await begin_power_action(tx, self._call.who, self._name, self._action)
            detail = {"action": self._action}
            await access.note_audit(tx, self._call.who, f"{self._call.name} power", self._name, True, detail)
            [board] = await fetch_rows(tx, _WORKER, [self._name])
            await publish_change(tx, self._make_message(request))
        return request, board["worker"]

    def _make_message(self, request: PowerRequest) -> Change:
        about = {"id": self._id, "board": self._name, "action": self._action}
        return {"kind": "power", **about, "lease": request.lease, "force": request.force}

    async def _wait_for_host(self, changes: asyncio.Queue[Change], request: PowerRequest, worker: str) -> str:
        """Wait for the host's reply and return its error; "" after success."""
        deadline = asyncio.get_running_loop().time() + LONGEST_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            found = await drain_queue(changes, _LOOK_SECONDS)
            for change in found:
                if change["kind"] == "switched" and change["id"] == self._id:
                    return str(change["error"])
            try:
                async with self._context.db.transaction() as tx:
                    board = await fetch_rows(tx, _WORKER, [self._name])
                    if AGAIN in found:  # the request or the reply may be lost; the host repeats its reply
                        await publish_change(tx, self._make_message(request))
            except DatabaseAway:
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            if not board or board[0]["worker"] != worker:
                return "the host was lost during the action"
        return f"the host did not reply within {LONGEST_SECONDS:g} s"
