"""Calls over data connections: an agent that refuses, fails in the middle, breaks off, or is none of hil's."""

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

from hil import errors
from hil.agent.admission import Admission
from hil.agent.data_server import DataServer
from hil.agent.session import Journal, Session, Sessions
from hil.controller.devices.calls import CallFailed, DataCall, GrpcCall, NoDataConnection, open_call
from hil.core.scratch import new_folder, remove_tree
from hil.protocol import wire, wire_errors
from hil.protocol.data_connection import DATA, END, MESSAGE, READY, Frames
from hil.protocol.v1 import agent_pb2 as pb

START = pb.PutRequest(start=pb.PutStart(digest="blake3:" + "0" * 64, size=1))
PIECE = memoryview(bytes(wire.CHUNK))


class Blobs:
    """Takes what it is sent, and fails where it is told to."""

    def __init__(self) -> None:
        self.got: list[object] = []
        self.fail_after = 1 << 30

    def put(self, requests, context):
        for message in requests:
            self.got.append(message if isinstance(message, pb.PutRequest) else bytes(message))
            if len(self.got) > self.fail_after:
                raise errors.LoadFailed("the disk is full", hint="make room")
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
    made = new_folder("hil-data-", for_sockets=True)
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


@pytest.fixture
def path(folder: Path, sessions: Sessions, blobs: Blobs) -> Iterator[str]:
    server = DataServer(
        f"{folder}/agent.data",
        Admission(sessions),
        {"Blobs": SimpleNamespace(Put=blobs.put, Get=blobs.get, Missing=blobs.missing)},
    )
    with contextlib.closing(server):
        yield f"{folder}/agent.data"


def test_messages_and_data_arrive_in_order(path, session, blobs):
    call = DataCall(path, "Put", session.token)
    call.send(START)
    call.send(PIECE)
    call.send(memoryview(b"a"))
    call.end()
    assert call.receive() == pb.PutReply(digest=START.start.digest)
    assert call.receive() is None
    assert call.receive() is None
    assert blobs.got == [START, bytes(PIECE), b"a"]


def test_a_call_of_one_message_is_answered(path, session):
    call = DataCall(path, "Get", session.token)
    call.send(pb.GetRequest(digest=START.start.digest))
    assert call.receive().start.size == 3
    found = memoryview(bytearray(5))
    assert call.receive_into(found) == 3
    assert bytes(found[:3]) == b"abc"
    assert call.receive() is None


def test_a_call_with_one_answer_ends_with_it(path, session):
    call = DataCall(path, "Missing", session.token)
    call.send(pb.MissingRequest(digests=["a", "b"]))
    assert [one.digest for one in call.receive().missing] == ["a", "b"]
    assert call.receive() is None


def test_a_call_with_one_answer_may_end_with_an_error_instead(path, session):
    call = DataCall(path, "Missing", session.token)
    call.send(pb.MissingRequest())
    with pytest.raises(CallFailed) as caught:
        call.receive()
    assert isinstance(found := wire_errors.of_call(caught.value), errors.UsageError)
    assert found.message == "nothing is asked for"


@pytest.mark.parametrize(("method", "token"), [("Put", "no token"), ("Put", ""), ("Get", "x" * 2000)])
def test_a_call_without_the_sessions_token_is_refused(path, session, method, token):
    with pytest.raises(CallFailed) as caught:
        DataCall(path, method, token)
    assert isinstance(wire_errors.of_call(caught.value), errors.SessionEnded)


def test_what_an_agent_says_in_the_middle_of_an_upload_is_heard(path, session, blobs):
    """Though all that is sent would never fit what the agent still reads."""
    blobs.fail_after = 3
    call = DataCall(path, "Put", session.token)
    call.send(START)
    with pytest.raises(CallFailed) as caught:
        for _ in range(1000):
            call.send(PIECE)
    found = wire_errors.of_call(caught.value)
    assert isinstance(found, errors.LoadFailed)
    assert (found.message, found.hint) == ("the disk is full", "make room")


def test_a_cancelled_call_wakes_up_whoever_waits_in_it(path, session):
    call = DataCall(path, "Put", session.token)
    threading.Timer(0.2, call.cancel).start()
    with pytest.raises(CallFailed, match="broke"):
        call.receive()


def test_a_call_ends_with_its_session(path, sessions, session):
    call = DataCall(path, "Put", session.token)
    sessions.end(session, "enough")
    with pytest.raises(CallFailed):
        call.receive()


def test_the_socket_is_its_users_alone(path):
    assert Path(path).stat().st_mode & 0o777 == 0o700


def test_where_nobody_takes_data_connections_the_call_goes_over_grpc(folder):
    stub = SimpleNamespace(Put=lambda requests, metadata: iter([]))
    call = open_call(stub, "Put", [(wire.SESSION_KEY, "token")], f"{folder}/nothing.data")
    assert isinstance(call, GrpcCall)


def test_over_grpc_a_call_with_one_answer_is_begun_and_its_answer_waited_for_later():
    begun: list[object] = []

    def future(request, metadata):
        begun.append(request)
        return SimpleNamespace(result=lambda: pb.UnloadReply(), cancel=lambda: None)

    call = open_call(SimpleNamespace(Unload=SimpleNamespace(future=future)), "Unload", [], "")
    call.send(pb.UnloadRequest(program_id="p"))
    assert begun == [pb.UnloadRequest(program_id="p")]
    assert call.receive() == pb.UnloadReply()


def test_over_grpc_a_call_that_was_ended_here_fails_as_any_other():
    def cancelled():
        raise grpc.FutureCancelledError

    ended = SimpleNamespace(result=cancelled)
    call = open_call(SimpleNamespace(Unload=SimpleNamespace(future=lambda _, metadata: ended)), "Unload", [], "")
    call.send(pb.UnloadRequest(program_id="p"))
    with pytest.raises(CallFailed):
        call.receive()


@contextlib.contextmanager
def peer(folder: Path, serve: Callable[[Frames, socket.socket], None]) -> Iterator[str]:
    """Somebody who answers one connection."""
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
def test_who_does_not_take_the_call_on_has_not_begun_it(folder, said):
    def serve(frames: Frames, connected: socket.socket) -> None:
        frames.begin()
        connected.sendall(said)

    with peer(folder, serve) as path, pytest.raises(NoDataConnection):
        DataCall(path, "Put", "token")


@pytest.mark.parametrize(
    ("kind", "content"),
    [(DATA, b"abc"), (MESSAGE, b"\xff\xff"), (MESSAGE, bytes(2000)), (READY, b""), (77, b""), (END, bytes(1 << 17))],
)
def test_an_answer_that_makes_no_sense_is_told_as_that(folder, kind, content):
    def serve(frames: Frames, connected: socket.socket) -> None:
        frames.begin()
        frames.send(READY)
        frames.send(kind, content)

    with peer(folder, serve) as path, pytest.raises(errors.ProtocolBroken):
        DataCall(path, "Put", "token").receive()


@pytest.mark.parametrize("content", [b"", b"abcdef"])
def test_data_that_does_not_fit_is_told_as_that(folder, content):
    def serve(frames: Frames, connected: socket.socket) -> None:
        frames.begin()
        frames.send(READY)
        frames.send(DATA, content)

    with peer(folder, serve) as path, pytest.raises(errors.ProtocolBroken):
        DataCall(path, "Get", "token").receive_into(memoryview(bytearray(5)))


@pytest.mark.parametrize("cut", [b"", b"\x03", b"\x04\x05\x00\x00\x00ab"])
def test_a_connection_that_breaks_off_is_a_broken_call(folder, cut):
    def serve(frames: Frames, connected: socket.socket) -> None:
        frames.begin()
        frames.send(READY)
        connected.sendall(cut)

    with peer(folder, serve) as path, pytest.raises(CallFailed, match="broke"):
        DataCall(path, "Get", "token").receive_into(memoryview(bytearray(5)))


@given(st.binary(max_size=300))
def test_no_bytes_end_the_server(server_path, said):
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
    folder = new_folder("hil-data-", for_sockets=True)
    sessions = Sessions(folder / "fence", lambda: None, Journal(folder / "journal"))
    with contextlib.closing(
        DataServer(f"{folder}/data", Admission(sessions), {"Blobs": SimpleNamespace(Put=Blobs().put, Get=Blobs().get)})
    ):
        yield f"{folder}/data"
    remove_tree(folder)


@given(st.lists(st.binary(max_size=70_000), max_size=6))
def test_frames_arrive_as_they_were_sent(contents):
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
