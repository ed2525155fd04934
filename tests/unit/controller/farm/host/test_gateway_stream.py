"""Test a worker's stream to a fake gateway that can be silent, unavailable or refuse it."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.uplinks import uplink
from support.waiting import eventually

from hil.controller.farm.host.gateway_link import gateway_stream
from hil.controller.farm.host.gateway_link.gateway_stream import GatewayStream
from hil.controller.farm.messages import BoardCard, Grant, JobSpec, Kind
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import decode_card, encode_grant, iter_methods
from hil.protocol import grpc_calls
from hil.protocol.v1 import farm_pb2 as pb

GRANT = Grant(5, "17", 17, "rpi5", 3, 6.0, 60.0, 1, JobSpec(Kind.RUN))
WAIT_S = 60.0


class Gateway:
    """Serve the method Attend on a Unix socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.streams = 0
        self.answers_beats = True
        self.refuses = False
        self.hung_up = threading.Event()
        self.heard: list[pb.FromBoard] = []
        self._say: queue.SimpleQueue[pb.ToBoard | None] = queue.SimpleQueue()
        self._server: Any = None

    def start(self) -> None:
        pool = concurrent.futures.ThreadPoolExecutor(8)
        self._server = grpc.server(pool, options=grpc_calls.GRPC_OPTIONS)
        (path, asked, answered) = next((p, a, b) for name, p, _, a, b in iter_methods("Hosts") if name == "Attend")
        service, _, name = path.strip("/").rpartition("/")
        handler = grpc.stream_stream_rpc_method_handler(
            self._attend, request_deserializer=asked.FromString, response_serializer=answered.SerializeToString
        )
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])
        self._server.add_insecure_port(f"unix:{self.path}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def say(self, **message: Any) -> None:
        self._say.put(pb.ToBoard(**message))

    def kinds(self) -> list[str]:
        return [str(one.WhichOneof("kind")) for one in self.heard]

    def iter_cases(self, kind: str) -> list[Any]:
        return [getattr(one, kind) for one in self.heard if one.WhichOneof("kind") == kind]

    def _attend(self, requests: Iterator[pb.FromBoard], context: Any) -> Iterator[pb.ToBoard]:
        self.streams += 1
        assert dict(context.invocation_metadata())["authorization"] == "Bearer secret"
        if self.refuses:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "that token is good no more")
        mine = self._say = queue.SimpleQueue()
        mine.put(pb.ToBoard(standing=pb.Standing(owner=True, beat_s=0.05)))

        heard = self.heard

        def hear() -> None:
            try:
                for message in requests:
                    heard.append(message)
                    if message.WhichOneof("kind") == "beat" and self.answers_beats:
                        mine.put(pb.ToBoard(beat=pb.Beat()))
                self.hung_up.set()
            except grpc.RpcError:
                pass
            finally:
                mine.put(None)

        threading.Thread(target=hear, daemon=True).start()
        yield from iter(mine.get, None)


class Board:
    """Record all messages from the gateway."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self.over: list[tuple[int, str]] = []
        self.dials: list[tuple[str, str]] = []
        self.power: list[str] = []
        self.told: list[str] = []
        self.held = [5]

    def get_card(self) -> BoardCard:
        return BoardCard("rpi5", labels={"chip": "a76"})

    def list_leases(self) -> list[int]:
        return self.held

    def queue_grant(self, grant: Grant) -> None:
        self.grants.append(grant)

    def cancel_lease(self, lease: int, reason: str) -> None:
        self.over.append((lease, reason))

    def open_dial(self, dial: pb.DialIn, gateway: str) -> None:
        self.dials.append((dial.id, gateway))

    def switch_power(self, request: pb.SwitchPower) -> None:
        self.power.append(request.action)

    def print_message(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path / "g.sock")
    gateway.start()
    yield gateway
    gateway.stop()


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def attending(gateway: Gateway, board: Board, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayStream]:
    # Disable the silence limit, so that a slow machine does not matter. One test enables it.
    monkeypatch.setattr(gateway_stream, "_SILENT_S", 60.0)
    address = FarmAddress((f"unix:{gateway.path}.nobody", f"unix:{gateway.path}"), "secret")
    with uplink(address, gateway.path.with_name("uplink")) as path:
        made = GatewayStream(path, "worker-1", board)
        made.start()
        yield made
        made.close()


@pytest.mark.ci
def test_stream_sends_hello_before_beats(gateway, board, attending):
    eventually(lambda: len(gateway.iter_cases("beat")) >= 5)
    assert gateway.kinds()[0] == "hello" and gateway.kinds().count("hello") == 1
    (hello,) = gateway.iter_cases("hello")
    assert decode_card(hello.card) == board.get_card()
    assert (hello.worker, list(hello.leases), attending.owner) == ("worker-1", [5], True)
    assert list(gateway.iter_cases("beat")[-1].leases) == [5]


def test_stream_forwards_gateway_messages_to_board(gateway, board, attending):
    eventually(lambda: gateway.heard)
    gateway.say(grant=encode_grant(GRANT))
    gateway.say(ended=pb.Ended(lease=5, reason="cancelled"))
    gateway.say(dial=pb.DialIn(id="d1", lease=5))
    eventually(lambda: board.dials)
    assert (board.grants, board.over, board.dials) == ([GRANT], [(5, "cancelled")], [("d1", f"unix:{gateway.path}")])


def test_stream_forwards_power_action_and_its_report(gateway, board, attending):
    eventually(lambda: gateway.heard)
    gateway.say(power=pb.SwitchPower(id="p1", action="cycle"))
    eventually(lambda: board.power == ["cycle"])
    attending.report_power("p1", "no answer\ud800")
    eventually(lambda: gateway.iter_cases("switched"))
    assert [(one.id, one.error) for one in gateway.iter_cases("switched")] == [("p1", "no answer?")]


def test_stream_ignores_unknown_message_of_newer_gateway(gateway, board, attending):
    eventually(lambda: gateway.heard)
    unknown = pb.ToBoard()
    unknown.MergeFromString(b"\xfa\x01\x02hi")  # field 31
    gateway._say.put(unknown)
    gateway.say(grant=encode_grant(GRANT))
    eventually(lambda: board.grants)
    assert board.told == []


def test_stream_repeats_hello_and_started_after_reconnect(gateway, board, attending):
    eventually(lambda: gateway.heard)
    attending.report_start(5, "unix:/agent.sock")
    eventually(lambda: gateway.iter_cases("started"))
    gateway.stop()
    eventually(lambda: board.told)
    assert not attending.owner
    gateway.heard = []
    gateway.start()
    eventually(lambda: gateway.iter_cases("started"))
    assert gateway.kinds()[:2] == ["hello", "started"] and gateway.iter_cases("started")[0].direct == "unix:/agent.sock"


@pytest.mark.ci
def test_stream_omits_ended_leases_after_reconnect(gateway, board, attending):
    eventually(lambda: gateway.heard)
    attending.report_start(5, "")
    attending.report_start(6, "")
    eventually(lambda: len(gateway.iter_cases("started")) == 2)
    gateway.say(ended=pb.Ended(lease=5, reason="cancelled"))
    eventually(lambda: board.over)
    attending.flush_output(6)
    gateway.stop()
    gateway.heard = []
    gateway.start()
    eventually(lambda: len(gateway.iter_cases("beat")) > 1)
    assert not gateway.iter_cases("started")


def test_stream_batches_lines_and_sends_them_after_outage(gateway, board, attending):
    eventually(lambda: gateway.heard)
    for number in range(50):
        attending.queue_output(5, f"line {number}")
    attending.flush_output(5)
    eventually(lambda: "line 49" in "\n".join(one.text for one in gateway.iter_cases("printed")))
    assert len(gateway.iter_cases("printed")) < 10
    gateway.stop()
    eventually(lambda: board.told)
    gateway.heard = []
    attending.queue_output(6, "said while nobody listened")
    gateway.start()
    eventually(lambda: gateway.iter_cases("printed"))
    assert (gateway.iter_cases("printed")[0].lease, gateway.iter_cases("printed")[0].text) == (
        6,
        "said while nobody listened\n",
    )


def test_stream_sends_case_results_with_lines(gateway, board, attending):
    eventually(lambda: gateway.heard)
    attending.queue_output(5, "a: PASS \ud800")
    attending.queue_case(5, "a\ud800", "PASS", "")
    attending.queue_case(6, "b", "FAIL", "wrong")
    attending.flush_output(5)
    eventually(lambda: len([one for said in gateway.iter_cases("printed") for one in said.cases]) == 2)
    told = [
        (said.lease, one.name, one.outcome, one.reason) for said in gateway.iter_cases("printed") for one in said.cases
    ]
    assert told == [(5, "a?", "PASS", ""), (6, "b", "FAIL", "wrong")]
    assert "a: PASS ?\n" in [said.text for said in gateway.iter_cases("printed")]


@pytest.mark.ci
def test_stream_reconnects_when_gateway_stays_silent(gateway, board, attending, monkeypatch):
    monkeypatch.setattr(gateway_stream, "_SILENT_S", 1.0)
    # The next answer applies the new limit. Wait, so that no pending answer resets it.
    eventually(lambda: attending._silent_s == 1.0)
    gateway.answers_beats = False
    eventually(lambda: gateway.streams > 1)
    eventually(lambda: len(board.told) == 2)
    assert board.told == ["the gateway does not respond; retrying", "reconnected to the farm"]


@pytest.mark.ci
def test_stream_pauses_after_refused_token(gateway, board, attending):
    eventually(lambda: gateway.heard)
    gateway.refuses = True
    gateway.stop()
    gateway.start()
    eventually(lambda: any("authentication with the farm failed" in text for text in board.told))
    streams = gateway.streams
    time.sleep(1)
    assert gateway.streams == streams


def test_stream_reports_refusal_with_hint(gateway, board, attending, monkeypatch):
    monkeypatch.setattr(gateway_stream, "_REFUSED_SECONDS", 0.05)
    monkeypatch.setattr(gateway_stream, "_AGAIN_SECONDS", (0.1, 30.0))  # Limits the whole retry.
    eventually(lambda: gateway.heard)
    gateway.refuses = True
    gateway.stop()
    gateway.start()
    streams = gateway.streams
    eventually(lambda: gateway.streams > streams + 3)
    (told,) = [text for text in board.told if "authentication with the farm failed" in text]
    assert "; retrying\n  hint: set HIL_FARM_TOKEN" in told


def test_stream_close_sends_pending_lines_and_hangs_up(gateway, board, attending):
    attending.queue_output(5, "the last word")
    eventually(lambda: gateway.heard)
    attending.close(wait_s=WAIT_S)
    assert gateway.hung_up.wait(WAIT_S)
    assert gateway.iter_cases("printed")[-1].text == "the last word\n"


def test_stream_start_ignores_repeated_call(gateway, board, attending):
    assert attending.start() is False
    eventually(lambda: len(gateway.iter_cases("beat")) > 2)
    assert gateway.streams == 1


def test_stream_sends_hello_when_board_changes(gateway, board, attending):
    eventually(lambda: gateway.heard)
    attending.send_card()
    eventually(lambda: len(gateway.iter_cases("hello")) == 2)


@pytest.mark.parametrize(("asked", "beat_s"), [(2.0, 2.0), (0.0, 1.5), (float("nan"), 1.5), (1e-9, 1.5), (1e300, 1.5)])
def test_stream_ignores_invalid_beat_interval(tmp_path, asked, beat_s):
    stream = GatewayStream(tmp_path / "uplink", "w", Any)
    stream._dispatch_message(pb.ToBoard(standing=pb.Standing(owner=True, beat_s=asked)), "unix:gateway")
    assert stream._beat_s == beat_s
