"""`power` and `provision` through a gateway: the request reaches the board's worker, and its reply the user."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.gateways import BareBoard, Running, rows, running_gateway
from support.waiting import eventually

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.messages import Right, Role
from hil.errors import AccessRefused, BoardError, FarmError, ProvisionFailed, UsageError
from hil.protocol.v1 import farm_pb2 as pb

Client = Callable[..., FarmClient]


class Switched(BareBoard):
    """Worker whose host can switch the power. Replies with an error, or "" for success."""

    def __init__(self, farm: FarmClient, name: str, error: str = "", **card: Any) -> None:
        self.requests: list[pb.SwitchPower] = []
        self._reply = error
        super().__init__(farm, name, **{"power": ["on", "off", "cycle"], **card})
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while not self._over.wait(0.02):
            for request in self.told("power")[len(self.requests) :]:
                self.requests.append(request)
                self.print_message(switched=pb.Switched(id=request.id, error=self._reply))


@pytest.fixture
def anna(client: Client) -> FarmClient:
    return client("anna", Role.SUBMITTER, rights={Right.POWER})


def test_power_waits_for_host_and_is_audited(client: Client, anna: FarmClient, farm_db: str) -> None:
    board = Switched(client("lab", Role.HOST), "rpi").online()
    try:
        assert [one.power for one in anna.ask("boards")] == [["on", "off", "cycle"]]
        assert anna.do("power", name="rpi", switch="off").state == "maintenance"
        assert anna.do("power", name="rpi", switch="on").state in ("suspect", "online")
        assert [(one.action, one.lease, one.force) for one in board.requests] == [("off", 0, False), ("on", 0, False)]
        eventually(lambda: anna.ask("boards")[0].state == "online")
    finally:
        board.leave()
    events = [(one.what, one.reason) for one in anna.ask("events", board="rpi") if one.what == "board.power"]
    assert events == [("board.power", "off by anna"), ("board.power", "on by anna")]
    audit = rows(farm_db, "select user_name, object, detail from hil.audit where action = 'Farm.Do power' order by id")
    assert [(one["user_name"], one["object"], one["detail"]["action"]) for one in audit] == [
        ("anna", "rpi", "off"),
        ("anna", "rpi", "on"),
    ]


def test_power_reports_error_of_host(client: Client, anna: FarmClient) -> None:
    board = Switched(client("lab", Role.HOST), "rpi", "the cycle command failed with exit code 1").online()
    try:
        with pytest.raises(BoardError, match="power cycle failed: the cycle command failed with exit code 1"):
            anna.do("power", name="rpi", switch="cycle")
        with pytest.raises(AccessRefused, match="lacks the right power"):
            client("bert", Role.SUBMITTER).do("power", name="rpi", switch="cycle")
    finally:
        board.leave()
    assert "board.power_failed" in {one.what for one in anna.ask("events", board="rpi")}


def test_power_reaches_worker_at_other_gateway(
    client: Client, anna: FarmClient, farm_db: str, tmp_path_factory: pytest.TempPathFactory, gateway: Running
) -> None:
    with running_gateway(farm_db, tmp_path_factory.mktemp("other")) as other:
        board = Switched(other.client(client("lab", Role.HOST).address.token), "rpi").online()
        try:
            assert anna.do("power", name="rpi", switch="off", detach=True).state == "maintenance"
            eventually(lambda: [one.action for one in board.requests] == ["off"])
        finally:
            board.leave()
            board.farm.close()


def test_power_fails_when_host_is_lost(client: Client, anna: FarmClient) -> None:
    board = BareBoard(client("lab", Role.HOST), "rpi", power=["cycle"]).online()
    threading.Timer(0.5, board.leave).start()
    with pytest.raises(BoardError, match="the host was lost during the action"):
        anna.do("power", name="rpi", switch="cycle")


@pytest.mark.parametrize("error", ["", "the provision command failed"])
def test_image_reaches_worker_and_is_audited(client: Client, farm_db: str, tmp_path: Path, error: str) -> None:
    image = tmp_path / "card.img"
    image.write_bytes(b"system")
    digest = "sha256:" + hashlib.sha256(b"system").hexdigest()
    user = client("anna", Role.SUBMITTER, rights={Right.PROVISION})
    board = Switched(client("lab", Role.HOST), "rpi", error, power=[], provisions=True).online()
    wanted = {"name": "rpi", "file": "card.img", "image": digest}
    try:
        for change, kind, message in (
            ({}, FarmError, "not found in the farm's store"),
            ({"file": "../card.img"}, UsageError, "invalid name of an image"),
            ({"image": "blake3:" + "0" * 64}, UsageError, "must begin with sha256:"),
        ):
            with pytest.raises(kind, match=message):
                user.do("provision", **{**wanted, **change})
        user.upload({digest: image})
        if error:
            with pytest.raises(ProvisionFailed, match=r"writing card\.img failed: the provision command failed"):
                user.do("provision", **wanted)
        else:
            assert user.do("provision", **wanted).state in ("suspect", "online")
        assert [(one.action, one.file, one.image, one.force) for one in board.requests] == [
            ("provision", "card.img", digest, False)
        ]
        eventually(lambda: user.ask("boards")[0].state == "online")
    finally:
        board.leave()
    audit = rows(farm_db, "select user_name, object, detail from hil.audit where action = 'Farm.Do provision'")
    assert [(one["user_name"], one["object"], one["detail"]) for one in audit] == [
        ("anna", "rpi", {"file": "card.img", "image": digest})
    ]
