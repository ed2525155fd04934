"""Who may ask what: every request goes through :class:`Guard` before a page sees it.

On loopback nobody needs a token; elsewhere everybody does: the server's own, or one of the farm's. Changing anything
needs a token anywhere, and a request that our own pages sent: a page of somebody else's, open in the same browser, must
not be able to.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hil.controller.farm.messages import Role
from hil.controller.web.visitors import Visitor, Visitors
from hil.core.digest import digest_of

COOKIE = "hil_token"
# No page of ours needs more. What is published comes in pieces, of which a request may have so many bytes.
MOST_BODY = 1 << 20
MOST_PIECE = 8 << 20
PIECES = "/publish/"
# Of a token on an address that others reach: nothing else slows down who tries them all.
SHORTEST_TOKEN = 16
_MOST_FIELDS = 200  # of an address's query
_SAFE = ("GET", "HEAD")
_OWN = "'self'"
# Nothing runs, is drawn or is fetched but what this server sends; no style or script stands in a page's text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src {_OWN}" for kind in ("script", "style", "connect", "font", "frame")),
        f"img-src {_OWN} data:",
        f"form-action {_OWN}",
        "base-uri 'none'",
        f"frame-ancestors {_OWN}",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # "no-referrer" would take the origin from our own forms too.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), usb=()",
}


@dataclass(frozen=True)
class Access:
    """Who may use the server. One with other ways to tell who asks overrides :meth:`accepts`."""

    host: str  # the address that it listens on
    token: str = ""  # what shows who may; "" is nobody's, and then nothing can be changed
    farm: Visitors | None = None  # the farm whose tokens let in too

    @property
    def open(self) -> bool:
        """Whether pages are read without a token: only this machine's users reach a loopback address."""
        return is_loopback(self.host)

    def accepts(self, given: str) -> bool:
        """Whether this is the token."""
        return bool(self.token) and hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    @property
    def cookie(self) -> str:
        """What a browser keeps in place of the token, which no header then has to carry."""
        return digest_of(b"hil web cookie " + self.token.encode()).partition(":")[2]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware: the name that was asked, the token, the origin of changes, and the size of a request."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, or refuse it. There are no websockets here: one is refused by being closed."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        visitor, refusal = None, self._unfit(scope, headers)
        if refusal is None:
            visitor = await self._visitor(scope, headers)
            refusal = self._refusal(scope, headers, visitor)
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
            return
        own = self._holds_token(scope, headers)
        may_change = own or (visitor is not None and visitor.role.covers(Role.SUBMITTER))
        scope.setdefault("state", {}).update(may_change=may_change, visitor=visitor, is_owner=own and self._access.open)
        await self._app(scope, _bounded(receive, _most_body(scope)), _with_headers(send))

    def _unfit(self, scope: Scope, headers: Mapping[str, str]) -> ASGIApp | None:
        """What is refused whoever asks."""
        access = self._access
        # Another name that leads to this address would let its owner's page read ours (DNS rebinding).
        if access.open and not is_loopback(_host_of(headers.get("host", ""))):
            return PlainTextResponse("This server answers to localhost and 127.0.0.1.", 421)
        if _is_foreign(headers):
            return PlainTextResponse("This request was sent by a page of another site.", 403)
        length = headers.get("content-length", "0")
        if not (length.isdecimal() and len(length) < 20) or int(length) > _most_body(scope):
            return PlainTextResponse("The request is too large.", 413)
        if scope["query_string"].count(b"&") >= _MOST_FIELDS:
            return PlainTextResponse("The address has too many fields.", 400)
        return None

    async def _visitor(self, scope: Scope, headers: Mapping[str, str]) -> Visitor | None:
        """Whom, at the farm, a request's token stands for: the farm is asked where that is not known."""
        farm = self._access.farm
        if farm is None:
            return None
        found = _query_of(scope).get("token", [])[-1:] or [_bearer_of(headers), farm.token_of(_kept_of(scope, headers))]
        for token in found:
            if not token or self._access.accepts(token):
                continue
            known, visitor = farm.known(token)
            if visitor := visitor if known else await run_in_threadpool(farm.find, token):
                return visitor
        return None

    def _refusal(self, scope: Scope, headers: Mapping[str, str], visitor: Visitor | None) -> ASGIApp | None:
        access, query = self._access, _query_of(scope)
        if given := query.get("token"):
            return self._login(scope, given[-1], query, visitor)
        holds = visitor is not None or self._holds_token(scope, headers)
        takes = access.token or access.farm
        if not holds and takes and _bearer_of(headers) and not (access.open and scope["method"] in _SAFE):
            # A program sent it: what a person would open is nothing to it.
            return PlainTextResponse(self._not_ours, 401, {"www-authenticate": "Bearer"})
        if not (access.open or holds):
            text = "This server needs its token: open the address that `hil web` printed, with ?token=..."
            if access.farm:
                text = (
                    "This server needs a token of its farm's: open its address with ?token=... while the farm is there."
                )
            return PlainTextResponse(text, 401, {"www-authenticate": "Bearer"})
        if scope["method"] not in _SAFE:
            if not holds:
                return PlainTextResponse("Changing anything needs a token: start `hil web` with --token.", 403)
            if not _same_origin(headers):
                return PlainTextResponse("This request was not sent by a page of this server.", 403)
        return None

    @property
    def _not_ours(self) -> str:
        return "That is not this server's token" + (", nor one of its farm's." if self._access.farm else ".")

    def _login(self, scope: Scope, given: str, query: Mapping[str, list[str]], visitor: Visitor | None) -> ASGIApp:
        """Keep that the token was shown in a cookie, and take it out of the address, which histories and logs keep."""
        farm, kept = self._access.farm, self._access.cookie
        if farm and visitor:
            kept = farm.keep(visitor.token)
        elif not self._access.accepts(given):
            return PlainTextResponse(self._not_ours, 401)
        rest = "&".join(
            f"{quote(key)}={quote(value)}" for key, values in query.items() if key != "token" for value in values
        )
        # A path with two slashes first would be another server's.
        path = "/" + scope["path"].lstrip("/\\")
        response = RedirectResponse(quote(path) + (f"?{rest}" if rest else ""), 303)
        secure = scope.get("scheme") == "https"
        # "lax": a link that somebody sends to a colleague opens; what changes anything looks at the origin besides.
        response.set_cookie(_cookie_name(scope), kept, httponly=True, samesite="lax", secure=secure)
        return response

    def _holds_token(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        if self._access.accepts(_bearer_of(headers)):
            return True
        kept, given = self._access.cookie, _kept_of(scope, headers)
        return bool(self._access.token) and hmac.compare_digest(given.encode(errors="replace"), kept.encode())


def _query_of(scope: Scope) -> dict[str, list[str]]:
    return parse_qs(scope["query_string"].decode("latin-1"))


def _bearer_of(headers: Mapping[str, str]) -> str:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _kept_of(scope: Scope, headers: Mapping[str, str]) -> str:
    """What this server's cookie has; "" for none."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(_cookie_name(scope))
    except CookieError:
        return ""
    return found.value if found else ""


def _cookie_name(scope: Scope) -> str:
    """Browsers send the cookies of all ports of a machine to each: every port has its own."""
    port = (scope.get("server") or ("", 0))[1]
    return f"{COOKIE}_{port}" if port else COOKIE


def _most_body(scope: Scope) -> int:
    return MOST_PIECE if scope["path"].startswith(PIECES) else MOST_BODY


def _host_of(header: str) -> str:
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def _is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether another site's page asks for something to be part of it: a link to a page of ours is none of that."""
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    return headers.get("sec-fetch-mode") != "navigate" or headers.get("sec-fetch-dest") != "document"


def _same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a request came from our own page, or from a program that is no browser (a browser tells its origin)."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none") and "cookie" not in headers
    try:
        found = urlsplit(origin)
        return found.scheme in ("http", "https") and bool(found.netloc) and found.netloc == headers.get("host", "")
    except ValueError:
        return False


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message.get("headers", ())}
            own: Iterable[tuple[bytes, bytes]] = (
                (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given
            )
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await send(message)

    return sending


def _bounded(receive: Receive, most: int) -> Receive:
    """Read no more of a request than a bound, whatever its head says."""
    read = 0

    async def receiving() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > most:
            raise HTTPException(413, "The request is too large.")
        return message

    return receiving
