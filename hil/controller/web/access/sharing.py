"""Share worker threads between clients, so that a single client cannot use all of them."""

from __future__ import annotations

import asyncio
import weakref

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hil.controller.web.access.connections import EVENTS, MAX_WORKING
from hil.controller.web.access.heavy import HEAVY, MAX_HEAVY_OF_CLIENT
from hil.controller.web.access.peers import find_peer_of

# A browser sends six requests at a time. The remaining threads are for other clients.
MAX_OF_CLIENT = MAX_WORKING - 2


class FairShare:
    """ASGI middleware that processes at most :data:`MAX_OF_CLIENT` requests per client at a time.

    Pages of tensors have a separate limit, so that they do not delay other pages of the client.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns: weakref.WeakValueDictionary[tuple[str, bool], asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request when its client has a free slot."""
        if scope["type"] != "http" or scope["path"] in EVENTS:
            await self._app(scope, receive, send)
            return
        is_heavy = scope["path"] in HEAVY
        turn = self._turns.setdefault(
            (find_peer_of(scope).name, is_heavy), asyncio.Semaphore(MAX_HEAVY_OF_CLIENT if is_heavy else MAX_OF_CLIENT)
        )
        await turn.acquire()
        has_turn = True

        async def send_and_release(message: Message) -> None:
            nonlocal has_turn
            # An event stream stays open without using a thread.
            if has_turn and message["type"] == "http.response.start" and _is_event_stream(message):
                has_turn = False
                turn.release()
            await send(message)

        try:
            await self._app(scope, receive, send_and_release)
        finally:
            if has_turn:
                turn.release()


def _is_event_stream(message: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"])
