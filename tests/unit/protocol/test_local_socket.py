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


def test_each_connection_is_carried_by_itself(tmp_path):
    way = LocalSocket(tmp_path / "s", echo, "hil-test")
    with connected(tmp_path / "s") as one, connected(tmp_path / "s") as other:
        for near, said in ((other, b"second"), (one, b"first")):
            near.sendall(said)
            assert near.recv(100) == said
    way.close()


def test_the_log_says_why_connections_were_not_carried_and_keeps_the_last_hundred(tmp_path):
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


def test_closing_wakes_whoever_waits_in_a_connection_and_takes_no_more(tmp_path):
    carried, ended = threading.Event(), threading.Event()

    def wait(near: socket.socket) -> None:
        carried.set()
        # Closed before it waits, it is an error.
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


def test_one_moment_without_descriptors_ends_nothing(tmp_path, monkeypatch):
    way = LocalSocket(tmp_path / "s", echo, "hil-test")
    accept, refusals = socket.socket.accept, iter(range(3))

    def accept_later(listener: socket.socket) -> object:
        if next(refusals, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    for _ in range(2):  # the first is taken by the call that waits already
        with connected(tmp_path / "s") as near:
            near.sendall(b"said")
            assert near.recv(100) == b"said"
    assert next(refusals, None) is None
    way.close()


def test_a_connection_that_finds_no_thread_is_hung_up_on(tmp_path, monkeypatch):
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
