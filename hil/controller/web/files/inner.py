"""Send internal requests to this server without a connection.

The server checks internal requests like all other requests. Responses have a size limit.
"""

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

# Credentials are copied to the inner request, so that it has the same permissions.
_PASSED_ON = (b"host", b"cookie", b"authorization")
_COPIED = ("type", "asgi", "http_version", "scheme", "server", "client")
# Logger for server errors.
_LOG = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class InnerResponse:
    """Response of the server."""

    status: int
    type: str  # media type without parameters
    body: bytes


class _TooLong(Exception):
    """The response exceeds the size limit."""


class _OfAnotherType(Exception):
    """The response has an unexpected media type. An event stream, for example, never ends."""


async def ask(request: Request, address: str, *, types: Iterable[str], most: int) -> InnerResponse | None:
    """Send a GET request for a page to save. Return None if the response exceeds ``most`` bytes.

    If the server fails to render the page, the response is an error page with status 500. No exception is raised.

    Args:
        address: path with query on this server.
        types: accepted media types, or prefixes of them.
        most: maximum bytes in the response body.

    Raises:
        UsageError: the address is on a different server, or the media type is wrong.
    """
    if not is_ours(address):
        raise UsageError(f"{address[:200]!r} is not a URL of this server")
    answer = _Collected(tuple(types), most)
    try:
        await request.app(_make_scope(request, address), _make_receiver(), answer.take)
    except _TooLong:
        return None
    except _OfAnotherType as error:
        raise UsageError(f"{urlsplit(address).path} is not a page: {error}") from error
    except Exception as error:
        # Starlette re-raises the error after the error page. A response that had started is incomplete.
        _LOG.error("%s", urlsplit(address).path, exc_info=error)
        return InnerResponse(500, answer.type, bytes(answer.body))
    return InnerResponse(answer.status, answer.type, bytes(answer.body))


def is_ours(address: str) -> bool:
    r"""Return True if an address is a path on this server. "//" and "/\" lead to other hosts."""
    return address.startswith("/") and not address.startswith(("//", "/\\"))


def _make_scope(request: Request, address: str) -> dict[str, Any]:
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


def _make_receiver() -> Any:
    """Return a receiver with an empty body.

    After the body the receiver waits, because a disconnect message would end the response.
    """
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
