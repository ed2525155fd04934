"""The contract of every call to an agent, over both transports."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.waiting import eventually

from hil import errors
from hil.agent.admission import Admission
from hil.agent.calls import Calls
from hil.agent.data_server import DataServer
from hil.agent.grpc_server import GrpcServer
from hil.agent.session import Journal, Session, Sessions
from hil.controller.devices.agent_client.call import Call, CallFailed
from hil.controller.devices.agent_client.calls import AgentCalls
from hil.controller.devices.agent_client.connection import AgentConnection
from hil.controller.devices.agent_client.data_stream import DataStream
from hil.controller.devices.board_client import AgentEndpoint
from hil.core.scratch import make_folder, remove_tree
from hil.protocol import grpc_calls, wire, wire_errors
from hil.protocol.data_connection import DATA, END, MESSAGE, READY, ConnectionBroken, Frames
from hil.protocol.v1 import agent_pb2 as pb

DATA_CONNECTION, GRPC = "data connection", "gRPC"
PIECE = memoryview(bytes(wire.CHUNK))
BLOB = bytes(range(256)) * 8000
START = pb.PutRequest(start=pb.PutStart(digest="blake3:" + "0" * 64, size=1))


class Services:
    """Handlers with one kind of call each. ``open_calls`` counts endless calls."""

    def __init__(self) -> None:
        self.received: list[object] = []
        self.fail_after = 1 << 30
        self.over = threading.Event()
        self.open_calls = 0

    def missing(self, request: Any, context: Any) -> pb.MissingReply:
        if "wait" in request.digests:
            self.over.wait(60)
        if not request.digests:
            raise errors.UsageError("no digest", hint="send one", detail="d" * 5000)
        return pb.MissingReply(missing=[pb.MissingBlob(digest=one) for one in request.digests])

    def get(self, request: Any, context: Any) -> Iterator[Any]:
        yield pb.GetReply(start=pb.GetStart(size=len(BLOB)))
        yield from wire.split_pieces(memoryview(BLOB))

    def put(self, requests: Iterator[Any], context: Any) -> Iterator[pb.PutReply]:
        for message in requests:
            self.received.append(message if isinstance(message, pb.PutRequest) else bytes(message))
            if len(self.received) > self.fail_after:
                raise errors.LoadFailed("the disk is full", hint="make room")
            if isinstance(message, pb.PutRequest):
                yield pb.PutReply(digest=message.start.digest)

    def clock(self, requests: Iterator[Any], context: Any) -> Iterator[pb.ClockPong]:
        for number, _ in enumerate(requests):
            yield pb.ClockPong(clock_ns=number)

    def counters(self, request: Any, context: Any) -> Iterator[pb.CounterSample]:
        self.open_calls += 1
        try:
            while context.is_active():
                yield pb.CounterSample(clock_ns=1)
                time.sleep(0.01)
        finally:
            self.open_calls -= 1


@pytest.fixture
def folder() -> Iterator[Path]:
    made = make_folder("hil-calls-", for_sockets=True)
    yield made
    remove_tree(made)


@pytest.fixture(params=[DATA_CONNECTION, GRPC])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sessions(folder: Path) -> Sessions:
    return Sessions(folder / "fence", lambda: None, Journal(folder / "journal"))


@pytest.fixture
def session(sessions: Sessions) -> Session:
    opened = sessions.open("me", "test", 60, 0, lambda reason: None)
    assert opened
    return opened


@pytest.fixture
def services() -> Iterator[Services]:
    made = Services()
    yield made
    made.over.set()


@pytest.fixture
def serve(transport: str, folder: Path, sessions: Sessions, services: Services) -> Iterator[Callable[..., Any]]:
    """Return a function that starts the agent's server for the transport."""
    servicers = {
        "Board": SimpleNamespace(Clock=services.clock, Counters=services.counters),
        "Blobs": SimpleNamespace(Missing=services.missing, Get=services.get, Put=services.put),
    }
    with contextlib.ExitStack() as started:

        def start(token: str = "") -> Any:
            calls = Calls(Admission(sessions), servicers, token)
            if transport == GRPC:
                server: Any = GrpcServer(f"unix:{folder}/agent", calls)
            else:
                server = DataServer(f"{folder}/agent.data", calls)
            started.callback(server.close)
            return server

        yield start


@pytest.fixture
def connect(folder: Path, transport: str) -> Iterator[Callable[..., AgentCalls]]:
    """Return a function that connects a client. Every call must use the transport."""
    with contextlib.ExitStack() as opened:

        def make(token: str = "") -> AgentCalls:
            calls = opened.enter_context(contextlib.closing(AgentCalls(AgentEndpoint(f"unix:{folder}/agent", token))))
            begin = calls.begin

            def checked(*arguments: Any, **settings: Any) -> Call:
                call = begin(*arguments, **settings)
                assert isinstance(call.stream, DataStream) == (transport == DATA_CONNECTION)
                return call

            calls.begin = checked  # type: ignore[method-assign]
            return calls

        yield make


@pytest.fixture
def calls(serve: Callable[..., Any], connect: Callable[..., AgentCalls]) -> AgentCalls:
    """Return a client of a started server."""
    serve()
    return connect()


def error_of(failed: CallFailed) -> errors.HilError | None:
    return wire_errors.decode_error(failed.error)


def ask(calls: AgentCalls, session: Session, *digests: str) -> Call:
    call = calls.begin("Missing", session.token)
    call.send(pb.MissingRequest(digests=digests))
    return call


def receive_all(call: Call, size: int) -> bytes:
    found = memoryview(bytearray(size))
    at = 0
    while at < size:
        at += call.receive_into(found[at:])
    return bytes(found)


# ---- successful calls


def test_unary_call_ends_after_reply(calls, session):
    call = ask(calls, session, "a", "b")
    assert [one.digest for one in call.receive().missing] == ["a", "b"]
    assert call.receive() is None


def test_reply_stream_fills_buffers_with_data(calls, session):
    call = calls.begin("Get", session.token)
    call.send(pb.GetRequest(digest="x"))
    assert call.receive().start.size == len(BLOB)
    assert receive_all(call, len(BLOB)) == BLOB
    assert call.receive() is None


def test_request_stream_preserves_order_of_messages_and_data(calls, session, services):
    call = calls.begin("Put", session.token)
    for message in (START, PIECE, memoryview(b"a"), START, memoryview(b"b")):
        call.send(message)
    call.end()
    assert [reply.digest for reply in call] == [START.start.digest] * 2
    assert call.receive() is None
    assert services.received == [START, bytes(PIECE), b"a", START, b"b"]


def test_sender_may_reuse_buffer(calls, session, services):
    buffer = bytearray(wire.CHUNK)
    call = calls.begin("Put", session.token)
    for value in range(20):
        buffer[:] = bytes([value]) * len(buffer)
        call.send(memoryview(buffer))
    call.end()
    assert call.receive() is None
    assert [set(piece) for piece in services.received] == [{value} for value in range(20)]


def test_stream_answers_each_request(calls):
    call = calls.begin("Clock")
    for number in range(5):
        call.send(pb.ClockPing())
        assert call.receive().clock_ns == number
    call.end()
    assert call.receive() is None


def test_half_closed_call_still_receives(calls):
    call = calls.begin("Clock")
    for _ in range(5):
        call.send(pb.ClockPing())
    call.end()
    assert [pong.clock_ns for pong in call] == [0, 1, 2, 3, 4]


def test_stream_without_requests_ends(calls, session):
    call = calls.begin("Put", session.token)
    call.end()
    assert call.receive() is None


def test_concurrent_calls_are_independent(calls, session):
    made = [ask(calls, session, str(number)) for number in range(6)]
    assert [call.receive().missing[0].digest for call in reversed(made)] == list("543210")


def test_server_counts_as_answering(calls):
    assert calls.is_answered(5.0)


# ---- errors


def test_unary_call_reports_typed_error(calls, session):
    with pytest.raises(CallFailed) as caught:
        ask(calls, session).receive()
    found = error_of(caught.value)
    assert isinstance(found, errors.UsageError)
    assert (found.message, found.hint) == ("no digest", "send one")
    assert found.detail.startswith("[cut: 5000 bytes in all]")


@pytest.mark.parametrize(("method", "token"), [("Put", "no token"), ("Put", ""), ("Get", "x" * 2000)])
def test_call_without_session_token_raises_session_ended(calls, session, method, token):
    with pytest.raises(CallFailed) as caught:
        call = calls.begin(method, token)
        call.send(START if method == "Put" else pb.GetRequest())
        call.receive()
    assert isinstance(error_of(caught.value), errors.SessionEnded)


@pytest.mark.parametrize("token", ["", "another"])
def test_call_requires_agent_token(serve, connect, token):
    serve("secret")
    with pytest.raises(CallFailed) as caught:
        call = connect(token).begin("Clock")
        call.send(pb.ClockPing())
        call.receive()
    assert isinstance(error_of(caught.value), errors.BoardRefused)


def test_call_with_agent_token_succeeds(serve, connect):
    serve("secret")
    call = connect("secret").begin("Clock")
    call.send(pb.ClockPing())
    assert call.receive().clock_ns == 0


def test_upload_receives_early_error(calls, session, services):
    """The remaining data would never fit into the agent's buffers."""
    services.fail_after = 3
    call = calls.begin("Put", session.token)
    call.send(START)
    with pytest.raises(CallFailed) as caught:
        for _ in range(1000):
            call.send(PIECE)
    found = error_of(caught.value)
    assert isinstance(found, errors.LoadFailed)
    assert (found.message, found.hint) == ("the disk is full", "make room")


def test_undecodable_request_raises_usage_error(calls):
    call = calls.begin("Clock")
    call.stream.send(MESSAGE, b"\xff\xff")
    with pytest.raises(CallFailed, match="not a valid protocol message") as caught:
        call.receive()
    assert isinstance(error_of(caught.value), errors.UsageError)


def test_oversized_request_raises_usage_error(calls):
    call = calls.begin("Clock")
    call.stream.send(MESSAGE, bytes(1 << 17))
    with pytest.raises(CallFailed, match="maximum 65536") as caught:
        call.receive()
    assert isinstance(error_of(caught.value), errors.UsageError)


# ---- cancellation and deadlines


def test_cancel_wakes_waiting_receiver(calls, session):
    call = calls.begin("Put", session.token)
    threading.Timer(0.2, call.cancel).start()
    began = time.monotonic()
    with pytest.raises(CallFailed):
        call.receive()
    assert time.monotonic() - began < 20


def test_cancel_ends_handler(calls, session, services):
    call = calls.begin("Counters", session.token)
    call.send(pb.CountersRequest())
    assert next(call).clock_ns == 1
    call.cancel()
    eventually(lambda: not services.open_calls)


def test_cancel_of_finished_call_leaves_other_calls(calls, session):
    first = ask(calls, session, "a")
    assert first.receive()
    second = ask(calls, session, "b")
    first.cancel()
    assert [one.digest for one in second.receive().missing] == ["b"]


def test_cancel_ends_calls_of_given_session(calls, session):
    call = calls.begin("Put", session.token)
    calls.cancel("another")
    call.send(START)
    assert call.receive() == pb.PutReply(digest=START.start.digest)
    calls.cancel(session.token)
    with pytest.raises(CallFailed):
        call.receive()


@pytest.mark.ci
def test_call_ends_with_session(calls, sessions, session):
    call = calls.begin("Put", session.token)
    call.send(START)
    assert call.receive()
    sessions.end(session, "enough")
    with pytest.raises(CallFailed):
        call.receive()


def test_call_without_progress_exceeds_deadline(calls, session, folder):
    connection = AgentConnection(AgentEndpoint(f"unix:{folder}/agent"), "board")
    with contextlib.closing(connection):
        connection._calls = SimpleNamespace(  # type: ignore[assignment]
            begin=lambda method, _, **settings: calls.begin(method, session.token, **settings), close=lambda: None
        )
        began = time.monotonic()
        with pytest.raises(CallFailed) as caught:
            connection._call_unary("Missing", pb.MissingRequest(digests=["wait"]), 0.5)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert 0.2 < time.monotonic() - began < 20


# ---- dead and hostile agents


def test_dead_agent_ends_open_call(serve, connect, session):
    server = serve()
    call = connect().begin("Put", session.token)
    call.send(START)
    assert call.receive()
    server.close()
    with pytest.raises(CallFailed):
        call.receive()


def test_call_to_restarted_agent_succeeds(serve, connect, session):
    server = serve()
    calls = connect()
    assert ask(calls, session, "a").receive()
    server.close()
    serve()
    call = calls.begin("Missing", session.token, waits=True)
    call.send(pb.MissingRequest(digests=["b"]))
    assert call.receive()


def test_absent_agent_fails_call(folder):
    with contextlib.closing(AgentCalls(AgentEndpoint(f"unix:{folder}/agent"))) as calls:
        assert not calls.is_answered(0.2)
        call = calls.begin("Clock")
        with pytest.raises(CallFailed):
            call.receive()


@pytest.fixture
def lie(transport: str, folder: Path) -> Iterator[Callable[..., None]]:
    """Return a function that starts an agent which replies with given frames to every call, and then is silent."""
    over = threading.Event()

    def speak(frames: Frames, said: list[tuple[int, bytes]]) -> None:
        with contextlib.closing(frames), contextlib.suppress(ConnectionBroken):
            frames.begin()
            frames.send(READY)
            for kind, content in said:
                frames.send(kind, content)
            over.wait(60)

    with contextlib.ExitStack() as started:

        def start(*said: tuple[int, bytes]) -> None:
            if transport == DATA_CONNECTION:
                listener = started.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(f"{folder}/agent.data")
                listener.listen()
                work = threading.Thread(target=lambda: speak(Frames(listener.accept()[0]), list(said)))
                work.start()
                started.callback(work.join)
            else:
                server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[_Liar(said, over)])
                server.add_insecure_port(f"unix:{folder}/agent")
                server.start()
                started.callback(lambda: server.stop(0).wait())

        yield start
        over.set()


class _Liar(grpc.GenericRpcHandler):
    def __init__(self, said: tuple[tuple[int, bytes], ...], over: threading.Event) -> None:
        self._said, self._over = said, over

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self._speak)

    def _speak(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for kind, content in self._said:
            if kind == END:
                return
            yield grpc_calls.encode(memoryview(content)) if kind == DATA else content
        self._over.wait(60)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("Put", (MESSAGE, b"\xff\xff")),
        ("Put", (MESSAGE, pb.PutReply(digest="x" * 2000).SerializeToString())),
        ("Get", (MESSAGE, bytes(3 << 20))),
        ("Get", (DATA, b"abc")),
        ("Invoke", (DATA, b"abc")),
    ],
)
def test_invalid_reply_raises_protocol_broken(lie, connect, method, said):
    lie(said)
    call = connect().begin(method, "token")
    call.send(pb.GetRequest() if method == "Get" else START)
    with pytest.raises(errors.ProtocolBroken):
        call.receive()


@pytest.mark.parametrize(
    "said",
    [(DATA, b""), (DATA, b"abcdef"), (MESSAGE, pb.GetReply(start=pb.GetStart(size=3)).SerializeToString()), (END, b"")],
)
def test_unfitting_data_raises_protocol_broken(lie, connect, said):
    lie(said)
    call = connect().begin("Get", "token")
    call.send(pb.GetRequest())
    with pytest.raises(errors.ProtocolBroken):
        call.receive_into(memoryview(bytearray(5)))


def test_data_with_unknown_fields_is_accepted(lie, connect):
    lie((MESSAGE, b"\xfa\x3f\x01x" + pb.GetReply(data=b"abc").SerializeToString()))
    call = connect().begin("Get", "token")
    call.send(pb.GetRequest())
    view = memoryview(bytearray(5))
    assert call.receive_into(view) == 3
    assert bytes(view[:3]) == b"abc"


def test_upload_ended_by_agent_raises_protocol_broken(lie, connect):
    lie((END, b""))
    call = connect().begin("Put", "token")
    with pytest.raises(errors.ProtocolBroken, match="the call ended before the upload finished"):
        for _ in range(1000):
            call.send(PIECE)
