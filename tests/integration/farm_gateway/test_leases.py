"""Board leases through a gateway, and connections to the boards' agents."""

from __future__ import annotations

import contextlib
import queue
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.gateways import WAIT_S, BareBoard, Running, running_gateway, simple_order, token_of
from support.waiting import eventually

from hil.controller.farm.client.client import FarmClient, translate_grpc_error
from hil.controller.farm.host.tunnel_endpoint import TunnelEndpoint
from hil.controller.farm.messages import Grant, JobSpec, Kind, Role, Submission
from hil.controller.farm.rpc import DIAL_KEY, LEASE_KEY, LEASE_SECRET_KEY, decode_card, decode_grant, encode_submission
from hil.controller.farm.settings import FarmSettings
from hil.errors import AccessRefused, HilError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

Client = Callable[..., FarmClient]


class Holder:
    """A lease holder: a stream and its replies."""

    def __init__(self, farm: FarmClient, *, beats: bool = True, **first: Any) -> None:
        self.farm = farm
        self._asked: queue.Queue[pb.LeaseRequest | None] = queue.Queue()
        self._asked.put(pb.LeaseRequest(**(first or {"open": encode_submission(order())})))
        self.stream = farm.stub.Lease(iter(self._asked.get, None), metadata=farm.metadata)
        self.replies: queue.Queue[pb.LeaseReply | None] = queue.Queue()
        self.error: grpc.RpcError | None = None
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            *([threading.Thread(target=self._beat, daemon=True)] if beats else []),
        ]
        for thread in self._threads:
            thread.start()

    def next(self, kind: str) -> Any:
        """Return the next reply of a kind."""
        while (reply := self.replies.get(timeout=WAIT_S)) is not None:
            if reply.WhichOneof("kind") == kind:
                return getattr(reply, kind)
        raise AssertionError(f"the stream ended without {kind}: {self.error}")

    def find_refusal(self) -> HilError:
        """Return the error that ended the stream."""
        assert self.replies.get(timeout=WAIT_S) is None and self.error is not None
        return translate_grpc_error(self.error)

    def end(self, how: Callable[[], Any] | None = None) -> None:
        self._over.set()
        self._asked.put(None) if how is None else how()
        for thread in self._threads:
            thread.join(WAIT_S)
        self._asked.put(None)

    def _beat(self) -> None:
        while not self._over.wait(0.2):
            self._asked.put(pb.LeaseRequest(beat=pb.Beat()))

    def _read(self) -> None:
        try:
            for reply in self.stream:
                self.replies.put(reply)
        except grpc.RpcError as error:
            self.error = error
        self.replies.put(None)


def order(**settings: Any) -> Submission:
    return Submission(**{"title": "by hand", "specs": (JobSpec(Kind.LEASE),), **settings})


def metadata(farm: FarmClient, lease: int, key: str) -> list[tuple[str, str]]:
    return [*farm.metadata, (LEASE_KEY, str(lease)), (LEASE_SECRET_KEY, key)]


@contextlib.contextmanager
def held(farm: FarmClient, board: BareBoard) -> Iterator[tuple[Holder, pb.LeaseGranted, Grant]]:
    holder = Holder(farm)
    grant = board.send_grant()
    board.start(grant, "unix:/agent.sock")
    granted = holder.next("granted")
    try:
        yield holder, granted, grant
    finally:
        holder.end(holder.stream.cancel)


def test_holder_waits_for_board_and_returns_board(client: Client, board: BareBoard) -> None:
    farm = client("anna", Role.SUBMITTER)
    first = Holder(farm)
    grant = board.send_grant()
    assert grant.spec.kind is Kind.LEASE
    second = Holder(farm)
    assert second.next("waiting").state == "queued"
    assert first.replies.get(timeout=WAIT_S).WhichOneof("kind") == "waiting"  # the board is not ready
    board.start(grant, "unix:/agent.sock")
    granted = first.next("granted")
    assert decode_grant(granted.grant) == grant and granted.key
    card = decode_card(granted.card)
    assert (card.name, card.direct, card.labels["chip"]) == ("rpi", "unix:/agent.sock", "a53")
    first.next("beat")
    first.end()
    eventually(lambda: [one for one in board.told("ended") if one.lease == grant.lease])
    board.held.discard(grant.lease)
    assert farm.ask("result", name=grant.job)[0].exit_code == 0
    after = board.send_grant()
    assert after.fence > grant.fence
    second.end()
    eventually(lambda: farm.ask("job", name=after.job).state != "running")


def test_silent_holder_loses_board(farm_db: str, tmp_path: Path) -> None:
    settings = FarmSettings(holder_s=6.0, beat_s=0.2)
    with (
        running_gateway(farm_db, tmp_path, settings=settings) as running,
        running.client(token_of(farm_db, "anna")) as farm,
    ):
        board = BareBoard(farm, "rpi").online()
        holder = Holder(farm, beats=False)
        grant = board.send_grant()
        board.start(grant)
        holder.next("granted")
        assert "no heartbeat" in holder.next("over")
        board.held.discard(grant.lease)
        holder.end()
        board.leave()


@pytest.mark.slow
def test_beating_holder_waits_longer_than_holder_timeout(farm_db: str, tmp_path: Path) -> None:
    settings = FarmSettings(holder_s=8.0, beat_s=0.2)
    with (
        running_gateway(farm_db, tmp_path, settings=settings) as running,
        running.client(token_of(farm_db, "anna")) as farm,
    ):
        board = BareBoard(farm, "rpi").online()
        holder = Holder(farm)
        grant = board.send_grant()
        time.sleep(11)  # to prepare the board
        board.start(grant)
        assert holder.next("granted").key
        holder.end()
        eventually(lambda: board.told("ended"))
        board.leave()


@pytest.mark.parametrize("comes_back", [True, False])
def test_reconnected_holder_preserves_queue_position(
    farm_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    if not comes_back:
        monkeypatch.setattr("hil.controller.farm.gateway.services.lease_holder._ANSWER_SECONDS", 1.0)
    settings, opening = FarmSettings(holder_s=2.0, beat_s=0.2), {"open": encode_submission(order())}
    with contextlib.ExitStack() as stack:
        one, two = (stack.enter_context(running_gateway(farm_db, tmp_path / name, settings=settings)) for name in "ab")
        token = token_of(farm_db, "anna")
        farm, elsewhere = (stack.enter_context(gateway.client(token)) for gateway in (one, two))
        board = BareBoard(farm, "rpi").online()
        stack.callback(board.leave)
        farm.submit(simple_order())
        board.send_grant()
        waiting = Holder(farm, **opening)
        name = waiting.next("waiting").name
        waiting.end(waiting.stream.cancel)
        if comes_back:
            again = Holder(elsewhere, **opening)
            assert again.next("waiting").name == name
            time.sleep(4)  # longer than the reconnect limit
            assert farm.ask("job", name=name).state == "queued"
            again.end()
        eventually(lambda: farm.ask("job", name=name).state == "cancelled")


def test_broken_links_do_not_cancel_waiting_jobs(client: Client, board: BareBoard) -> None:
    farm = client()
    with held(farm, board):
        names = []
        for _ in range(10):
            # The link breaks while the gateway handles the request.
            waiting = Holder(farm)
            names.append(waiting.next("waiting").name)
            waiting.end(waiting.stream.cancel)
        time.sleep(1)
        assert {farm.ask("job", name=name).state for name in names} == {"queued"}
        for name in names:
            farm.do("cancel", name=name)


def test_broken_stream_resumes_at_second_gateway(
    gateway: Running, client: Client, board: BareBoard, farm_db: str, tmp_path: Path
) -> None:
    farm = client()
    with held(farm, board) as (holder, granted, grant), running_gateway(farm_db, tmp_path / "b") as other:
        holder.end(holder.stream.cancel)
        with other.client(token_of(farm_db, "anna")) as elsewhere:
            again = Holder(elsewhere, resume=pb.ResumeLease(lease=grant.lease, key=granted.key))
            assert again.next("granted").key == granted.key
            again.next("beat")
            again.end()
        eventually(lambda: [one for one in board.told("ended") if one.lease == grant.lease])


def test_forged_lease_key_fails(client: Client, board: BareBoard, farm_db: str) -> None:
    farm, thief = client(), client("eve", Role.SUBMITTER)
    with held(farm, board) as (_, granted, grant):
        for key in ("", "0" * len(granted.key)):
            forged = Holder(thief, resume=pb.ResumeLease(lease=grant.lease, key=key))
            assert isinstance(forged.find_refusal(), AccessRefused)
            forged.end()
            with pytest.raises(grpc.RpcError) as refused:
                list(thief.stub.Dial(iter(()), metadata=metadata(thief, grant.lease, key)))
            assert isinstance(translate_grpc_error(refused.value), AccessRefused)
        with pytest.raises(grpc.RpcError) as wrong:
            list(thief.stub.Dial(iter(()), metadata=[*thief.metadata, (LEASE_KEY, "17; drop table")]))
        assert isinstance(translate_grpc_error(wrong.value), UsageError)
    refusals = [one for one in farm.ask("audit") if not one.allowed]
    assert {(one.user, one.action) for one in refusals} == {("eve", "Farm.Lease"), ("eve", "Farm.Dial")}


def echo_agent(farm: FarmClient, dial: pb.DialIn) -> threading.Thread:
    """A worker's agent that echoes all data until the holder closes."""

    def carry() -> None:
        back: queue.Queue[pb.Piece | None] = queue.Queue()
        far = farm.stub.Accept(iter(back.get, None), metadata=[*farm.metadata, (DIAL_KEY, dial.id)])
        with contextlib.suppress(grpc.RpcError):
            for piece in far:
                back.put(piece if piece.data else None)
        back.put(None)

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    return thread


def accept_dials(board: BareBoard, farms: Callable[[str], FarmClient]) -> threading.Thread:
    def wait() -> None:
        [dial] = eventually(lambda: board.told("dial"))
        echo_agent(farms(dial.gateway), dial).join()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_dial_carries_bytes_both_ways(client: Client, board: BareBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    # The echo arrives after the sender has finished.
    monkeypatch.setattr("hil.controller.farm.gateway.tunnel._PAUSE_S", 60.0)
    farm = client()
    with held(farm, board) as (_, granted, grant):
        accepting = accept_dials(board, lambda address: board.farm)
        sent = [bytes([number]) * (1 << 20) for number in range(32)]
        stream = farm.stub.Dial(
            (pb.Piece(data=data) for data in sent), metadata=metadata(farm, grant.lease, granted.key)
        )
        assert [piece.data for piece in stream if piece.data] == sent
        accepting.join(WAIT_S)
        assert not accepting.is_alive()


def test_dial_reaches_board_at_second_gateway(
    gateway: Running,
    client: Client,
    board: BareBoard,
    farm_db: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hil.controller.farm.gateway.tunnel._PAUSE_S", 60.0)
    farm, token = client(), token_of(farm_db, "anna")
    with contextlib.ExitStack() as stack:
        _, granted, grant = stack.enter_context(held(farm, board))
        other = stack.enter_context(running_gateway(farm_db, tmp_path / "b"))
        elsewhere = stack.enter_context(other.client(token))

        def there(address: str) -> FarmClient:
            assert address == other.address
            return elsewhere

        accepting = accept_dials(board, there)
        keys = metadata(elsewhere, grant.lease, granted.key)
        assert b"".join(one.data for one in elsewhere.stub.Dial(iter([pb.Piece(data=b"hi")]), metadata=keys)) == b"hi"
        accepting.join(WAIT_S)


class Echo(socketserver.BaseRequestHandler):
    """An agent that echoes all data."""

    def handle(self) -> None:
        while data := self.request.recv(1 << 16):
            self.request.sendall(data)


def test_dial_survives_broken_board_stream(
    client: Client, board: BareBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The connections end because the agent sees that the holder has finished.
    monkeypatch.setattr("hil.controller.farm.gateway.tunnel._PAUSE_S", 1000.0)
    with (
        socketserver.ThreadingUnixStreamServer(f"{tmp_path}/agent", Echo) as agent,
        held(client(), board) as (holder, granted, grant),
    ):
        threading.Thread(target=agent.serve_forever, daemon=True).start()
        pieces: queue.Queue[pb.Piece | None] = queue.Queue()
        keys = metadata(holder.farm, grant.lease, granted.key)
        stream = holder.farm.stub.Dial(iter(pieces.get, None), metadata=keys)
        [dial] = eventually(lambda: board.told("dial"))
        with client("lab", Role.HOST) as attended:
            endpoint = TunnelEndpoint(grant.lease, f"unix:{tmp_path}/agent", attended.address, print)
            endpoint.open_dial(dial, attended.gateway)
            pieces.put(pb.Piece(data=b"first"))
            assert next(stream).data == b"first"
        pieces.put(pb.Piece(data=b"second"))
        assert next(stream).data == b"second"
        pieces.put(None)
        assert not [piece.data for piece in stream if piece.data]
        agent.shutdown()


def test_resume_of_ended_lease_reports_reason(client: Client, board: BareBoard) -> None:
    farm = client()
    with held(farm, board) as (holder, granted, grant):
        holder.end()
        eventually(lambda: board.told("ended"))
        late = Holder(farm, resume=pb.ResumeLease(lease=grant.lease, key=granted.key))
        assert late.next("over") == "released"
        late.end()


def test_lease_end_closes_dial(client: Client, board: BareBoard) -> None:
    farm = client()
    with held(farm, board) as (holder, granted, grant):
        accepting = accept_dials(board, lambda address: board.farm)
        pieces: queue.Queue[pb.Piece | None] = queue.Queue()
        pieces.put(pb.Piece(data=b"first"))
        stream = farm.stub.Dial(iter(pieces.get, None), metadata=metadata(farm, grant.lease, granted.key))
        assert next(stream).data == b"first"
        holder.end()
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert "lease has ended" in str(ended.value.details())
        pieces.put(None)
        accepting.join(WAIT_S)
        assert not accepting.is_alive()


def test_unaccepted_dial_times_out(client: Client, board: BareBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hil.controller.farm.gateway.tunnel._ACCEPT_S", 0.2)
    farm = client()
    with held(farm, board) as (_, granted, grant):
        with pytest.raises(grpc.RpcError) as ended:
            list(farm.stub.Dial(iter(()), metadata=metadata(farm, grant.lease, granted.key)))
        assert "no response within" in str(ended.value.details())
        [dial] = eventually(lambda: board.told("dial"))
        with pytest.raises(grpc.RpcError) as late:
            list(board.farm.stub.Accept(iter(()), metadata=[*board.farm.metadata, (DIAL_KEY, dial.id)]))
        assert isinstance(translate_grpc_error(late.value), UsageError)


def test_leaving_queue_cancels_job(client: Client, board: BareBoard) -> None:
    farm = client()
    with held(farm, board):
        waiting = Holder(farm)
        job = waiting.next("waiting").name
        waiting.end()
        eventually(lambda: farm.ask("job", name=job).state == "cancelled")
        time.sleep(0.1)
        assert board.grants.empty()
