from __future__ import annotations

import contextlib
import errno
import socket
import threading
from pathlib import Path

import pytest
from support.waiting import eventually

from hil.protocol.local_socket import LocalSocket, NotCarried


def connected(path: Path) -> socket.socket:
    near = socket.socket(socket.AF_UNIX)
    near.settimeout(10)
    near.connect(str(path))
    return near


def echo(near: socket.socket) -> None:
    while piece := near.recv(100):
        near.sendall(piece)


def test_local_socket_carries_connections_independently(tmp_path):
    way = LocalSocket(tmp_path / "s", echo, "hil-test")
    with connected(tmp_path / "s") as one, connected(tmp_path / "s") as other:
        for near, said in ((other, b"second"), (one, b"first")):
            near.sendall(said)
            assert near.recv(100) == said
    way.close()


def test_local_socket_logs_last_hundred_refusals(tmp_path):
    number = iter(range(150))

    def refuse(near: socket.socket) -> None:
        raise NotCarried(f"nobody there: {next(number)}")

    way = LocalSocket(tmp_path / "s", refuse, "hil-test")
    for _ in range(150):
        with connected(tmp_path / "s") as near:
            assert near.recv(1) == b""
    eventually(lambda: "149" in way.log())
    lines = way.log().splitlines()
    assert len(lines) == 100
    assert "nobody there: 149" in lines[-5:]
    way.close()


def test_local_socket_close_ends_connections(tmp_path):
    carried, ended = threading.Event(), threading.Event()

    def wait(near: socket.socket) -> None:
        carried.set()
        # recv raises if the socket is closed before the wait begins.
        with contextlib.suppress(OSError):
            assert near.recv(1) == b""
        ended.set()

    way = LocalSocket(tmp_path / "s", wait, "hil-test")
    assert way.alive()
    with connected(tmp_path / "s") as near:
        assert carried.wait(60)
        way.close()
        assert ended.wait(60)
        assert near.recv(1) == b""
    way.close()
    assert not way.alive()
    with socket.socket(socket.AF_UNIX) as near, pytest.raises(ConnectionRefusedError):
        near.connect(str(tmp_path / "s"))


def test_local_socket_survives_shortage_of_descriptors(tmp_path, monkeypatch):
    way = LocalSocket(tmp_path / "s", echo, "hil-test")
    accept, refusals = socket.socket.accept, iter(range(3))

    def accept_later(listener: socket.socket) -> object:
        if next(refusals, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    for _ in range(2):  # the pending accept call takes the first
        with connected(tmp_path / "s") as near:
            near.sendall(b"said")
            assert near.recv(100) == b"said"
    assert next(refusals, None) is None
    way.close()


def test_local_socket_hangs_up_without_thread(tmp_path, monkeypatch):
    way = LocalSocket(tmp_path / "s", echo, "hil-test")

    def no_room(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_room)
        with connected(tmp_path / "s") as near:
            assert near.recv(1) == b""
    with connected(tmp_path / "s") as near:
        near.sendall(b"said")
        assert near.recv(100) == b"said"
    assert "new thread" in way.log()
    way.close()
