"""HTTP with limits on time and size, for servers that may be slow, hostile, or not the expected server."""

from __future__ import annotations

import http.client
import io
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

# Maximum bytes of a response with headers, chunk sizes, trailers and interim responses, beyond its body.
_OVERHEAD = 256 << 10
_HOST = re.compile(r"[A-Za-z0-9._:%-]+")
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class HttpResponse:
    """Response of a server."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes = field(repr=False)

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300


def split_url(url: str) -> SplitResult:
    """Split an HTTP URL. Raises ValueError, without the URL, if it has another scheme, a login or an invalid host."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS:
        raise ValueError("expected a URL that starts with https:// or http://")
    if "@" in parts.netloc:
        raise ValueError("a login in the URL is not supported")
    host = (parts.hostname or "").encode("idna").decode()
    if not _HOST.fullmatch(host) or not (url.isascii() and url.isprintable() and " " not in url):
        raise ValueError("expected a host name, and only ASCII characters without spaces")
    _ = parts.port  # raises ValueError if it is not a number
    return parts


def send_request(
    method: str,
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float,
    most_bytes: int,
    context: ssl.SSLContext | None = None,
) -> HttpResponse:
    """Send a request on a new connection. Redirects are not followed.

    Args:
        timeout_s: time limit for the connection, the request and the whole response together.
        most_bytes: maximum size of the response's body.
        context: TLS settings; None for the system's authorities.

    Raises:
        OSError, http.client.HTTPException: the server does not respond in time, or sends an invalid response.
        ValueError: the URL is invalid, or the body is too large.
    """
    parts = split_url(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    deadline = time.monotonic() + timeout_s
    opened = open_socket(host, port, deadline)
    try:
        if parts.scheme == "https":
            opened.settimeout(get_seconds_left(deadline))
            opened = (context or ssl.create_default_context()).wrap_socket(opened, server_hostname=host)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(host, port)
        wire: Any = BoundedSocket(opened)
        connection.sock = wire
        wire.allow(get_seconds_left(deadline), most_bytes + _OVERHEAD)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(method, path, body, {"User-Agent": "hil", **(headers or {})})
        with connection.getresponse() as response:
            try:
                data = response.read(most_bytes + 1)
            except OverflowError as error:  # http.client accepts huge chunk sizes
                raise ValueError(f"invalid chunk: {error}") from error
            found = {name.lower(): value for name, value in response.getheaders()}
    finally:
        opened.close()
    if len(data) > most_bytes:
        raise ValueError(f"response larger than {most_bytes} bytes")
    return HttpResponse(response.status, found, data)


def open_socket(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first responding address of a host. Raises OSError if none responds before the deadline."""
    error = OSError("no address found for the host")
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        opened = socket.socket(family, kind, protocol)
        try:
            opened.settimeout(get_seconds_left(deadline))
            opened.connect(place)
            return opened
        except OSError as found:
            opened.close()
            error = found
    raise error


class BoundedSocket:
    """Socket for http.client with one deadline per operation. Slow partial reads do not extend the deadline."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._deadline = self._room = 0.0

    def allow(self, seconds: float, most_bytes: int) -> None:
        """Set the deadline and the maximum number of received bytes for the next operation."""
        self._deadline = time.monotonic() + seconds
        self._room = most_bytes

    def sendall(self, data: bytes) -> None:
        """Send all data."""
        left = memoryview(data)
        while left:
            self._socket.settimeout(get_seconds_left(self._deadline))
            left = left[self._socket.send(left) :]

    def makefile(self, _: str) -> io.BufferedReader:
        """Return a reader for the response."""
        return io.BufferedReader(_IncomingStream(self, self._socket.makefile("rb", buffering=0)))

    def close(self) -> None:
        """Close the socket after the response was read."""
        self._socket.close()

    def read_into(self, source: Any, buffer: Any) -> int:
        """Read available data. Raises OSError after the deadline, or if the response is too large."""
        self._socket.settimeout(get_seconds_left(self._deadline))
        count: int = source.readinto(buffer)
        self._room -= count
        if self._room < 0:
            raise OSError("response exceeds the size limit")
        return count


class _IncomingStream(io.RawIOBase):
    def __init__(self, wire: BoundedSocket, source: Any) -> None:
        self._wire, self._source = wire, source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._wire.read_into(self._source, buffer)

    def close(self) -> None:
        self._source.close()
        super().close()


def get_seconds_left(deadline: float) -> float:
    """Return the seconds until a deadline. Raises TimeoutError after the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
