"""Messages between the agent and its processes, including hostile peers."""

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
from support.waiting import allowed_s

from hil.agent import forks, ipc
from hil.agent.ipc import Channel, Closed, Garbled, Late


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_channel_delivers_messages_whole_and_in_order(ends: tuple[Channel, socket.socket]):
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


@pytest.mark.ci
def test_channel_receive_timeout_covers_whole_message(ends: tuple[Channel, socket.socket]):
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
    assert time.monotonic() - start < allowed_s(10)
    over.set()
    sender.join()


@pytest.mark.skipif(sys.platform != "linux", reason="no Unix socket sends bytes out of band there")
def test_channel_receive_times_out_despite_out_of_band_byte(ends: tuple[Channel, socket.socket]):
    channel, theirs = ends
    theirs.send(b"x", socket.MSG_OOB)
    start = time.monotonic()
    with pytest.raises(Late):
        channel.receive(0.5)
    assert time.monotonic() - start < allowed_s(10)


def test_channel_send_times_out_when_peer_does_not_read(ends: tuple[Channel, socket.socket]):
    channel, _ = ends
    with pytest.raises(Late):
        channel.send("x" * (16 << 20), timeout=0.5)


def test_channel_receive_rejects_oversized_message_by_length(ends: tuple[Channel, socket.socket]):
    channel, theirs = ends
    theirs.sendall(struct.pack("<I", 101))
    with pytest.raises(Garbled, match="101 bytes"):
        channel.receive_bytes(60, most_bytes=100)


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"\xff", b"9" * 10_000, b"[" + b"1," * 300_000 + b"1]"])
def test_ipc_decode_rejects_malformed_message(body: bytes):
    with pytest.raises(Garbled):
        ipc.decode(body)


@pytest.mark.parametrize(
    ("body", "news"),
    [
        (b'{"pid": 7}', (7, None)),
        (b'{"exited": 7, "status": -9}', (7, (-9, 0))),
        (b'{"exited": 7, "status": -9, "peak": 5}', (7, (-9, 5))),
        (b'{"failed": "no room"}', ("no room", None)),
    ],
)
def test_read_news_parses_fork_server_messages(body: bytes, news: object):
    assert forks.read_news(body) == news


@pytest.mark.parametrize("pid", ["-1", "0", "1", "2147483648", "true", "1.5", "null", '"7"', "[7]"])
@pytest.mark.parametrize("kind", ["pid", "exited"])
def test_read_news_rejects_invalid_pid(kind: str, pid: str):
    with pytest.raises(Garbled):
        forks.read_news(f'{{"{kind}": {pid}, "status": 0}}'.encode())


@given(st.binary(max_size=100))
def test_read_news_raises_garbled_for_any_bytes(body: bytes):
    try:
        pid, status = forks.read_news(body)
    except Garbled:
        return
    assert isinstance(pid, str) or pid > 1
    assert status is None or isinstance(status.code, int)


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
        {"device_details": {"id": "vulkan"}},
        {"device_details": [{"id": 1}]},
        {"device_details": [{"id": "vulkan", "other": "x"}]},
        {"device_details": [{"id": "vulkan", "properties": {"size": 8}}]},
        {"device_details": [{"properties": {str(number): "" for number in range(200)}}]},
    ],
)
def test_read_description_reports_invalid_runtime_description(said: object):
    assert "description" in forks.read_description(said)["error"]


def test_read_description_returns_valid_description():
    device = {"id": "cpu", "name": "", "type": "cpu", "driver": "", "properties": {"api": "1"}}
    said = {"version": "1", "devices": ("cpu",), "device_details": [device], "profile_tool": "tool"}
    assert forks.read_description(said) == said
