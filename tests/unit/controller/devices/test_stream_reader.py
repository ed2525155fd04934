"""Read gRPC streams, including a read that never completes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from hil.controller.devices.agent_client.call import Call, CallFailed
from hil.controller.devices.agent_client.grpc_stream import GrpcStream
from hil.controller.devices.agent_client.interruptible_channel import InterruptibleChannel, StreamReader
from hil.protocol.data_connection import METHODS
from hil.protocol.v1 import agent_pb2 as pb


class Stream(grpc.RpcError):
    """A fake gRPC call that returns replies, and then hangs, ends or fails."""

    def __init__(self, replies: list[Any], code: grpc.StatusCode | None = None, *, hangs: bool = False) -> None:
        self.given, self._status, self._hangs = 0, code, hangs
        self.cancelled, self.never = threading.Event(), threading.Event()
        self._replies = iter(replies)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for reply in self._replies:
            self.given += 1
            return reply
        if self._hangs:
            self.never.wait()
        if self._status is grpc.StatusCode.OK:
            raise StopIteration
        raise self

    def is_active(self) -> bool:
        return self._status is None

    def cancel(self) -> None:
        self.cancelled.set()
        self._status = self._status or grpc.StatusCode.CANCELLED

    def code(self) -> grpc.StatusCode | None:
        return self._status

    def details(self) -> str:
        return "the server stopped"

    def trailing_metadata(self) -> tuple[()]:
        return ()


def test_reader_returns_replies_in_order():
    reader = StreamReader(Stream([1, 2, 3, 4, 5], grpc.StatusCode.OK))
    assert [reader.read() for _ in range(5)] == [1, 2, 3, 4, 5]
    for _ in range(2):
        with pytest.raises(StopIteration):
            reader.read()


def test_reader_raises_call_error_after_replies():
    reader = StreamReader(stream := Stream([1], grpc.StatusCode.UNAVAILABLE))
    assert reader.read() == 1
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            reader.read()
        assert caught.value is stream


@pytest.mark.ci
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK])
def test_reader_stops_when_call_ends(code):
    """gRPC has the call's status, and never completes the read."""
    reader = StreamReader(Stream([1], code, hangs=True))
    assert reader.read() == 1
    began = time.monotonic()
    with pytest.raises(StopIteration if code is grpc.StatusCode.OK else Stream):
        reader.read()
    assert time.monotonic() - began < 10


@pytest.mark.ci
def test_cancelled_call_fails_despite_hung_read():
    stream = Stream([], hangs=True)
    channel: Any = type("Channel", (), {"stream_stream": lambda *_: lambda *_, **__: stream})()
    called = InterruptibleChannel(channel).stream_stream("/x")
    call = Call(METHODS["Invoke"], GrpcStream(called, METHODS["Invoke"]))
    threading.Timer(0.2, call.cancel).start()
    with pytest.raises(CallFailed) as caught:
        call.receive()
    assert caught.value.code == "CANCELLED"


def test_call_cancelled_before_message_starts_cancelled():
    stream = Stream([], hangs=True)
    call = Call(METHODS["Get"], GrpcStream(lambda *_, **__: stream, METHODS["Get"]))
    call.cancel()
    call.send(pb.GetRequest())
    assert stream.cancelled.is_set()


def test_reader_prefetches_few_replies():
    stream = Stream(list(range(1000)), grpc.StatusCode.OK)
    reader = StreamReader(stream)
    assert reader.read() == 0
    time.sleep(0.5)
    assert stream.given <= 5


def test_dropped_reader_cancels_call_and_thread():
    stream, before = Stream(list(range(1000))), set(threading.enumerate())
    reader = StreamReader(stream)
    assert reader.read() == 0
    [thread] = set(threading.enumerate()) - before
    del reader
    gc.collect()
    assert stream.cancelled.wait(5)
    thread.join(10)
    assert not thread.is_alive()
