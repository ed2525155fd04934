"""Calls over data connections: refusals, failures during a call, broken connections, invalid peers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import eventually

from hil import errors
from hil.agent import admission, data_server
from hil.agent.admission import Admission
from hil.agent.calls import Calls
from hil.agent.data_server import DataServer
from hil.agent.session import Journal, Session, Sessions
from hil.controller.devices.agent_client.call import Call, CallFailed
from hil.controller.devices.agent_client.calls import OPEN_SECONDS, AgentCalls
from hil.controller.devices.agent_client.data_stream import DataConnections, NoDataConnection
from hil.controller.devices.agent_client.grpc_stream import GrpcStream
from hil.controller.devices.board_client import AgentEndpoint
from hil.core.scratch import make_folder, remove_tree
from hil.protocol import wire, wire_errors
from hil.protocol.data_connection import END, HEADER, MESSAGE, METHODS, READY, ConnectionBroken, Frames
from hil.protocol.v1 import agent_pb2 as pb

START = pb.PutRequest(start=pb.PutStart(digest="blake3:" + "0" * 64, size=1))
PIECE = memoryview(bytes(wire.CHUNK))


class Blobs:
    """Fake blob service."""

    def put(self, requests, context):
        for message in requests:
            if isinstance(message, pb.PutRequest):
                yield pb.PutReply(digest=message.start.digest)

    def missing(self, request, context):
        if not request.digests:
            raise errors.UsageError("nothing is asked for")
        return pb.MissingReply(missing=[pb.MissingBlob(digest=one) for one in request.digests])

    def get(self, request, context):
        yield pb.GetReply(start=pb.GetStart(size=3))
        yield memoryview(b"abc")


@pytest.fixture
def folder() -> Iterator[Path]:
    made = make_folder("hil-data-", for_sockets=True)
    yield made
    remove_tree(made)


@pytest.fixture
def sessions(folder: Path) -> Sessions:
    return Sessions(folder / "fence", lambda: None, Journal(folder / "journal"))


@pytest.fixture
def session(sessions: Sessions) -> Session:
    opened = sessions.open("me", "test", 60, 0, lambda reason: None)
    assert opened
    return opened


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


def called(path: str, method: str, session: str, token: str = "") -> Call:
    return begin(DataConnections(path, token), method, session)


def begin(connections: DataConnections, method: str, session: str) -> Call:
    return Call(METHODS[method], connections.open(method, session, OPEN_SECONDS))


@pytest.fixture
def path(folder: Path, sessions: Sessions, blobs: Blobs) -> Iterator[str]:
    services = {"Blobs": SimpleNamespace(Put=blobs.put, Get=blobs.get, Missing=blobs.missing)}
    server = DataServer(f"{folder}/agent.data", Calls(Admission(sessions), services, ""))
    with contextlib.closing(server):
        yield f"{folder}/agent.data"


@pytest.mark.parametrize(("method", "message"), [("Missing", PIECE), ("Put", pb.PutRequest(data=b"abc"))])
def test_call_rejects_misplaced_data(path, session, method, message):
    call = called(path, method, session.token)
    call.send(message)
    with pytest.raises(CallFailed, match="data") as caught:
        call.receive()
    assert isinstance(wire_errors.decode_error(caught.value.error), errors.UsageError)


def test_socket_has_private_mode(path):
    assert Path(path).stat().st_mode & 0o777 == 0o700


@pytest.fixture
def connections(path: str) -> Iterator[DataConnections]:
    made = DataConnections(path, "")
    yield made
    made.close()


def ask(connections: DataConnections, session: Session, *digests: str) -> list[str]:
    call = begin(connections, "Missing", session.token)
    call.send(pb.MissingRequest(digests=digests))
    return [one.digest for one in call.receive().missing]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Frames]:
    """Record the opened connections."""
    made: list[Frames] = []
    connect = DataConnections._connect

    def counting(self: DataConnections, within_s: float) -> Frames:
        made.append(connect(self, within_s))
        return made[-1]

    monkeypatch.setattr(DataConnections, "_connect", counting)
    return made


def test_connection_serves_consecutive_calls(connections, opened, session):
    for number in range(20):
        assert ask(connections, session, str(number)) == [str(number)]
    call = begin(connections, "Put", session.token)
    call.send(START)
    call.end()
    assert (call.receive(), call.receive()) == (pb.PutReply(digest=START.start.digest), None)
    assert ask(connections, session, "last") == ["last"]
    assert len(opened) == 1


def test_cancelling_finished_call_leaves_connection_open(connections, opened, session):
    first = begin(connections, "Missing", session.token)
    first.send(pb.MissingRequest(digests=["a"]))
    assert first.receive()
    second = begin(connections, "Missing", session.token)
    first.cancel()
    second.send(pb.MissingRequest(digests=["b"]))
    assert [one.digest for one in second.receive().missing] == ["b"]
    assert len(opened) == 1


def test_failed_call_closes_connection(connections, opened, session):
    with pytest.raises(CallFailed):
        ask(connections, session)
    assert ask(connections, session, "a") == ["a"]
    assert len(opened) == 2


def test_unfinished_call_closes_connection(connections, opened, session):
    call = begin(connections, "Put", session.token)
    call.send(START)
    assert call.receive()
    call.cancel()
    assert ask(connections, session, "a") == ["a"]
    assert len(opened) == 2


def test_concurrent_calls_use_separate_connections(connections, opened, session):
    calls = [begin(connections, "Missing", session.token) for _ in range(6)]
    for number, call in enumerate(calls):
        call.send(pb.MissingRequest(digests=[str(number)]))
    assert [call.receive().missing[0].digest for call in calls] == list("012345")
    assert len(opened) == 6
    assert ask(connections, session, "a") == ["a"]
    assert len(opened) == 6


def test_ending_every_call_raises_data_connection_error(folder):
    def end_all(frames: Frames, connected: socket.socket) -> None:
        while (begun := frames.begin()) is not None:
            frames.content(begun[1])
            frames.send(END)

    with peer(folder, end_all) as path:
        connections = DataConnections(path, "")
        with pytest.raises(NoDataConnection):
            connections.open("Missing", "token", OPEN_SECONDS)
        assert not connections._resting
        connections.close()


def test_agent_limits_idle_connections(folder, sessions, session, blobs, monkeypatch):
    monkeypatch.setattr(admission, "MAX_IDLE_CONNECTIONS", 2)
    path = f"{folder}/few.data"
    with contextlib.closing(
        DataServer(path, Calls(Admission(sessions), {"Blobs": SimpleNamespace(Missing=blobs.missing)}, ""))
    ):
        callers = [DataConnections(path, "") for _ in range(8)]
        for caller in callers * 3:
            assert ask(caller, session, "a") == ["a"], "one that was ended is made anew"
        for caller in callers:
            caller.close()


def test_calls_use_new_connections_without_idle_slots(folder, sessions, session, blobs, opened):
    admitting = Admission(sessions)
    admitting.resting._inside = 2 * admission.MAX_IDLE_CONNECTIONS
    path = f"{folder}/full.data"
    connections = DataConnections(path, "")
    with contextlib.closing(DataServer(path, Calls(admitting, {"Blobs": SimpleNamespace(Missing=blobs.missing)}, ""))):
        for _ in range(5):
            assert ask(connections, session, "a") == ["a"]
        connections.close()
    assert len(opened) == 5


def test_calls_fall_back_to_grpc_without_data_socket(folder):
    with contextlib.closing(AgentCalls(AgentEndpoint(f"unix:{folder}/nothing"))) as calls:
        assert isinstance(calls.begin("Put", "token").stream, GrpcStream)
        assert not calls.is_answered(0.2)


def test_unknown_data_method_falls_back_to_grpc(folder, monkeypatch):
    def refuse(frames: Frames, connected: socket.socket) -> None:
        frames.begin()
        error = wire_errors.to_message(errors.UsageError("'Describe' is no method of data connections"))
        frames.send(END, error.SerializeToString())

    for method, session in (("Describe", ""), ("Counters", "token")):
        with (
            peer(folder, refuse) as path,
            contextlib.closing(AgentCalls(AgentEndpoint(f"unix:{folder}/agent"))) as calls,
        ):
            monkeypatch.setattr(calls, "_data", DataConnections(path, ""))
            assert isinstance(calls.begin(method, session).stream, GrpcStream)


def test_refusing_agent_counts_as_answering(folder, monkeypatch):
    def refuse(frames: Frames, connected: socket.socket) -> None:
        frames.begin()
        frames.send(END, wire_errors.to_message(errors.BoardBusy("too many calls")).SerializeToString())

    with peer(folder, refuse) as path, contextlib.closing(AgentCalls(AgentEndpoint(f"unix:{folder}/agent"))) as calls:
        monkeypatch.setattr(calls, "_data", DataConnections(path, ""))
        assert calls.is_answered(5.0)


def test_silent_agent_raises_deadline_exceeded(folder):
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(f"{folder}/hung.data")
        hung.listen()
        calls = AgentCalls(AgentEndpoint(f"unix:{folder}/hung"))
        assert not calls.is_answered(0.2)
        with pytest.raises(CallFailed) as caught:
            calls.begin("Describe", within_s=0.2)
    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_grpc_call_sends_request_before_waiting():
    begun: list[object] = []

    def future(request):
        begun.append(request)
        return SimpleNamespace(result=lambda: b"", cancel=lambda: None)

    call = Call(METHODS["Unload"], GrpcStream(SimpleNamespace(future=future), METHODS["Unload"]))
    call.send(pb.UnloadRequest(program_id="p"))
    assert begun == [pb.UnloadRequest(program_id="p").SerializeToString()]
    assert call.receive() == pb.UnloadReply()


def test_cancelled_grpc_call_raises_call_failed():
    def cancelled():
        raise grpc.FutureCancelledError

    called = SimpleNamespace(future=lambda _: SimpleNamespace(result=cancelled))
    call = Call(METHODS["Unload"], GrpcStream(called, METHODS["Unload"]))
    call.send(pb.UnloadRequest(program_id="p"))
    with pytest.raises(CallFailed):
        call.receive()


def test_grpc_call_on_closed_channel_raises_call_failed():
    calls = AgentCalls(AgentEndpoint("127.0.0.1:1"))
    calls.close()
    call = calls.begin("Describe")
    with pytest.raises(CallFailed, match="closed"):
        call.send(pb.DescribeRequest())


def test_grpc_fallback_records_cause(folder):
    with contextlib.closing(AgentCalls(AgentEndpoint(f"unix:{folder}/agent"))) as calls:
        calls.begin("Put", "token")
        assert calls.fallback == "", "there is no socket for data connections"
        Path(f"{folder}/agent.data").touch()
        calls.begin("Put", "token")
        assert "refused" in calls.fallback


def test_data_server_limits_unread_failed_calls(folder, sessions, monkeypatch):
    monkeypatch.setattr(data_server, "_MAX_UNREAD", 1)
    monkeypatch.setattr(data_server, "_UNREAD_SECONDS", 600.0)
    before = sum(thread.name == "data-call" for thread in threading.enumerate())
    with (
        contextlib.closing(DataServer(f"{folder}/few.data", Calls(Admission(sessions), {}, ""))),
        contextlib.ExitStack() as kept,
    ):
        made = [kept.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(6)]
        for connected in made:
            connected.settimeout(30)
            connected.connect(f"{folder}/few.data")
            connected.sendall(HEADER.pack(MESSAGE, 0))
        eventually(lambda: sum(thread.name == "data-call" for thread in threading.enumerate()) <= before + 2)


def test_call_end_waits_briefly_for_silent_caller(monkeypatch):
    monkeypatch.setattr(data_server, "_FINAL_FRAME_SECONDS", 0.3)
    here, there = socket.socketpair()
    with contextlib.closing(Frames(here)) as frames, there:
        here.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while here.send(bytes(1)):
                pass
        here.setblocking(True)
        with pytest.raises(ConnectionBroken):
            data_server._send_last(frames)


@contextlib.contextmanager
def peer(folder: Path, serve: Callable[[Frames, socket.socket], None]) -> Iterator[str]:
    """Serve one connection with a fake peer."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/peer")
        listener.listen()

        def run() -> None:
            connected, _ = listener.accept()
            frames = Frames(connected)
            with contextlib.closing(frames):
                serve(frames, connected)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"{folder}/peer"
        thread.join()
    Path(f"{folder}/peer").unlink()


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x02\x01\x00\x00\x00x", b"\x05\x09\x00\x00\x00cut"]
)
def test_invalid_acceptance_raises_data_connection_error(folder, said):
    def serve(frames: Frames, connected: socket.socket) -> None:
        frames.begin()
        connected.sendall(said)

    with peer(folder, serve) as path, pytest.raises(NoDataConnection):
        called(path, "Put", "token")


@pytest.mark.parametrize(
    ("kind", "content"),
    [(READY, b""), (77, b""), (END, bytes(1 << 17))],
)
def test_invalid_frame_raises_protocol_broken(folder, kind, content):
    def serve(frames: Frames, connected: socket.socket) -> None:
        frames.begin()
        frames.send(READY)
        with contextlib.suppress(ConnectionBroken):  # The client may disconnect before it has received all bytes.
            frames.send(kind, content)

    with peer(folder, serve) as path, pytest.raises(errors.ProtocolBroken):
        called(path, "Put", "token").receive()


@pytest.mark.parametrize("cut", [b"", b"\x03", b"\x04\x05\x00\x00\x00ab"])
def test_interrupted_connection_raises_call_failed(folder, cut):
    def serve(frames: Frames, connected: socket.socket) -> None:
        frames.begin()
        frames.send(READY)
        connected.sendall(cut)

    with peer(folder, serve) as path, pytest.raises(CallFailed, match="broke"):
        called(path, "Get", "token").receive_into(memoryview(bytearray(5)))


@given(st.binary(max_size=300))
def test_data_server_survives_any_bytes(server_path, said):
    with socket.socket(socket.AF_UNIX) as connected:
        connected.settimeout(30)
        connected.connect(server_path)
        with contextlib.suppress(OSError):
            connected.sendall(said)
            connected.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while connected.recv(1 << 16):
                pass


@pytest.fixture(scope="module")
def server_path() -> Iterator[str]:
    folder = make_folder("hil-data-", for_sockets=True)
    sessions = Sessions(folder / "fence", lambda: None, Journal(folder / "journal"))
    services = {"Blobs": SimpleNamespace(Put=Blobs().put, Get=Blobs().get)}
    with contextlib.closing(DataServer(f"{folder}/data", Calls(Admission(sessions), services, ""))):
        yield f"{folder}/data"
    remove_tree(folder)


@given(st.lists(st.binary(max_size=70_000), max_size=6))
def test_frames_round_trip(contents):
    here, there = socket.socketpair()
    sender, receiver = Frames(here), Frames(there)
    with contextlib.closing(sender), contextlib.closing(receiver):

        def send() -> None:
            for content in contents:
                sender.send(MESSAGE, content)
            sender.hang_up()

        thread = threading.Thread(target=send)
        thread.start()
        found = []
        while (begun := receiver.begin()) is not None:
            assert begun[0] == MESSAGE
            found.append(receiver.content(begun[1]))
        thread.join()
    assert found == contents
