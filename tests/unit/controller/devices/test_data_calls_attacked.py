"""Data connections with a hostile agent use bounded time and memory."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hil.controller.devices.agent_client import call as calls
from hil.controller.devices.agent_client.call import Call, CallFailed
from hil.controller.devices.agent_client.data_stream import DataConnections
from hil.core.scratch import make_folder, remove_tree
from hil.errors import ProtocolBroken
from hil.protocol import wire
from hil.protocol.data_connection import END, HEADER, MESSAGE, METHODS, READY, ConnectionBroken, Frames
from hil.protocol.v1 import agent_pb2 as pb

PIECE = memoryview(bytes(wire.CHUNK))
READY_FRAME = HEADER.pack(READY, 0)
OPEN_S, SOON_S = 0.5, 5.0


@pytest.fixture
def folder() -> Iterator[Path]:
    made = make_folder("hil-data-", for_sockets=True)
    yield made
    remove_tree(made)


@contextlib.contextmanager
def agent(folder: Path, behave: Callable[[socket.socket, threading.Event], None]) -> Iterator[DataConnections]:
    """Yield connections to an agent that repeats one behaviour on each connection."""
    over = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/agent.data")
        listener.listen()

        def serve(connected: socket.socket) -> None:
            with connected, contextlib.suppress(OSError):
                behave(connected, over)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        with contextlib.closing(DataConnections(f"{folder}/agent.data", "")) as connections:
            yield connections
        over.set()
        listener.shutdown(socket.SHUT_RDWR)


def trickle(data: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """Send single bytes, each within the time limit, without end."""

    def behave(connected: socket.socket, over: threading.Event) -> None:
        for value in data:
            connected.sendall(bytes([value]))
            if over.wait(OPEN_S / 3):
                return

    return behave


@pytest.mark.parametrize("data", [HEADER.pack(END, 1 << 16) + bytes(1 << 16), b"\2\0\0\0", HEADER.pack(READY, 9)])
def test_call_opening_has_single_deadline(folder, data):
    with agent(folder, trickle(data)) as connections:
        began = time.monotonic()
        with pytest.raises(CallFailed) as caught:
            connections.open("Put", "token", OPEN_S)
        assert caught.value.code == "DEADLINE_EXCEEDED"
        assert time.monotonic() - began < SOON_S


def test_resting_connections_share_deadline(folder):
    """Each is closed shortly before the time is over."""

    def behave(connected: socket.socket, over: threading.Event) -> None:
        over.wait(OPEN_S * 0.9)

    with agent(folder, behave) as connections:
        for _ in range(4):
            connections._keep_idle(connections._connect(OPEN_S))
        began = time.monotonic()
        with pytest.raises(CallFailed):
            connections.open("Put", "token", OPEN_S)
        assert time.monotonic() - began < 4 * OPEN_S * 0.9


def flood(message: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """Take a call on, and answer without end while the caller still sends."""

    def behave(connected: socket.socket, over: threading.Event) -> None:
        connected.sendall(READY_FRAME)
        threading.Thread(target=drain, args=(connected,), daemon=True).start()
        answers = (HEADER.pack(MESSAGE, len(message)) + message) * (64 if len(message) < 1000 else 1)
        while not over.is_set():
            connected.sendall(answers)

    return behave


def drain(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connected.recv(1 << 16):
            pass


def upload(call: Call) -> None:
    call.send(pb.PutRequest(start=pb.PutStart(digest="blake3:" + "0" * 64, size=1 << 40)))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        call.send(PIECE)


@pytest.mark.parametrize("message", [b"", pb.PutReply(digest="x" * 900).SerializeToString()])
def test_early_replies_use_bounded_memory(folder, message, monkeypatch):
    monkeypatch.setattr(calls, "_MAX_EARLY_BYTES", 1 << 20)
    with agent(folder, flood(message)) as connections:
        call = Call(METHODS["Put"], connections.open("Put", "token", SOON_S))
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolBroken, match=r"responses to .* exceed the limit"):
                upload(call)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_early_replies_have_bounded_size(folder):
    with agent(folder, flood(bytes(8 << 20))) as connections:
        call = Call(METHODS["Invoke"], connections.open("Invoke", "token", SOON_S))
        with pytest.raises(ProtocolBroken, match="bytes"):
            upload(call)


def test_acknowledgements_of_upload_are_not_early(folder):
    """The maximum number of blobs, each acknowledged before the last is sent."""
    count = 20_000
    reply = pb.PutReply(digest="blake3:" + "0" * 64)

    def behave(connected: socket.socket, over: threading.Event) -> None:
        frames = Frames(connected)
        frames.content(frames.begin()[1])
        frames.send(READY)
        answer = functools.partial(frames.send, MESSAGE, reply.SerializeToString())
        sender = threading.Thread(target=lambda: [answer() for _ in range(count)])
        sender.start()
        while (begun := frames.begin()) != (END, 0):
            frames.content(begun[1])
        sender.join()
        frames.send(END)

    with agent(folder, behave) as connections:
        call = Call(METHODS["Put"], connections.open("Put", "token", SOON_S))
        while len(call._early) < count:
            call.send(PIECE)
        call.end()
        assert sum(1 for _ in iter(call.receive, None)) == count


def test_frames_share_single_deadline():
    here, there = socket.socketpair()
    with contextlib.closing(Frames(here)) as frames, there:
        there.sendall(HEADER.pack(MESSAGE, 10))
        frames.within(0.3)
        assert frames.begin() == (MESSAGE, 10)
        threading.Timer(0.2, there.sendall, [b"x"]).start()
        began = time.monotonic()
        with pytest.raises(ConnectionBroken) as caught:
            frames.content(10)
        assert isinstance(caught.value.__cause__, TimeoutError)
        assert time.monotonic() - began < 0.45 + 1
        frames.within(None)
        there.sendall(b"123456789")
        view = memoryview(bytearray(9))
        frames.content_into(view)
        assert bytes(view) == b"123456789"


def test_unread_frame_ends_at_deadline():
    here, there = socket.socketpair()
    with contextlib.closing(Frames(here)) as frames, there:
        frames.within(0.3)
        began = time.monotonic()
        with pytest.raises(ConnectionBroken) as caught:
            for _ in range(100):
                frames.send(MESSAGE, PIECE)
        assert isinstance(caught.value.__cause__, TimeoutError)
        assert time.monotonic() - began < SOON_S
