"""Boards at a gateway: reconnecting, lost, moved and drained."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from support.gateways import BareBoard, running_gateway, simple_order, token_of
from support.waiting import eventually

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.gateway.attached_workers import AttachedWorker
from hil.controller.farm.messages import Grant, Role
from hil.controller.farm.settings import FarmSettings
from hil.errors import FarmError
from hil.protocol.v1 import farm_pb2 as pb

pytestmark = pytest.mark.daily

Client = Callable[..., FarmClient]


def state_of(farm: FarmClient, job: str) -> str:
    return str(farm.ask("job", name=job).state)


def test_reconnected_worker_receives_pending_grant(client: Client, board: BareBoard) -> None:
    farm = client()
    _, [job] = farm.submit(simple_order())
    grant = board.send_grant()
    board.cut()
    again = BareBoard(client("lab", Role.HOST), "rpi")
    try:
        assert again.send_grant() == grant
        again.start(grant)
        again.report(grant)
        assert state_of(farm, job) == "done"
    finally:
        again.leave()


def test_gateway_resends_lost_grant(client: Client, board: BareBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    farm = client()
    with monkeypatch.context() as patch:
        lost: list[Grant] = []
        patch.setattr(AttachedWorker, "send_grant", lambda self, grant: lost.append(grant))
        farm.submit(simple_order())
        eventually(lambda: lost)
    assert board.send_grant() == lost[0]
    board.report(lost[0])


def test_job_of_silent_worker_moves_to_second_board(farm_db: str, tmp_path: Path) -> None:
    settings = FarmSettings(lease_s=6.0, owner_s=6.0, beat_s=0.2)
    with (
        running_gateway(farm_db, tmp_path, settings=settings) as running,
        running.client(token_of(farm_db, "anna")) as farm,
    ):
        one, two = BareBoard(farm, "one").online(), BareBoard(farm, "two").online()
        try:
            _, [job] = farm.submit(simple_order(selector="name=one or name=two"))
            eventually(lambda: not (one.grants.empty() and two.grants.empty()))
            first, second = (one, two) if two.grants.empty() else (two, one)
            lost = first.send_grant()
            first.cut()
            grant = second.send_grant()
            assert (grant.job, grant.attempt) == (job, 2) and grant.lease != lost.lease
            assert not first.report(lost).recorded
            assert second.report(grant).recorded
        finally:
            one.leave()
            two.leave()


def test_standby_host_takes_over_when_owner_leaves(client: Client, board: BareBoard) -> None:
    spare = BareBoard(client("lab", Role.HOST), "rpi", worker="spare", host="elsewhere")
    try:
        assert not eventually(lambda: spare.told("standing"))[0].owner
        board.leave()
        eventually(lambda: spare.told("standing")[-1].owner)
        client().submit(simple_order())
        assert spare.send_grant().board == "rpi"
    finally:
        spare.leave()


def test_drained_board_gets_jobs_only_after_resume(client: Client, board: BareBoard) -> None:
    farm = client()
    farm.do("drain", name="rpi", reason="new cable")
    farm.submit(simple_order())
    time.sleep(0.3)
    assert board.grants.empty() and farm.ask("boards")[0].state == "maintenance"
    farm.do("resume", name="rpi")
    assert board.send_grant().board == "rpi"


def test_stopping_gateway_ends_streams_and_preserves_grants(farm_db: str, tmp_path: Path) -> None:
    with running_gateway(farm_db, tmp_path) as running, running.client(token_of(farm_db, "anna")) as farm:
        board = BareBoard(farm, "rpi").online()
        _, [job] = farm.submit(simple_order())
        grant = board.send_grant()
        followed = farm.stub.Follow(pb.FollowRequest(jobs=[job]), metadata=farm.metadata)
        next(followed)
        running.stop()
        eventually(lambda: board.error)
        assert isinstance(board.error, grpc.Call) and board.error.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError) as gone:
            list(followed)
        assert gone.value.code() is grpc.StatusCode.UNAVAILABLE
        board.cut()
    with running_gateway(farm_db, tmp_path) as running, running.client(token_of(farm_db, "anna")) as farm:
        again = BareBoard(farm, "rpi", worker=board.worker)
        assert again.send_grant() == grant  # the grant survives
        again.report(grant)
        assert state_of(farm, job) == "done"
        again.leave()


def test_gc_forgets_board_offline_for_long(client: Client) -> None:
    farm = client()
    board = BareBoard(client("lab", Role.HOST), "rpi").online()
    board.leave()
    eventually(lambda: farm.ask("boards")[0].state == "offline")
    _, [job] = farm.submit(simple_order(board="rpi"))
    farm.do("gc", days=0, dry_run=True)
    assert [one.name for one in farm.ask("boards")] == ["rpi"]
    farm.do("gc")
    assert farm.ask("job", name=job).state == "queued"
    farm.do("gc", days=1e-7)
    assert farm.ask("boards") == []
    with pytest.raises(FarmError, match="board 'rpi' not found"):
        farm.submit(simple_order(board="rpi"))
    board = BareBoard(client("lab", Role.HOST), "rpi").online()
    assert [one.state for one in farm.ask("boards")] == ["online"]
    board.leave()
