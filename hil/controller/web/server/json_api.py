"""JSON API: `/api/v1/session?id=...` returns the data of the page `/session?id=...`.

A request of the API becomes a request for the page with a mark, so that both have the same parameters, permissions and
errors.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hil.controller.web.text.documents import API, mark_json, respond_with_error
from hil.controller.web.text.names import escape_name
from hil.errors import did_you_mean

# The home page has a name in the API.
HOME = "/home"
# Description of the API for programs.
OPENAPI = f"{API}/openapi.json"
_SAFE = ("GET", "HEAD")
_MAX_CHARS = 80


class JsonPages:
    """ASGI middleware that turns requests of the API into requests for pages. Runs after the access control.

    Args:
        pages: paths of pages with a document.
    """

    def __init__(self, app: ASGIApp, pages: Collection[str]) -> None:
        self._app = app
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request. Requests outside of the API do not change."""
        if not is_of_api(scope):
            await self._app(scope, receive, send)
            return
        page = scope["path"].removeprefix(API).rstrip("/") or HOME
        if scope["method"] not in _SAFE:
            refusal = respond_with_error(405, "HTTPError", "the JSON API only reads", "use GET")
            await refusal(scope, receive, send)
        elif page != HOME and page not in self._pages:
            names = [one for one in (HOME, *self._pages) if one != "/"]
            hint = f"{did_you_mean(page[:_MAX_CHARS], names)}the pages of the API are in {OPENAPI}"
            text = f"page '{escape_name(page[:_MAX_CHARS])}' not found in the JSON API"
            await respond_with_error(404, "HTTPError", text, hint)(scope, receive, send)
        else:
            await self._app(mark_json(scope, "/" if page == HOME else page), receive, send)


class JsonErrors:
    """ASGI middleware that turns plain-text errors of API requests into JSON, such as those of the access control."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request."""
        await self._app(scope, receive, _ErrorWriter(send).send if is_of_api(scope) else send)


class _ErrorWriter:
    """Response that holds back an error in plain text until the text is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: MutableMapping[str, Any] | None = None
        self._text = b""

    async def send(self, message: Message) -> None:
        """Forward a part of the response."""
        if message["type"] == "http.response.start" and message["status"] >= 400:
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            if not kind.startswith(b"application/json"):
                self._held = message
                return
        if self._held is None:
            await self._send(message)
            return
        self._text += message.get("body", b"")
        if not message.get("more_body"):
            await self._send_error(self._held)

    async def _send_error(self, start: MutableMapping[str, Any]) -> None:
        status = start["status"]
        kind = "AccessRefused" if status in (401, 403) else "HTTPError"
        made = respond_with_error(status, kind, self._text.decode(errors="replace"), "")
        kept = [(name, value) for name, value in start["headers"] if name not in (b"content-type", b"content-length")]
        await self._send({**start, "headers": [*kept, *made.raw_headers]})
        await self._send({"type": "http.response.body", "body": bytes(made.body)})


def is_of_api(scope: Scope) -> bool:
    """Return True for a request of the API."""
    path: str = scope.get("path", "")
    return scope["type"] == "http" and path != OPENAPI and (path == API or path.startswith(f"{API}/"))
