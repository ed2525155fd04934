"""Connections to `hil web` that send no request: silent, slow and flooding clients."""

from __future__ import annotations

import asyncio
import gc
import http.client
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from support.waiting import eventually
from support.web import serving, write_run

from hil.controller.web.access import connections
from hil.controller.web.access.peers import Peer
from hil.controller.web.access.security import RequestGuard
from hil.controller.web.server import server


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.5)
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
    monkeypatch.setattr(server, "GRACE_SECONDS", 60)
    write_run(tmp_path, "one", [{"name": "model"}])
    with serving(tmp_path) as found:
        live = urlopen(f"{found}/events", timeout=30)
        assert live.readline() == b"event: changed\n"
        begun = time.monotonic()
    assert time.monotonic() - begun < 30
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    with live, pytest.raises((OSError, http.client.HTTPException)):  # reported as cut, so that the browser reconnects
        while live.readline():
            pass
        raise OSError("ended")


@pytest.mark.parametrize("request_head", [b"", b"GET /file?id=one&file=large.npy HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
def test_shutdown_closes_connection_of_client_that_does_not_read(tmp_path: Path, request_head: bytes) -> None:
    large = write_run(tmp_path, "one", [{"name": "model"}]) / "large.npy"
    large.touch()
    os.truncate(large, 64 << 20)
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        with serving(tmp_path) as found:
            where = urlsplit(found)
            peer.connect((where.hostname, where.port))
            peer.sendall(request_head)
            if request_head:
                assert peer.recv(1) == b"H"
        gc.collect()  # reports a connection that is still open as an error of this test
        assert ended_within(peer, 20)


def test_server_closes_silent_connections_for_new_requests(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 600)
    silent = [socket.create_connection(address) for _ in range(connections.MAX_CONNECTIONS + 20)]
    try:
        for _ in range(3):
            assert urlopen(f"http://{address[0]}:{address[1]}/", timeout=30).status == 200
    finally:
        for one in silent:
            one.close()


def ask(address: tuple[str, int], source: str = "127.0.0.1") -> bytes:
    """Return the status line of a page."""
    with socket.create_connection(address, 30, source_address=(source, 0)) as peer:
        peer.sendall(HEAD + b"\r\n")
        return peer.recv(12)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
def test_busy_client_leaves_connections_for_other_clients(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "find_peer", lambda connection, client, server: Peer("", client[0]))
    monkeypatch.setattr(connections, "BODY_SECONDS", 600)
    received, receive = [], connections.HttpConnection.data_received
    monkeypatch.setattr(
        connections.HttpConnection, "data_received", lambda self, data: received.append(receive(self, data))
    )
    limit = connections.MAX_CONNECTIONS_OF_CLIENT
    busy = [socket.create_connection(address) for _ in range(limit)]
    try:
        assert ask(address) == b"HTTP/1.1 200"  # one of the silent connections is closed
        busy.append(socket.create_connection(address))
        for peer in busy[1:]:
            peer.sendall(PUT)
        eventually(lambda: len(received) == limit + 1)
        assert ask(address) == b"HTTP/1.1 503"
        assert ask(address, "127.0.0.2") == b"HTTP/1.1 200"
    finally:
        for one in busy:
            one.close()


def test_server_finds_peer_once_per_connection(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    found, find_peer = [], connections.find_peer
    monkeypatch.setattr(connections, "find_peer", lambda *ends: found.append(find_peer(*ends)) or found[-1])
    peer = http.client.HTTPConnection(*address, timeout=30)
    for _ in range(3):
        peer.request("GET", "/", headers={"Cookie": f"hil_token_{address[1]}=x"})
        peer.getresponse().read()
    peer.close()
    assert len(found) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the user of a connection")
def test_cookie_fails_on_closed_connection(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    peer = http.client.HTTPConnection(*address, timeout=30)
    peer.request("GET", "/?token=the%20token")
    cookie = str(peer.getresponse().headers["set-cookie"]).partition(";")[0]
    peer.close()
    states, holds = [], RequestGuard._holds_token
    monkeypatch.setattr(RequestGuard, "_holds_token", lambda *ends: states.append(holds(*ends)) or states[-1])
    made = connections.HttpConnection.connection_made

    def wait_and_accept(self: connections.HttpConnection, transport: asyncio.Transport) -> None:
        closed.wait(30)
        made(self, transport)

    monkeypatch.setattr(connections.HttpConnection, "connection_made", wait_and_accept)
    for closes in (False, True):
        closed = threading.Event()
        with socket.create_connection(address, 30) as sender:
            sender.sendall(HEAD.replace(b"GET", b"POST") + f"Cookie: {cookie}\r\n\r\n".encode())
            if not closes:
                closed.set()
                sender.recv(12)
        closed.set()
        eventually(lambda count=closes + 1: len(states) >= count)
    assert states[0] and not states[-1]


def test_event_streams_leave_connections_for_requests(address: tuple[str, int]) -> None:
    live = []
    try:
        for _ in range(connections.MAX_CONNECTIONS + 20):
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
