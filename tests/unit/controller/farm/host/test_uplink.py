"""Calls that a host's uplink carries, to gateways of the test's own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.uplinks import serving, uplink
from support.waiting import eventually

from hil.controller.farm.host.uplink import listen
from hil.controller.farm.host.uplink_call import UplinkCall, ask
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import methods
from hil.errors import AccessRefused, FarmError, FarmUnreachable, HilError, StorageError, UsageError
from hil.protocol import grpc_calls, wire_errors
from hil.protocol.data_connection import CALL, END, HEADER, MESSAGE, Frames
from hil.protocol.v1 import farm_pb2 as pb

WAIT_S = 30.0
REPORT = pb.ReportRequest(lease=5, worker="w", fence=3)
# An uplink whose event loop stands still as soon as anybody calls.
STUCK = """
import pathlib, sys, time
from hil.controller.farm.host import uplink
from hil.controller.farm.paths import FarmAddress

uplink._STUCK_S = 0.4
uplink.Uplink._linked = lambda _: time.sleep(60)
with uplink.listen(pathlib.Path(sys.argv[1])) as listening:
    print("listening", flush=True)
    uplink.run(FarmAddress(("127.0.0.1:1",), ""), listening)
"""


class Gateway:
    """The methods Attend, which answers each message with a beat, and Report, which answers what is set."""

    def __init__(self, most_bytes: int = -1, port: str = "0") -> None:
        self.callers: list[str] = []
        self.ended = threading.Event()
        self.error: HilError | None = None
        self.silent = threading.Event()
        self.reads = True
        pool = concurrent.futures.ThreadPoolExecutor(16)
        options = {**dict(grpc_calls.GRPC_OPTIONS), "grpc.max_receive_message_length": most_bytes}
        self._server = grpc.server(pool, options=list(options.items()))
        table = {}
        for name, path, kind, asked, answered in methods("Hosts"):
            service = path.strip("/").rpartition("/")[0]
            if behaviour := getattr(self, name.lower(), None):
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                table[name] = make(behaviour, asked.FromString, answered.SerializeToString)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, table)])
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def stop(self) -> None:
        self.silent.clear()
        self._server.stop(0).wait()

    def attend(self, requests: Iterator[pb.FromBoard], context: Any) -> Iterator[pb.ToBoard]:
        self._enter(context)
        if not context.add_callback(self.ended.set):  # it has ended before it got here
            self.ended.set()
        while not self.reads and context.is_active():
            self.ended.wait(0.05)
        for _ in requests:
            yield pb.ToBoard(beat=pb.Beat())

    def report(self, request: pb.ReportRequest, context: Any) -> pb.ReportReply:
        self._enter(context)
        while self.silent.is_set() and context.is_active():
            self.ended.wait(0.05)
        assert request == REPORT
        return pb.ReportReply(recorded=True)

    def _enter(self, context: Any) -> None:
        assert dict(context.invocation_metadata())["authorization"] == "Bearer secret"
        self.callers.append(context.peer())
        if self.error is not None:
            sent = wire_errors.to_message(self.error).SerializeToString()
            context.set_trailing_metadata(((wire_errors.ERROR_KEY, sent),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.stop()


@pytest.fixture
def other() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.stop()


@pytest.fixture
def path(gateway: Gateway, other: Gateway, tmp_path: Path) -> Iterator[Path]:
    with uplink(FarmAddress((gateway.address, other.address), "secret"), tmp_path / "uplink") as path:
        yield path


@contextlib.contextmanager
def attending(path: Path) -> Iterator[tuple[UplinkCall, Iterator[Any]]]:
    call = UplinkCall(path, "Attend")
    try:
        call.within(WAIT_S)
        call.send(pb.FromBoard(beat=pb.BoardBeat()))
        replies = call.replies()
        assert next(replies).WhichOneof("kind") == "beat"
        yield call, replies
    finally:
        call.close()


def test_all_calls_go_over_one_connection_and_say_which_gateway_it_leads_to(gateway, path):
    with attending(path) as (one, _), attending(path) as (another, _):
        assert ask(path, "Report", REPORT, WAIT_S) == pb.ReportReply(recorded=True)
        assert one.gateway == another.gateway == gateway.address
    assert len(gateway.callers) == 3 and len(set(gateway.callers)) == 1


def test_many_that_call_at_once_wait_for_one_connection(gateway, path):
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda _: ask(path, "Report", REPORT, WAIT_S), range(64)))
    assert all(answer.recorded for answer in answers)
    assert len(gateway.callers) == 64 and len(set(gateway.callers)) == 1


def test_a_call_ends_when_either_side_has_said_all(gateway, path):
    with attending(path) as (call, replies):
        call.send(None)
        assert list(replies) == []


def test_who_hangs_up_cancels_its_call(gateway, path):
    with attending(path):
        assert not gateway.ended.is_set()
    assert gateway.ended.wait(WAIT_S)


def test_who_hangs_up_on_a_gateway_that_reads_nothing_cancels_its_call_after_a_while(gateway, path, monkeypatch):
    monkeypatch.setattr("hil.controller.farm.host.uplink.SILENT_S", 0.5)
    gateway.reads = False
    call = UplinkCall(path, "Attend")
    for _ in range(12):  # more than is on its way at a time
        call.send(pb.FromBoard(printed=pb.Printed(lease=5, text="x" * 100_000)))
    call.close()
    assert gateway.ended.wait(WAIT_S)


def test_what_nobody_thought_of_is_told_and_tried_anew(gateway, path, monkeypatch):
    def no_threads(gateway: str) -> bool:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("hil.controller.farm.client._listens", no_threads)
    with pytest.raises(FarmUnreachable, match="RuntimeError: can't start new thread"):
        ask(path, "Report", REPORT, WAIT_S)
    assert ask(path, "Report", REPORT, WAIT_S).recorded


def test_a_report_that_a_gateway_finds_too_large_is_refused_and_not_taken_for_a_broken_link(tmp_path):
    small = Gateway(most_bytes=1000)
    with uplink(FarmAddress((small.address,), "secret"), tmp_path / "uplink") as path:
        large = pb.ReportRequest(lease=5, worker="w" * 2000)
        with pytest.raises(FarmError, match="larger") as caught:
            ask(path, "Report", large, WAIT_S)
        assert not isinstance(caught.value, FarmUnreachable)
    small.stop()


def test_where_there_can_be_no_socket_it_is_told(tmp_path):
    with pytest.raises(StorageError, match="cannot be listened at") as caught:
        listen(tmp_path / ("long" * 40))
    assert "TMPDIR" in caught.value.hint


def test_a_message_as_large_as_many_pieces_arrives_whole(gateway, path):
    with attending(path) as (call, replies):
        call.send(pb.FromBoard(printed=pb.Printed(lease=5, text="x" * 3_000_000)))
        assert next(replies).WhichOneof("kind") == "beat"


@pytest.mark.parametrize("error", [AccessRefused("not yours", hint="ask"), UsageError("no"), FarmError("broken")])
def test_what_a_gateway_ends_a_call_with_is_told_as_it_is_and_the_connection_stays(gateway, path, error):
    gateway.error = error
    with pytest.raises(type(error), match=error.message) as caught:
        ask(path, "Report", REPORT, WAIT_S)
    assert caught.value.hint == error.hint
    gateway.error = None
    ask(path, "Report", REPORT, WAIT_S)
    assert len(set(gateway.callers)) == 1


def test_why_a_call_is_refused_is_told_although_something_was_just_being_sent(gateway, path):
    gateway.error = AccessRefused("not yours")
    for _ in range(50):
        call = UplinkCall(path, "Attend")
        with pytest.raises(AccessRefused, match="not yours"):
            for _ in range(20):
                with contextlib.suppress(FarmUnreachable):  # it has ended: what it ended with is read below
                    call.send(pb.FromBoard(printed=pb.Printed(lease=5, text="x" * 1000)))
            next(call.replies())
        call.close()


def test_when_a_gateway_goes_its_calls_are_told_and_the_next_one_is_asked(gateway, other, path):
    with attending(path) as (_, replies):
        gateway.stop()
        with pytest.raises(FarmUnreachable):
            list(replies)
    ask(path, "Report", REPORT, WAIT_S)
    assert len(other.callers) == 1


def test_who_gives_up_on_a_silent_gateway_gets_a_connection_of_its_own_and_other_calls_go_on(gateway, path):
    with attending(path) as (staying, replies):
        gateway.silent.set()
        with pytest.raises(FarmUnreachable, match="timed out"):
            ask(path, "Report", REPORT, 0.3)
        gateway.silent.clear()
        eventually(lambda: ask(path, "Report", REPORT, WAIT_S) and gateway.callers[-1] != gateway.callers[0])
        staying.send(pb.FromBoard(beat=pb.BoardBeat()))
        assert next(replies).WhichOneof("kind") == "beat"


def test_a_farm_that_is_away_is_told_to_everybody_and_found_when_it_is_back(gateway, other, path):
    gateway.stop()
    other.stop()
    for _ in range(2):
        with pytest.raises(FarmUnreachable, match="no gateway of the farm answers"):
            ask(path, "Report", REPORT, WAIT_S)
    back = Gateway(port=gateway.address.rpartition(":")[2])
    assert ask(path, "Report", REPORT, WAIT_S).recorded
    back.stop()


def test_a_file_in_the_sockets_place_stays(tmp_path):
    (tmp_path / "uplink").write_text("precious")
    with pytest.raises(UsageError, match="no socket"):
        listen(tmp_path / "uplink")
    assert (tmp_path / "uplink").read_text() == "precious"


def test_who_calls_before_the_uplink_runs_waits_for_it(gateway, tmp_path):
    path = tmp_path / "uplink"
    with concurrent.futures.ThreadPoolExecutor(1) as threads, listen(path) as listening:
        early = threads.submit(ask, path, "Report", REPORT, WAIT_S)
        assert concurrent.futures.wait([early], 0.3).not_done  # nobody accepts it
        with serving(FarmAddress((gateway.address,), "secret"), listening):
            assert early.result().recorded


def test_without_an_uplink_the_farm_is_unreachable(tmp_path):
    with pytest.raises(FarmUnreachable, match="the host's connection to the farm is away"):
        ask(tmp_path / "uplink", "Report", REPORT, WAIT_S)


def test_the_process_of_one_that_stands_still_is_ended(tmp_path):
    command = [sys.executable, "-c", STUCK, str(tmp_path / "uplink")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):  # one that works, or has nothing to do, lives on
            process.wait(1.5)
        with pytest.raises(FarmUnreachable):
            ask(tmp_path / "uplink", "Report", REPORT, WAIT_S)
        assert process.wait(WAIT_S) == -signal.SIGALRM


@pytest.mark.parametrize("content", [b"Attend", b"", b"\xff" * 50])
def test_what_is_no_call_is_refused(path, content):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(WAIT_S)
        caller.connect(str(path))
        caller.sendall(HEADER.pack(MESSAGE, len(content)) + content)
        frames = Frames(caller.dup())
        kind, size = frames.begin() or (0, 0)
        error = wire_errors.from_bytes(frames.content(size))
        assert kind == END and isinstance(error, UsageError) and "carries calls of Attend" in str(error)
        assert frames.begin() is None


@pytest.mark.parametrize("junk", [b"", b"\x01", HEADER.pack(CALL, 6) + b"Att", HEADER.pack(CALL, 1 << 31)])
def test_who_says_junk_or_nothing_is_hung_up_on_and_harms_nobody(path, junk):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(WAIT_S)
        caller.connect(str(path))
        caller.sendall(junk)
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(1) == b""
    assert ask(path, "Report", REPORT, WAIT_S).recorded
