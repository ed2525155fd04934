"""Actions ``power`` and ``provision``: ask the board's host for a power action or an image, and wait for the result."""

from __future__ import annotations

import asyncio
import logging
import secrets

from hil.controller.farm.database.database import DatabaseAway
from hil.controller.farm.database.notifications import AGAIN, Change, drain_queue, publish_change
from hil.controller.farm.gateway.calls import GatewayCall
from hil.controller.farm.gateway.context import GatewayContext
from hil.controller.farm.leasing.board_power import PowerRequest, begin_power_action, end_power_action
from hil.controller.farm.messages import PROVISION, BoardState
from hil.controller.farm.rpc import is_image_name
from hil.controller.farm.store import access, queries
from hil.controller.farm.store.records import fetch_rows
from hil.controller.records.lab.farm import ProvisionedBoard, SwitchedPower
from hil.core import digest
from hil.errors import BoardError, FarmError, ProvisionFailed, UsageError

_LOG = logging.getLogger("hil.farm.gateway")
# Maximum duration of an action: the config's power commands and the start of the board may take minutes.
LONGEST_SECONDS = 900.0
# Maximum duration of an image: download, write and boot.
LONGEST_IMAGE_SECONDS = 4 * 3600.0
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
    if action == PROVISION:
        raise UsageError("an image needs the action provision")
    if error := await _PowerAction(context, call, name, action).start(detach=detach):
        raise BoardError(f"power {action} failed: {error}", board=name, hint="see hil farm events")
    return SwitchedPower(state=await _read_state(context, name))


async def write_image(context: GatewayContext, call: GatewayCall, name: str, file: str, image: str) -> ProvisionedBoard:
    """Write an image to a board and return the board's state. If the caller disconnects, the action continues.

    Args:
        file: name of the image, for the host's command and for later records.
        image: digest of the image in the store.

    Raises:
        AccessRefused, FarmError, UsageError: see :func:`.begin_power_action`; or the store lacks the image.
        ProvisionFailed: the host could not write the image, or the board does not respond.
    """
    if not is_image_name(file):
        raise UsageError(f"invalid name of an image: {file[:100]!r}", hint="use at most 200 printable characters")
    if digest.get_algorithm(digest.check(image)) != "sha256":
        raise UsageError(f"the digest of an image must begin with sha256:, got {image[:100]!r}")
    if await asyncio.to_thread(context.store.list_missing, [image]):
        raise FarmError(f"{image} not found in the farm's store", hint="upload the image: hil farm provision")
    if error := await _PowerAction(context, call, name, PROVISION, file, image).start(detach=False):
        raise ProvisionFailed(f"writing {file} failed: {error}", board=name, hint="see hil farm events")
    return ProvisionedBoard(state=await _read_state(context, name))


async def _read_state(context: GatewayContext, name: str) -> str:
    async with context.db.transaction() as tx:
        states = {board.name: board.state for board in await queries.boards(tx)}
    return states.get(name, BoardState.OFFLINE.value)


class _PowerAction:
    """Power action or image, from the check of permissions to its end, in a background task."""

    def __init__(
        self, context: GatewayContext, call: GatewayCall, name: str, action: str, file: str = "", image: str = ""
    ) -> None:
        self._context, self._call, self._name, self._action = context, call, name, action
        self._file, self._image = file, image
        self._longest_s = LONGEST_IMAGE_SECONDS if action == PROVISION else LONGEST_SECONDS
        self._id = secrets.token_hex(8)

    async def start(self, *, detach: bool) -> str:
        """Run the action in the background, and wait for the host's error; "" for success, or with ``detach``.

        Raises the errors of :func:`.begin_power_action`.
        """
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[None] = loop.create_future()
        result: asyncio.Future[str] = loop.create_future()
        self._context.spawn(self.run(begun, result))
        await asyncio.shield(begun)
        return "" if detach else await asyncio.shield(result)

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
        _LOG.info("provision" if self._action == PROVISION else "power", extra=fields)
        result.set_result(error_text)

    async def _begin(self) -> tuple[PowerRequest, str]:
        """Check the request and send it. Return it with the board's worker."""
        async with self._context.db.transaction() as tx:
            request = await begin_power_action(tx, self._call.who, self._name, self._action, self._file, self._image)
            is_image = self._action == PROVISION
            detail = {"file": self._file, "image": self._image} if is_image else {"action": self._action}
            done = f"{self._call.name} {PROVISION if is_image else 'power'}"
            await access.note_audit(tx, self._call.who, done, self._name, True, detail)
            [board] = await fetch_rows(tx, _WORKER, [self._name])
            await publish_change(tx, self._make_message(request))
        return request, board["worker"]

    def _make_message(self, request: PowerRequest) -> Change:
        about = {"id": self._id, "board": self._name, "action": self._action}
        about |= {"file": self._file, "image": self._image}
        return {"kind": "power", **about, "lease": request.lease, "force": request.force}

    async def _wait_for_host(self, changes: asyncio.Queue[Change], request: PowerRequest, worker: str) -> str:
        """Wait for the host's reply and return its error; "" after success."""
        deadline = asyncio.get_running_loop().time() + self._longest_s
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
        return f"the host did not reply within {self._longest_s:g} s"
