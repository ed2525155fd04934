"""Test the limit of requests per client."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from hil.controller.web.access.peers import PEER, Peer
from hil.controller.web.access.sharing import MAX_OF_CLIENT, FairShare


class App:
    """Send the response headers, then work until released."""

    def __init__(self, kind: bytes) -> None:
        self._kind = kind
        self.at_work = 0
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "headers": [(b"content-type", self._kind)]})
        self.at_work += 1
        try:
            await self.may_end.wait()
        finally:
            self.at_work -= 1


async def _ask(share: FairShare, client: str, path: str = "/") -> None:
    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        pass

    await share({"type": "http", "path": path, PEER: Peer("", client)}, receive, send)


async def _settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("kind", "most"), [(b"text/html", MAX_OF_CLIENT), (b"text/event-stream", 20)])
def test_fair_share_limits_client_requests_except_events(kind: bytes, most: int) -> None:
    async def run() -> None:
        app = App(kind)
        share = FairShare(app)
        many = [asyncio.create_task(_ask(share, "10.0.0.2")) for _ in range(20)]
        await _settled()
        assert app.at_work == most
        events = asyncio.create_task(_ask(share, "10.0.0.2", "/events"))
        await _settled()
        assert app.at_work == most + 1
        events.cancel()
        other = asyncio.create_task(_ask(share, "10.0.0.3"))
        await _settled()
        assert app.at_work == most + 1
        many[0].cancel()
        await _settled()
        # The next request starts.
        assert app.at_work == min(most + 1, 20)
        app.may_end.set()
        await asyncio.gather(*many, other, return_exceptions=True)
        app.may_end.clear()
        again = asyncio.create_task(_ask(share, "10.0.0.2"))
        await _settled()
        assert not again.done()
        app.may_end.set()
        await again

    asyncio.run(run())
