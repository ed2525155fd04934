"""HTTP client for a `hil web` server.

Timeouts and size limits protect the client if the URL belongs to another server.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

import tenacity

from hil.core.bounded_http import BoundedSocket, get_seconds_left, open_socket
from hil.core.bounded_json import parse_json
from hil.core.loopback import is_loopback
from hil.core.text import escape_controls
from hil.errors import FarmUnreachable, UsageError

C = TypeVar("C", bound="WebClient")
# Timeouts in seconds: connecting to all addresses of a host, sending a request, reading the whole response.
_CONNECT_S, _SEND_S, _ANSWER_S = 10.0, 120.0, 120.0
# Maximum attempts, and backoff, for requests with connection errors.
_TRIES = 5
_WAIT = tenacity.wait_exponential(0.2, max=5)
_MAX_ANSWER = 4 << 20
# The limit includes headers, chunk sizes, trailers and interim responses.
_MAX_RECEIVED = 2 * _MAX_ANSWER
_MAX_TEXT = 300
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")
OTHER_SERVER = "check that the server is hil web of the same release"


@dataclass(frozen=True)
class ServerResponse:
    """Response with status and JSON object."""

    status: int
    document: Mapping[str, Any]


class WebClient:
    """Connection to a `hil web` server that reconnects after errors. A context manager.

    Args:
        address: URL as `hil web` prints it, optionally with ``?token=``.
        plain_http: allow sending the token unencrypted to another machine.
        reads_only: send no uploads. A server on this machine then needs no token.

    Raises:
        UsageError: the URL is invalid, or the token would be sent unencrypted.
    """

    def __init__(self, address: str, token: str = "", *, plain_http: bool = False, reads_only: bool = False) -> None:
        try:
            parts = urlsplit(address)
            host, port = (parts.hostname or "").encode("idna").decode(), parts.port
        except ValueError as error:  # includes UnicodeError
            raise UsageError(f"invalid URL {address!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host):
            raise UsageError(f"invalid URL {address!r}", hint="use the URL printed by hil web: http://HOST:PORT/")
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = host, port or (443 if self._context else 80)
        self._path = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self.address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._token = (token or parse_qs(parts.query).get("token", [""])[-1]).strip()
        if not (self._token or reads_only):
            raise UsageError(f"token required to publish to {self.address}", hint="set --token or HIL_WEB_TOKEN")
        self._retry_hint = "then retry" + ("" if reads_only else ": the upload resumes")
        if not (self._token.isascii() and self._token.isprintable()):
            raise UsageError("invalid token: only printable ASCII characters are allowed")
        if self._token and not (self._context or plain_http or is_loopback(self._host)):
            raise UsageError(
                f"the token would be sent to {self._host} unencrypted",
                hint="use https://..., or ssh -L 8790:localhost:8790 and http://localhost:8790"
                + ("" if reads_only else ", or --plain-http"),
            )
        self._connection: http.client.HTTPConnection | None = None

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, method: str, path: str, body: bytes) -> ServerResponse:
        """Send a request. After a connection error, retry on a new connection.

        Raises:
            FarmUnreachable: the server does not respond in time.
            UsageError: the server is not `hil web`.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((OSError, http.client.HTTPException)),
            stop=tenacity.stop_after_attempt(_TRIES) | tenacity.stop_after_delay(_ANSWER_S),
            wait=_WAIT,
            reraise=True,
        )
        try:
            return retrying(self._ask_once, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise FarmUnreachable(
                f"{self.address} is not responding: {escape_controls(str(error))[:_MAX_TEXT] or type(error).__name__}",
                hint=f"check that hil web is running, {self._retry_hint}",
            ) from error

    def make_malformed_error(self, what: str) -> UsageError:
        """Return the error for an invalid response."""
        return UsageError(f"unexpected response from {self.address}: {what}", hint=OTHER_SERVER)

    def check(self, answer: ServerResponse, about: object = "") -> Mapping[str, Any]:
        """Return the document of a successful response.

        Args:
            about: the uploaded file, for the error message.

        Raises:
            UsageError: the server rejected the request.
            FarmUnreachable: the server is too busy, or the request was too slow.
        """
        if answer.status == 200:
            return answer.document
        text, hint = (_clean_text(answer.document.get(name)) for name in ("error", "hint"))
        text = text or f"status {answer.status}"
        if answer.status in (408, 502, 503, 504):
            problem = "timed out" if answer.status == 408 else "is busy"
            raise FarmUnreachable(f"{self.address} {problem}: {text}", hint=hint or "retry later")
        hints = {
            401: "--token, or HIL_WEB_TOKEN, must match the token of that hil web",
            404: OTHER_SERVER,
        }
        redirects = "use the redirect target as the URL" if 300 <= answer.status < 400 else ""
        of = f" {about}" if about else ""
        raise UsageError(f"the server refused{of}: {text}", hint=hint or hints.get(answer.status, redirects))

    def _ask_once(self, method: str, path: str, body: bytes) -> ServerResponse:
        connection = self._connection or self._open_connection()
        self._connection = None  # after any error, the next request reconnects
        headers = {"Content-Type": "application/octet-stream"}
        headers |= {"Authorization": f"Bearer {self._token}"} if self._token else {}
        wire: Any = connection.sock
        try:
            wire.allow(_SEND_S, _MAX_RECEIVED)
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # the server may respond before reading the whole body
                connection.request(method, self._path + path, body, headers)
            wire.allow(_ANSWER_S, _MAX_RECEIVED)
            with connection.getresponse() as response:
                try:
                    data = response.read(_MAX_ANSWER + 1)
                except (ValueError, OverflowError) as error:  # http.client accepts negative and huge chunk sizes
                    raise self.make_malformed_error(f"invalid chunk: {error}") from error
        except BaseException:
            connection.close()
            raise
        if len(data) > _MAX_ANSWER:
            connection.close()
            raise self.make_malformed_error(f"response larger than {_MAX_ANSWER} bytes")
        if response.will_close:
            connection.close()
        else:
            self._connection = connection
        return ServerResponse(response.status, _parse_document(data, response.status))

    def _open_connection(self) -> http.client.HTTPConnection:
        deadline = time.monotonic() + _CONNECT_S
        opened = open_socket(self._host, self._port, deadline)
        try:
            if self._context is not None:
                opened.settimeout(get_seconds_left(deadline))
                opened = self._context.wrap_socket(opened, server_hostname=self._host)
        except BaseException:
            opened.close()
            raise
        kind = http.client.HTTPSConnection if self._context else http.client.HTTPConnection
        connection = kind(self._host, self._port)
        connection.sock = BoundedSocket(opened)
        return connection


def _parse_document(data: bytes, status: int) -> Mapping[str, Any]:
    """Parse the JSON object of a body. An error response that is not JSON becomes an error text."""
    try:
        found = parse_json(data)
    except (ValueError, RecursionError):
        found = {"error": data[:_MAX_TEXT].decode(errors="replace").strip()} if status != 200 else {}
    return found if isinstance(found, dict) else {}


def _clean_text(value: Any) -> str:
    return escape_controls(value)[:_MAX_TEXT] if isinstance(value, str) else ""
