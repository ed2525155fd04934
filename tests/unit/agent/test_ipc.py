"""Messages between the agent and its processes, whoever is at the other end."""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.agent import forks, ipc
from hil.agent.ipc import Channel, Closed, Garbled, Late


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_messages_come_in_order_whole(ends: tuple[Channel, socket.socket]):
    channel, theirs = ends
    other = Channel(theirs)
    sent: list[Any] = [{"a": [1, 2.5, None]}, "x" * 300_000, []]
    sender = threading.Thread(target=lambda: [other.send(one) for one in sent])
    sender.start()
    assert [channel.receive(60) for _ in sent] == sent
    sender.join()
    theirs.close()
    with pytest.raises(Closed):
        channel.receive(60)


def test_a_limit_is_for_the_whole_message(ends: tuple[Channel, socket.socket]):
    channel, theirs = ends
    over = threading.Event()

    def drip() -> None:
        theirs.sendall(struct.pack("<I", 1000))
        while not over.wait(0.05):
            theirs.sendall(b" ")

    sender = threading.Thread(target=drip)
    sender.start()
    start = time.monotonic()
    with pytest.raises(Late):
        channel.receive(1.0)
    assert time.monotonic() - start < 10
    over.set()
    sender.join()


@pytest.mark.skipif(sys.platform != "linux", reason="no Unix socket sends bytes out of band there")
def test_a_byte_out_of_band_suspends_no_limit(ends: tuple[Channel, socket.socket]):
    channel, theirs = ends
    theirs.send(b"x", socket.MSG_OOB)
    start = time.monotonic()
    with pytest.raises(Late):
        channel.receive(0.5)
    assert time.monotonic() - start < 10


def test_an_order_that_is_not_taken_has_a_limit(ends: tuple[Channel, socket.socket]):
    channel, _ = ends
    with pytest.raises(Late):
        channel.send("x" * (16 << 20), timeout=0.5)


def test_a_message_larger_than_allowed_is_refused_before_it_comes(ends: tuple[Channel, socket.socket]):
    channel, theirs = ends
    theirs.sendall(struct.pack("<I", 101))
    with pytest.raises(Garbled, match="101 bytes"):
        channel.receive_bytes(60, most_bytes=100)


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b"9" * 10_000, b"[" + b"1," * 300_000 + b"1]"])
def test_what_is_no_message_is_told(body: bytes):
    with pytest.raises(Garbled):
        ipc.decode(body)


@pytest.mark.parametrize(
    ("body", "news"),
    [
        (b'{"pid": 7}', (7, None)),
        (b'{"exited": 7, "status": -9}', (7, -9)),
        (b'{"failed": "no room"}', ("no room", None)),
    ],
)
def test_a_fork_servers_news(body: bytes, news: object):
    assert forks.read_news(body) == news


@pytest.mark.parametrize("pid", ["-1", "0", "1", "2147483648", "true", "1.5", "null", '"7"', "[7]"])
@pytest.mark.parametrize("kind", ["pid", "exited"])
def test_nobody_but_a_worker_is_told_of(kind: str, pid: str):
    with pytest.raises(Garbled):
        forks.read_news(f'{{"{kind}": {pid}, "status": 0}}'.encode())


@given(st.binary(max_size=100))
def test_any_bytes_are_news_or_none(body: bytes):
    try:
        pid, status = forks.read_news(body)
    except Garbled:
        return
    assert isinstance(pid, str) or pid > 1
    assert status is None or isinstance(status, int)


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        "x",
        {"devices": "cpu"},
        {"devices": [1]},
        {"devices": ["x"] * 2000},
        {"version": 3},
        {"error": "\ud800"},
    ],
)
def test_a_runtime_that_describes_itself_oddly_is_one_that_does_not_work(said: object):
    assert "describes itself" in forks.read_description(said)["error"]


def test_a_runtimes_description():
    said = {"version": "1", "devices": ("cpu",), "profile_tool": "tool"}
    assert forks.read_description(said) == said
