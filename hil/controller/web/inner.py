"""Ask this server itself, within one request of it: the same checks, no connection, a bounded answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from fastapi import Request
from starlette.types import Message

from hil.errors import UsageError

# What shows who asks goes on to the inner request, so that it sees what the outer one may see, and no more.
_PASSED_ON = (b"host", b"cookie", b"authorization")
_COPIED = ("type", "asgi", "http_version", "scheme", "server", "client")
# Where the server tells of what went wrong in it.
_LOG = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class Answer:
    """What the server answered."""

    status: int
    type: str  # its media type, without parameters
    body: bytes


class _TooLong(Exception):
    """An answer has more bytes than it may have."""


class _OfAnotherType(Exception):
    """An answer is of a type that was not asked for: a stream of events never ends."""


async def ask(request: Request, address: str, *, types: Iterable[str], most: int) -> Answer | None:
    """The answer to GET, as a page that is to be saved; None if it has more than ``most`` bytes.

    Of a page that the server fails to make it is the one that says so: that is the page's error, not who asked for it.

    Args:
        address: a path of this server's, with its query.
        types: media types that are taken, or beginnings of them.

    Raises:
        UsageError: the address is another server's, or the answer is of another type.
    """
    if not is_ours(address):
        raise UsageError(f"{address[:200]!r} is no address of this server")
    answer = _Collected(tuple(types), most)
    try:
        await request.app(_scope(request, address), _receiver(), answer.take)
    except _TooLong:
        return None
    except _OfAnotherType as error:
        raise UsageError(f"{urlsplit(address).path} is no page: {error}") from error
    except Exception as error:
        # It goes on past the page that tells of it; and what had begun well is cut off.
        _LOG.error("%s", urlsplit(address).path, exc_info=error)
        return Answer(500, answer.type, bytes(answer.body))
    return Answer(answer.status, answer.type, bytes(answer.body))


def is_ours(address: str) -> bool:
    """Whether an address is a path of this server's: "//" and "/\\" before a name lead to another."""
    return address.startswith("/") and not address.startswith(("//", "/\\"))


def _scope(request: Request, address: str) -> dict[str, Any]:
    parts = urlsplit(address)
    headers = [(name, value) for name, value in request.scope["headers"] if name in _PASSED_ON]
    return {
        **{name: value for name, value in request.scope.items() if name in _COPIED},
        "method": "GET",
        "root_path": "",
        "path": unquote(parts.path),
        "raw_path": parts.path.encode("ascii", "ignore"),
        "query_string": parts.query.encode("ascii", "ignore"),
        "headers": [*headers, (b"accept", b"application/json, text/html, */*")],
        "state": {"saved": True},
    }


def _receiver() -> Any:
    """The request's empty body; and then nothing more, for a disconnected one would end the answer."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": b"", "more_body": False}

    return receive


class _Collected:
    def __init__(self, types: tuple[str, ...], most: int) -> None:
        self._types = types
        self._most = most
        self.status = 0
        self.type = ""
        self.body = bytearray()

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self.status = message["status"]
            self.type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
            if self.status == 200 and not self.type.startswith(self._types):
                raise _OfAnotherType(self.type or "it has no type")
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            if len(self.body) > self._most:
                raise _TooLong
