"""Connections to `hil web` that send no request: silent, slow and flooding clients."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from support.web import serving, write_run

from hil.controller.web.access import connections
from hil.controller.web.server import server


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    monkeypatch.setattr(connections, "BODY_S", 0.5)
    write_run(tmp_path, "one", [{"name": "model"}])
    with serving(tmp_path, token="the token") as found:
        where = urlsplit(found)
        yield str(where.hostname), int(where.port or 0)


def ended_within(peer: socket.socket, seconds: float) -> bool:
    """Return whether the server closes the connection within the time limit."""
    peer.settimeout(seconds)
    try:
        while peer.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BEARER = b"Authorization: Bearer the token\r\n"
PUT = HEAD.replace(b"GET /", b"POST /publish/missing") + BEARER + b"Content-Length: 100\r\n\r\n"


@pytest.mark.parametrize("start", [b"", HEAD, HEAD + b"X: ", PUT, HEAD + b"\r\n"])
def test_server_closes_silent_connection(address: tuple[str, int], start: bytes) -> None:
    with socket.create_connection(address) as peer:
        peer.sendall(start)
        assert ended_within(peer, 20)


def test_server_closes_slow_connection(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as peer:
        peer.sendall(HEAD)
        end = time.monotonic() + 20
        with pytest.raises(OSError):
            while time.monotonic() < end:
                peer.sendall(b"X: y\r\n")
                time.sleep(0.05)
        assert time.monotonic() < end


def test_server_rejects_oversized_request_head(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as peer:
        try:
            for _ in range(100):
                peer.sendall(b"GET /" + b"a" * 10_000 if _ == 0 else b"a" * 10_000)
        except OSError:
            return
        peer.settimeout(20)
        assert peer.recv(100).startswith(b"HTTP/1.1 400")


def test_server_closes_endless_chunked_body(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as peer:
        peer.sendall(PUT.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked"))
        piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        end = time.monotonic() + 20
        with pytest.raises(OSError):
            while time.monotonic() < end:
                peer.sendall(piece)


def test_open_event_stream_does_not_delay_shutdown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_S", 60)
    write_run(tmp_path, "one", [{"name": "model"}])
    with serving(tmp_path) as found:
        live = urlopen(f"{found}/events", timeout=30)
        assert live.readline() == b"event: changed\n"
        begun = time.monotonic()
    assert time.monotonic() - begun < 30
    assert not caplog.records
    with live, pytest.raises((OSError, http.client.HTTPException)):  # reported as cut, so that the browser reconnects
        while live.readline():
            pass
        raise OSError("ended")


def test_server_closes_silent_connections_for_new_requests(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 600)
    silent = [socket.create_connection(address) for _ in range(connections.MOST_CONNECTIONS + 20)]
    try:
        for _ in range(3):
            assert urlopen(f"http://{address[0]}:{address[1]}/", timeout=30).status == 200
    finally:
        for one in silent:
            one.close()


def test_event_streams_leave_connections_for_requests(address: tuple[str, int]) -> None:
    live = []
    try:
        for _ in range(connections.MOST_CONNECTIONS + 20):
            peer = socket.create_connection(address)
            peer.sendall(HEAD.replace(b"GET /", b"GET /events") + b"\r\n")
            live.append(peer)
            peer.settimeout(30)
            assert peer.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert ended_within(live[0], 30)  # a browser reconnects
        assert urlopen(f"http://{address[0]}:{address[1]}/", timeout=30).status == 200
    finally:
        for one in live:
            one.close()
