"""Access control. :class:`RequestGuard` checks every request before it reaches a page.

On loopback, pages of stored sessions need no token. On other addresses, every request needs the token of the server or
a token of the farm. The same applies to all pages of a server with a farm. Changes always need a token and must come
from pages of this server, so that a foreign page in the same browser cannot change anything.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote, urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hil.controller.farm.messages import Role
from hil.controller.web.access.peers import find_peer_of
from hil.controller.web.access.visitors import Visitor, VisitorLookup, Visitors
from hil.core.loopback import is_loopback
from hil.errors import AccessRefused

COOKIE = "hil_token"
# Maximum bytes of a request body, and of a body with a piece of a published session.
MAX_BODY = 1 << 20
MAX_PIECE = 8 << 20
PIECES = "/publish/"
# Minimum token length on a public address, because there is no rate limit against guessing.
SHORTEST_TOKEN = 16
_MAX_FIELDS = 200  # maximum query fields
_RETRY_SECONDS = 5  # seconds to wait after too many unknown tokens
_SAFE = ("GET", "HEAD")
_SELF_SOURCE = "'self'"
# Allow only resources from this server, and no inline scripts or styles.
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src {_SELF_SOURCE}" for kind in ("script", "style", "connect", "font", "frame")),
        f"img-src {_SELF_SOURCE} data:",
        f"form-action {_SELF_SOURCE}",
        "base-uri 'none'",
        f"frame-ancestors {_SELF_SOURCE}",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # "no-referrer" would remove the Origin header from requests of this server's forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), usb=()",
}


@dataclass(frozen=True)
class AccessRules:
    """Access rules of a server. Override :meth:`accepts` for other authentication methods."""

    host: str  # listen address
    token: str = ""  # the server's token; "" disables changes
    farm: Visitors | None = None  # farm with more accepted tokens
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)  # key of this server's cookies

    @property
    def is_local(self) -> bool:
        """True if only users on this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def is_open(self) -> bool:
        """True if pages need no token.

        Farm pages always need a token, because the server reads the data with the server's farm token.
        """
        return self.is_local and self.farm is None

    def accepts(self, given: str) -> bool:
        """Return True if ``given`` is the server's token."""
        return bool(self.token) and hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def make_cookie(self, login: str, user: str) -> str:
        """Return the cookie value that replaces the token after a login.

        A browser sends a host's cookies to all ports of the host. So the value is only valid for this server, and only
        for connections of the user who logged in.

        Args:
            login: the token or an equivalent secret.
            user: user from :class:`.Peer`.
        """
        return hmac.new(self.secret, f"{user} {login}".encode(errors="replace"), "sha256").hexdigest()


class RequestGuard:
    """ASGI middleware that checks the Host header, the token, the origin of changes, and the size of requests."""

    def __init__(self, app: ASGIApp, access: AccessRules) -> None:
        self._app = app
        self._access = access
        self._lookup = VisitorLookup(access.farm) if access.farm else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward or reject a request. WebSockets are closed, because the server does not use them."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] in _SAFE and scope["path"].startswith("//"):
            # An address that ends with a slash, joined with a path.
            scope = {**scope, "path": "/" + scope["path"].lstrip("/")}
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        visitor, refusal = None, self._check_request(scope, headers)
        if refusal is None:
            try:
                visitor = await self._find_visitor(scope, headers)
                refusal = self._check_access(scope, headers, visitor)
            except AccessRefused as error:
                refusal = PlainTextResponse(error.message, 429, {"retry-after": str(_RETRY_SECONDS)})
        if refusal is not None:
            await refusal(scope, receive, _add_headers(send))
            return
        own = self._holds_token(scope, headers)
        may_change = own or (visitor is not None and visitor.role.covers(Role.SUBMITTER))
        is_owner = own and self._access.is_local
        scope.setdefault("state", {}).update(may_change=may_change, visitor=visitor, has_token=own, is_owner=is_owner)
        await self._app(scope, _limit_body(receive, _choose_body_limit(scope)), _add_headers(send))

    def _check_request(self, scope: Scope, headers: Mapping[str, str]) -> ASGIApp | None:
        """Return the response to a request that is invalid for every user, or None."""
        access = self._access
        # Otherwise a foreign page could use another host name for this address to read this server's pages (DNS
        # rebinding).
        if access.is_local and not is_loopback(_parse_host(headers.get("host", ""))):
            return PlainTextResponse("This server only accepts requests for localhost and 127.0.0.1.", 421)
        if _is_foreign(headers):
            return PlainTextResponse("Cross-site request refused.", 403)
        length = headers.get("content-length", "0")
        if not (length.isdecimal() and len(length) < 20) or int(length) > _choose_body_limit(scope):
            return PlainTextResponse("The request exceeds the size limit.", 413)
        if scope["query_string"].count(b"&") >= _MAX_FIELDS:
            return PlainTextResponse("The number of URL parameters exceeds the limit.", 400)
        return None

    async def _find_visitor(self, scope: Scope, headers: Mapping[str, str]) -> Visitor | None:
        """Return the farm user for a request's token. The farm checks an unknown token.

        Raises AccessRefused if too many tokens are being checked.
        """
        farm, peer = self._access.farm, find_peer_of(scope)
        if farm is None or self._lookup is None:
            return None
        kept = _read_cookie(scope, headers)
        found = _parse_query(scope).get("token", [])[-1:] or [
            _parse_bearer(headers),
            farm.find_token(kept, peer.user) if kept else "",
        ]
        for token in found:
            if not token or self._access.accepts(token):
                continue
            if visitor := await self._lookup.find(token, peer.name):
                return visitor
        return None

    def _check_access(self, scope: Scope, headers: Mapping[str, str], visitor: Visitor | None) -> ASGIApp | None:
        access, query = self._access, _parse_query(scope)
        if given := query.get("token"):
            return self._log_in(scope, given[-1], query, visitor)
        holds = visitor is not None or self._holds_token(scope, headers)
        takes = access.token or access.farm
        if not holds and takes and _parse_bearer(headers) and not (access.is_open and scope["method"] in _SAFE):
            # Only programs send this header, so return no instructions for browsers.
            return PlainTextResponse(self._invalid_token_text, 401, {"www-authenticate": "Bearer"})
        if not (access.is_open or holds):
            text = "Token required: open the URL printed by `hil web`, with ?token=..."
            if access.farm:
                text += " Farm tokens are accepted while the farm is reachable."
            return PlainTextResponse(text, 401, {"www-authenticate": "Bearer"})
        if scope["method"] not in _SAFE:
            if not holds:
                return PlainTextResponse("Token required for changes: start `hil web` with --token.", 403)
            if not _is_same_origin(headers):
                return PlainTextResponse("Request from a different site refused.", 403)
        return None

    @property
    def _invalid_token_text(self) -> str:
        return "Invalid token" + (" for this server and the farm." if self._access.farm else " for this server.")

    def _log_in(self, scope: Scope, given: str, query: Mapping[str, list[str]], visitor: Visitor | None) -> ASGIApp:
        """Store the login in a cookie, and remove the token from the URL.

        Browser histories and logs record URLs.
        """
        farm, user = self._access.farm, find_peer_of(scope).user
        if farm and visitor:
            kept = farm.keep(visitor.token, user)
        elif self._access.accepts(given):
            kept = self._access.make_cookie(given, user)
        else:
            return PlainTextResponse(self._invalid_token_text, 401)
        rest = "&".join(
            f"{quote(key)}={quote(value)}" for key, values in query.items() if key != "token" for value in values
        )
        # A path with two leading slashes would redirect to another server.
        path = "/" + scope["path"].lstrip("/\\")
        response = RedirectResponse(quote(path) + (f"?{rest}" if rest else ""), 303)
        secure = scope.get("scheme") == "https"
        # With "lax", links from other sites work. Changes also require the same origin.
        response.set_cookie(_make_cookie_name(scope), kept, httponly=True, samesite="lax", secure=secure)
        return response

    def _holds_token(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        if self._access.accepts(_parse_bearer(headers)):
            return True
        given = _read_cookie(scope, headers)
        if not (self._access.token and given):
            return False
        kept = self._access.make_cookie(self._access.token, find_peer_of(scope).user)
        return hmac.compare_digest(given.encode(errors="replace"), kept.encode())


def _parse_query(scope: Scope) -> dict[str, list[str]]:
    return parse_qs(scope["query_string"].decode("latin-1"))


def _parse_bearer(headers: Mapping[str, str]) -> str:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _read_cookie(scope: Scope, headers: Mapping[str, str]) -> str:
    """Return the value of this server's cookie, or ""."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_make_cookie_name(scope))
    except CookieError:
        return ""
    return found.value if found else ""


def _make_cookie_name(scope: Scope) -> str:
    """Return the cookie name. The name contains the port, because browsers send cookies to all ports of a host."""
    port = (scope.get("server") or ("", 0))[1]
    return f"{COOKIE}_{port}" if port else COOKIE


def _choose_body_limit(scope: Scope) -> int:
    return MAX_PIECE if scope["path"].startswith(PIECES) else MAX_BODY


def _parse_host(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_foreign(headers: Mapping[str, str]) -> bool:
    """Return True if a page of another site embeds or fetches something. Plain links to this server are allowed."""
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    return headers.get("sec-fetch-mode") != "navigate" or headers.get("sec-fetch-dest") != "document"


def _is_same_origin(headers: Mapping[str, str]) -> bool:
    """Return True if a page of this server or a program sent the request. Browsers always send their origin."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none") and "cookie" not in headers
    try:
        found = urlsplit(origin)
        return found.scheme in ("http", "https") and bool(found.netloc) and found.netloc == headers.get("host", "")
    except ValueError:
        return False


def _add_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message.get("headers", ())}
            own: Iterable[tuple[bytes, bytes]] = (
                (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given
            )
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await send(message)

    return send_with_headers


def _limit_body(receive: Receive, most: int) -> Receive:
    """Limit the request body, even if Content-Length is wrong."""
    read = 0

    async def receive_limited() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > most:
            raise HTTPException(413, "The request exceeds the size limit.")
        return message

    return receive_limited
