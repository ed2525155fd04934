"""Ctrl-C at any moment of a call: the call ends, and the channel is as good as before."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from support.interrupting import interrupted_at
from support.waiting import allowed_s

from hil.controller.devices.agent_client.interruptible_channel import ChannelClosed, InterruptibleChannel
from hil.protocol import grpc_calls

WITHIN_S = 20.0


class Server:
    """Answers at once, or when the test ends."""

    def __init__(self, address: str) -> None:
        self.over = threading.Event()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))
        same = {"request_deserializer": bytes, "response_serializer": bytes}
        methods = {
            "Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: request, **same),
            "Hang": grpc.unary_unary_rpc_method_handler(self.hang, **same),
            "Each": grpc.stream_stream_rpc_method_handler(lambda requests, context: requests, **same),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
        self.server.add_insecure_port(address)
        self.server.start()

    def hang(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if not context.add_callback(self.over.set):
            self.over.set()
        self.over.wait(WITHIN_S)
        return request


@pytest.fixture(autouse=True, scope="module")
def fast_collections() -> Iterator[None]:
    """Keep the objects of other tests out of the collection before each of several hundred calls."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[grpc.Channel]:
    server = Server(address := f"unix:{tmp_path}/s.sock")
    made = grpc.insecure_channel(address)
    yield made
    started = time.monotonic()
    grpc_calls.close_channel(made)
    server.over.set()
    server.server.stop(0).wait()
    assert time.monotonic() - started < grpc_calls.CLOSE_SECONDS, "the channel could not be closed"


def echo(channel: InterruptibleChannel) -> None:
    assert channel.unary_unary("/test/Echo")(b"x", timeout=WITHIN_S) == b"x"


def stream(channel: InterruptibleChannel) -> None:
    replies = channel.stream_stream("/test/Each")(iter([b"a", b"b"]), timeout=WITHIN_S)
    assert list(replies) == [b"a", b"b"]


def in_the_background(channel: InterruptibleChannel) -> None:
    call = channel.unary_unary("/test/Echo").future(b"x", timeout=WITHIN_S)
    assert call.result(WITHIN_S) == b"x"
    assert not call.is_active()


@pytest.mark.ci
@pytest.mark.parametrize("call", [echo, stream, in_the_background])
def test_ctrl_c_ends_call_at_any_step(channel: grpc.Channel, call: Callable[..., None]):
    interruptible = InterruptibleChannel(channel)
    tried = 0
    for number in itertools.count(1, 3):
        came, raised = interrupted_at(number, lambda: call(interruptible))
        assert raised is came
        if not came:
            break
        tried += 1
        echo(interruptible)
    assert tried > 30
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_cancels_hung_call(channel: grpc.Channel):
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        InterruptibleChannel(channel).unary_unary("/test/Hang")(b"x", timeout=WITHIN_S)
    assert time.monotonic() - started < allowed_s(5)
    echo(InterruptibleChannel(channel))


@pytest.mark.parametrize("call", [echo, stream, in_the_background])
def test_closed_channel_refuses_calls_by_type(channel: grpc.Channel, call: Callable[..., None]):
    interruptible = InterruptibleChannel(channel)
    interruptible.close()
    with pytest.raises(ChannelClosed):
        call(interruptible)


def test_interrupts_leave_other_threads_and_handlers(channel: grpc.Channel):
    interruptible = InterruptibleChannel(channel)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(echo, interruptible).result(WITHIN_S)
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        assert interrupted_at(20, lambda: echo(interruptible)) == (True, False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
