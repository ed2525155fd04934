"""Test calls through a host's uplink to fake gateways."""

from __future__ import annotations

import concurrent.futures
import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.uplinks import serving, uplink
from support.waiting import eventually

from hil.controller.farm.host.gateway_link import uplink as uplink_module
from hil.controller.farm.host.gateway_link.uplink import listen
from hil.controller.farm.host.gateway_link.uplink_call import UplinkCall, ask
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import iter_methods
from hil.errors import AccessRefused, FarmError, FarmUnreachable, HilError, StorageError, UsageError
from hil.protocol import grpc_calls, wire_errors
from hil.protocol.data_connection import CALL, END, HEADER, MESSAGE, Frames
from hil.protocol.v1 import farm_pb2 as pb

WAIT_S = 30.0
REPORT = pb.ReportRequest(lease=5, worker="w", fence=3)
# An uplink whose event loop blocks on the first call.
STUCK = """
import pathlib, sys, time
from hil.controller.farm.host.gateway_link import uplink
from hil.controller.farm.paths import FarmAddress

uplink._STUCK_S = 0.4
uplink.Uplink._use_link = lambda _: time.sleep(60)
with uplink.listen(pathlib.Path(sys.argv[1])) as listening:
    print("listening", flush=True)
    uplink.run(FarmAddress(("127.0.0.1:1",), ""), listening)
"""


class Gateway:
    """Serve Attend, which answers each message with a beat, and Report, which returns a set answer."""

    def __init__(self, most_bytes: int = -1, port: str = "0") -> None:
        self.callers: list[str] = []
        self.received: list[tuple[str, float]] = []  # kinds of Attend messages, with the time of receipt
        self.ended = threading.Event()
        self.error: HilError | None = None
        self.silent = threading.Event()
        self.reads = True
        pool = concurrent.futures.ThreadPoolExecutor(16)
        options = {**dict(grpc_calls.GRPC_OPTIONS), "grpc.max_receive_message_length": most_bytes}
        self._server = grpc.server(pool, options=list(options.items()))
        table = {}
        for name, path, kind, asked, answered in iter_methods("Hosts"):
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
        if not context.add_callback(self.ended.set):  # the call ended before this line
            self.ended.set()
        while not self.reads and context.is_active():
            self.ended.wait(0.05)
        for request in requests:
            self.received.append((request.WhichOneof("kind"), time.monotonic()))
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
        replies = call.iter_replies()
        assert next(replies).WhichOneof("kind") == "beat"
        yield call, replies
    finally:
        call.close()


def test_uplink_shares_connection_and_reports_gateway(gateway, path):
    with attending(path) as (one, _), attending(path) as (another, _):
        assert ask(path, "Report", REPORT, WAIT_S) == pb.ReportReply(recorded=True)
        assert one.gateway == another.gateway == gateway.address
    assert len(gateway.callers) == 3 and len(set(gateway.callers)) == 1


def test_uplink_opens_single_connection_for_parallel_calls(gateway, path):
    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda _: ask(path, "Report", REPORT, WAIT_S), range(64)))
    assert all(answer.recorded for answer in answers)
    assert len(gateway.callers) == 64 and len(set(gateway.callers)) == 1


def test_uplink_ends_replies_after_client_finishes(gateway, path):
    with attending(path) as (call, replies):
        call.send(None)
        assert list(replies) == []


def test_closing_call_cancels_rpc(gateway, path):
    with attending(path):
        assert not gateway.ended.is_set()
    assert gateway.ended.wait(WAIT_S)


def test_closing_call_cancels_rpc_when_gateway_reads_slowly(gateway, path, monkeypatch):
    monkeypatch.setattr("hil.controller.farm.host.gateway_link.uplink.SILENT_S", 0.5)
    gateway.reads = False
    call = UplinkCall(path, "Attend")
    for _ in range(12):  # more than fits into the buffers
        call.send(pb.FromBoard(printed=pb.Printed(lease=5, text="x" * 100_000)))
    call.close()
    assert gateway.ended.wait(WAIT_S)


def test_uplink_reports_unexpected_error_and_recovers(gateway, path, monkeypatch):
    def no_threads(gateway: str) -> bool:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("hil.controller.farm.client.client._accepts_connections", no_threads)
    with pytest.raises(FarmUnreachable, match="RuntimeError: can't start new thread"):
        ask(path, "Report", REPORT, WAIT_S)
    assert ask(path, "Report", REPORT, WAIT_S).recorded


def test_uplink_rejects_oversized_report_without_reconnecting(tmp_path):
    small = Gateway(most_bytes=1000)
    with uplink(FarmAddress((small.address,), "secret"), tmp_path / "uplink") as path:
        large = pb.ReportRequest(lease=5, worker="w" * 2000)
        with pytest.raises(FarmError, match="larger") as caught:
            ask(path, "Report", large, WAIT_S)
        assert not isinstance(caught.value, FarmUnreachable)
    small.stop()


def test_listen_reports_unusable_socket_path(tmp_path):
    with pytest.raises(StorageError, match="cannot listen on") as caught:
        listen(tmp_path / ("long" * 40))
    assert "TMPDIR" in caught.value.hint


def test_uplink_carries_large_message(gateway, path):
    with attending(path) as (call, replies):
        call.send(pb.FromBoard(printed=pb.Printed(lease=5, text="x" * 3_000_000)))
        assert next(replies).WhichOneof("kind") == "beat"


@pytest.mark.parametrize("error", [AccessRefused("not yours", hint="ask"), UsageError("no"), FarmError("broken")])
def test_uplink_forwards_gateway_error_on_same_connection(gateway, path, error):
    gateway.error = error
    with pytest.raises(type(error), match=error.message) as caught:
        ask(path, "Report", REPORT, WAIT_S)
    assert caught.value.hint == error.hint
    gateway.error = None
    ask(path, "Report", REPORT, WAIT_S)
    assert len(set(gateway.callers)) == 1


def test_request_gets_response_that_arrives_before_its_end(gateway, path, monkeypatch):
    """The uplink closes the connection after the response. The end of the request is then not sent."""
    send = UplinkCall.send

    def send_late(call: UplinkCall, message: Any) -> None:
        if message is None:
            eventually(lambda: is_closed(call))
        send(call, message)

    monkeypatch.setattr(UplinkCall, "send", send_late)
    assert ask(path, "Report", REPORT, WAIT_S).recorded


def is_closed(call: UplinkCall) -> bool:
    """Return whether the uplink has closed the connection of a call."""
    poll = select.poll()
    poll.register(call._frames._socket, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def test_uplink_reports_refusal_despite_pending_sends(gateway, path):
    gateway.error = AccessRefused("not yours")
    for _ in range(50):
        call = UplinkCall(path, "Attend")
        with pytest.raises(AccessRefused, match="not yours"):
            for _ in range(20):
                with contextlib.suppress(FarmUnreachable):  # The call has ended; the code below reads its error.
                    call.send(pb.FromBoard(printed=pb.Printed(lease=5, text="x" * 1000)))
            next(call.iter_replies())
        call.close()


def test_uplink_switches_to_next_gateway_after_loss(gateway, other, path):
    with attending(path) as (_, replies):
        gateway.stop()
        with pytest.raises(FarmUnreachable):
            list(replies)
    ask(path, "Report", REPORT, WAIT_S)
    assert len(other.callers) == 1


def test_uplink_reconnects_after_timeout_without_ending_calls(gateway, path):
    with attending(path) as (staying, replies):
        gateway.silent.set()
        with pytest.raises(FarmUnreachable, match="timed out"):
            ask(path, "Report", REPORT, 0.3)
        gateway.silent.clear()

        def has_reconnected() -> bool:
            with contextlib.suppress(FarmUnreachable):  # The old connection may end during the call.
                ask(path, "Report", REPORT, WAIT_S)
            return bool(gateway.callers[-1] != gateway.callers[0])

        eventually(has_reconnected)
        staying.send(pb.FromBoard(beat=pb.BoardBeat()))
        assert next(replies).WhichOneof("kind") == "beat"


def test_uplink_reports_farm_outage_and_reconnects(gateway, other, path):
    gateway.stop()
    other.stop()
    for _ in range(2):
        with pytest.raises(FarmUnreachable, match="no farm gateway responds"):
            ask(path, "Report", REPORT, WAIT_S)
    back = Gateway(port=gateway.address.rpartition(":")[2])
    assert ask(path, "Report", REPORT, WAIT_S).recorded
    back.stop()


def test_listen_preserves_regular_file_at_socket_path(tmp_path):
    (tmp_path / "uplink").write_text("precious")
    with pytest.raises(UsageError, match="not a socket"):
        listen(tmp_path / "uplink")
    assert (tmp_path / "uplink").read_text() == "precious"


def test_call_waits_for_uplink_start(gateway, tmp_path):
    path = tmp_path / "uplink"
    with concurrent.futures.ThreadPoolExecutor(1) as threads, listen(path) as listening:
        early = threads.submit(ask, path, "Report", REPORT, WAIT_S)
        assert concurrent.futures.wait([early], 0.3).not_done  # The uplink does not accept calls yet.
        with serving(FarmAddress((gateway.address,), "secret"), listening):
            assert early.result().recorded


def test_call_fails_without_uplink(tmp_path):
    with pytest.raises(FarmUnreachable, match="the host is not connected to the farm"):
        ask(tmp_path / "uplink", "Report", REPORT, WAIT_S)


@pytest.mark.ci
def test_uplink_process_ends_when_event_loop_blocks(tmp_path):
    command = [sys.executable, "-c", STUCK, str(tmp_path / "uplink")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):  # A working or idle process keeps running.
            process.wait(1.5)
        with pytest.raises(FarmUnreachable):
            ask(tmp_path / "uplink", "Report", REPORT, WAIT_S)
        assert process.wait(WAIT_S) == -signal.SIGALRM


@pytest.mark.parametrize("content", [b"Attend", b"", b"\xff" * 50])
def test_uplink_rejects_invalid_call(path, content):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(WAIT_S)
        caller.connect(str(path))
        caller.sendall(HEADER.pack(MESSAGE, len(content)) + content)
        frames = Frames(caller.dup())
        kind, size = frames.begin() or (0, 0)
        error = wire_errors.decode_error(frames.content(size))
        assert kind == END and isinstance(error, UsageError) and "supported: Attend" in str(error)
        assert frames.begin() is None


@pytest.mark.parametrize("junk", [b"", b"\x01", HEADER.pack(CALL, 6) + b"Att", HEADER.pack(CALL, 1 << 31)])
def test_uplink_closes_connection_on_malformed_frames(path, junk):
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(WAIT_S)
        caller.connect(str(path))
        caller.sendall(junk)
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(1) == b""
    assert ask(path, "Report", REPORT, WAIT_S).recorded


BEAT, STARTED = pb.FromBoard(beat=pb.BoardBeat()), pb.FromBoard(started=pb.Started(lease=1))


@pytest.mark.ci
def test_uplink_sends_beats_of_workers_together(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink_module, "_BATCH_SECONDS", 4.0)
    with (
        uplink(FarmAddress((gateway.address,), "secret"), tmp_path / "uplink") as path,
        contextlib.ExitStack() as stack,
    ):
        calls = [stack.enter_context(contextlib.closing(UplinkCall(path, "Attend"))) for _ in range(2)]
        eventually(lambda: 0 < time.monotonic() % 4.0 < 1.0)
        for call in calls:
            call.send(BEAT)
            time.sleep(1.0)
        eventually(lambda: len(gateway.received) == 2)
        (_, first), (_, second) = gateway.received
        assert second - first < 0.7


def test_uplink_sends_pending_beat_before_other_messages(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink_module, "_BATCH_SECONDS", 1000.0)
    with (
        uplink(FarmAddress((gateway.address,), "secret"), tmp_path / "uplink") as path,
        contextlib.closing(UplinkCall(path, "Attend")) as call,
    ):
        call.send(BEAT)
        time.sleep(0.2)
        assert gateway.received == []
        call.send(STARTED)
        eventually(lambda: [kind for kind, _ in gateway.received] == ["beat", "started"])
