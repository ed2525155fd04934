"""What a client does to `hil web` without asking for anything: silence, dripping, floods."""

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

from hil.controller.web import connections, server


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    monkeypatch.setattr(connections, "BODY_S", 0.5)
    write_run(tmp_path, "one", [{"name": "model"}])
    with serving(tmp_path, token="the token") as found:
        where = urlsplit(found)
        yield str(where.hostname), int(where.port or 0)


def ended_within(peer: socket.socket, seconds: float) -> bool:
    """Whether the server closes a connection within so long."""
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
def test_who_says_nothing_is_let_go(address: tuple[str, int], start: bytes) -> None:
    with socket.create_connection(address) as peer:
        peer.sendall(start)
        assert ended_within(peer, 20)


def test_who_drips_is_let_go(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as peer:
        peer.sendall(HEAD)
        end = time.monotonic() + 20
        with pytest.raises(OSError):
            while time.monotonic() < end:
                peer.sendall(b"X: y\r\n")
                time.sleep(0.05)
        assert time.monotonic() < end


def test_a_head_of_any_length_is_refused(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as peer:
        try:
            for _ in range(100):
                peer.sendall(b"GET /" + b"a" * 10_000 if _ == 0 else b"a" * 10_000)
        except OSError:
            return
        peer.settimeout(20)
        assert peer.recv(100).startswith(b"HTTP/1.1 400")


def test_a_body_without_a_length_is_not_read_without_end(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as peer:
        peer.sendall(PUT.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked"))
        piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        end = time.monotonic() + 20
        with pytest.raises(OSError):
            while time.monotonic() < end:
                peer.sendall(piece)


def test_an_open_page_does_not_hold_up_the_end(
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
    with live, pytest.raises((OSError, http.client.HTTPException)):  # said to be cut off, so that it is asked for again
        while live.readline():
            pass
        raise OSError("ended")


def test_silent_connections_make_room_for_who_asks(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 600)
    silent = [socket.create_connection(address) for _ in range(connections.MOST_CONNECTIONS + 20)]
    try:
        for _ in range(3):
            assert urlopen(f"http://{address[0]}:{address[1]}/", timeout=30).status == 200
    finally:
        for one in silent:
            one.close()
