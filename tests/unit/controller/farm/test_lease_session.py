"""A lease as its holder has it: queued for, kept over broken streams, given back; the tunnel to its board."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.agents import Program
from support.fake_farm import FakeFarm
from support.waiting import eventually

from hil.controller.devices.board_client import Target
from hil.controller.devices.client import AgentClient
from hil.controller.farm.lease_session import LeaseSession, lease_order, leased_config, machine_id
from hil.controller.farm.messages import BoardCard, Grant, JobSpec, Kind
from hil.core.boards import parse_board
from hil.core.digest import digest_of
from hil.errors import BoardBusy, FarmError, FarmUnreachable, SessionEnded
from hil.protocol.v1 import farm_pb2 as pb


@pytest.fixture
def sim(start_agent: Callable[..., str]) -> str:
    return start_agent(module="hil.sim")


@pytest.fixture
def hold(fake_farm: FakeFarm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LeaseSession]]:
    """Orders a lease; all are closed at the end."""
    made: list[LeaseSession] = []
    monkeypatch.setattr("hil.controller.farm.lease_session._CLOSE_S", 60.0)

    def order(selector: str = "") -> LeaseSession:
        made.append(LeaseSession(fake_farm.address, lease_order(selector, "a test")))
        return made[-1]

    yield order
    for holding in made:
        holding.close()


def test_a_board_is_had_and_given_back(fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str) -> None:
    fake_farm.add("lab1-sim-1", sim)
    holding = hold()
    assert holding.wait(60)
    assert holding.held.card.name == "lab1-sim-1"
    assert holding.address == sim
    assert holding.over == ""
    holding.close()
    assert fake_farm.leases[0].over == "given back"
    assert fake_farm.boards["lab1-sim-1"].lease is None


def test_it_waits_in_the_queue_and_tells_how_many_go_first(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str
) -> None:
    fake_farm.add("lab1-sim-1", sim)
    first = hold()
    assert first.wait(60)
    second = hold()
    with pytest.raises(BoardBusy, match="no board for us within 3 s: 3 ahead of you"):
        second.wait_told(3, lambda text: None)
    told: list[str] = []
    waiting = threading.Thread(target=second.wait_told, args=(60, told.append))
    waiting.start()
    eventually(lambda: told)
    first.close()
    waiting.join(60)
    assert told[0] == "waiting for a board of the farm: 3 ahead of you"
    assert told[-1] == "board lab1-sim-1 of the farm (host-a at lab1)"


def test_nothing_that_matches_is_an_error_with_the_nearest(hold: Callable[..., LeaseSession]) -> None:
    holding = hold("impossible")
    with pytest.raises(FarmError, match="no board of the farm matches") as caught:
        holding.wait(60)
    assert "sim-1" in caught.value.hint


def test_who_leaves_the_queue_gets_no_board_later(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str
) -> None:
    holding = hold()
    eventually(lambda: fake_farm.leases)
    assert not holding.wait(0.5)
    holding.close()
    assert fake_farm.leases[0].over == "given back"
    fake_farm.add("lab1-sim-1", sim)
    time.sleep(0.3)
    assert fake_farm.boards["lab1-sim-1"].lease is None


def test_a_broken_stream_is_taken_up_again_with_the_same_lease(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str
) -> None:
    fake_farm.add("lab1-sim-1", sim)
    holding = hold()
    assert holding.wait(60)
    for number in (1, 2):
        fake_farm.cut()
        eventually(lambda number=number: fake_farm.leases[0].resumed == number)
    beats = fake_farm.leases[0].beats
    eventually(lambda: fake_farm.leases[0].beats > beats)
    assert [lease.number for lease in fake_farm.leases] == [1]
    assert holding.over == ""


def test_a_stream_that_breaks_in_the_queue_keeps_its_place(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str
) -> None:
    holding = hold()
    assert not holding.wait(0.5)
    fake_farm.cut()
    fake_farm.add("lab1-sim-1", sim)
    assert holding.wait(60)
    assert len(fake_farm.leases) == 1


def test_a_gateway_that_is_away_for_a_while_costs_no_lease(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str
) -> None:
    fake_farm.add("lab1-sim-1", sim)
    holding = hold()
    assert holding.wait(60)
    fake_farm.stop()
    time.sleep(0.5)
    assert holding.over == ""
    fake_farm.start()
    eventually(lambda: fake_farm.leases[0].resumed)
    assert holding.over == ""


def test_the_farm_may_end_it_with_a_reason(fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str) -> None:
    fake_farm.add("lab1-sim-1", sim)
    holding = hold()
    assert holding.wait(60)
    threading.Timer(0.2, lambda: fake_farm.end("lab1-sim-1", "its 30 minutes are over")).start()
    assert holding.ended(60) == "its 30 minutes are over"
    with pytest.raises(FarmError, match="30 minutes"):
        holding.wait(0)
    holding.close()


def test_no_gateway_is_told_at_once(fake_farm: FakeFarm) -> None:
    fake_farm.stop()
    with pytest.raises(FarmUnreachable, match="no gateway"):
        LeaseSession(replace(fake_farm.address, gateways=("unix:/nowhere/gateway.sock",)), lease_order("", "a test"))


def test_a_farm_that_cannot_be_understood_is_told(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = pb.Grant(lease=1, spec=pb.JobSpec(kind="dance"))
    monkeypatch.setattr("support.fake_farm.grant_message", lambda _: grant)
    fake_farm.add("lab1-sim-1", sim)
    with pytest.raises(FarmError, match="cannot be understood: this is no job of a farm"):
        hold().wait(20)


def test_it_may_be_closed_while_somebody_waits(hold: Callable[..., LeaseSession]) -> None:
    holding = hold()
    begin = time.monotonic()
    threading.Timer(0.3, holding.close).start()
    assert not holding.wait(2.0)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("direct", [True, False])
def test_programs_run_over_the_lease(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str, add: Program, direct: bool
) -> None:
    board = fake_farm.add("lab1-sim-1", sim, direct=direct)
    holding = hold()
    assert holding.wait(60)
    client = AgentClient(Target(holding.address), "lab1-sim-1", over=lambda: holding.over)
    try:
        client.describe()
        assert client.open_session("test", fence=holding.held.grant.fence, wait_s=5, on_wait=print) == 1
        add.push(client)
        loaded = add.load(client)
        a, b = (np.arange(4096, dtype=np.float32) + start for start in (0, 1))
        names = [spec.name for spec in loaded.inputs]
        seen = client.invoke(loaded.program_id, dict(zip(names, (a, b), strict=True)))
        np.testing.assert_array_equal(next(iter(seen.outputs.values())), a + b)
    finally:
        client.close()
    assert (board.dials > 0) is not direct


def test_another_machines_socket_is_not_taken_for_ours(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str
) -> None:
    board = fake_farm.add("lab1-sim-1", sim)
    board.card = replace(board.card, machine="another boot")
    holding = hold()
    assert holding.wait(60)
    assert holding.address != sim
    folder = Path(holding.address.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o077 == 0
    holding.close()
    assert not folder.exists()


def test_the_tunnel_carries_much_and_ends_with_the_lease(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str, tmp_path: Path
) -> None:
    fake_farm.add("lab1-sim-1", sim, direct=False)
    holding = hold()
    assert holding.wait(60)
    content = np.random.default_rng(0).bytes(20 << 20)
    (tmp_path / "blob").write_bytes(content)
    name = digest_of(content)
    client = AgentClient(Target(holding.address), "lab1-sim-1", over=lambda: holding.ended(1))
    try:
        client.describe()
        client.open_session("test", fence=1, wait_s=5, on_wait=print)
        client.put({name: (tmp_path / "blob", 0)})
        assert bytes(client.get(name)) == content
        fake_farm.end("lab1-sim-1", "it was cancelled")
        assert holding.ended(60)
        # What the tunnel carries ends a moment later.
        with pytest.raises(SessionEnded, match="the lease ended: it was cancelled"):
            eventually(lambda: client.pings(1) is None)
    finally:
        client.close()


def test_the_config_is_the_real_boards_with_address_and_fence() -> None:
    text = """
[board]
name = "as its host calls it"
hw_type = "rpi4"
description = "a board"
runtime = "onnxruntime"
[devices]
iree = "local-task"
[compile_flags]
iree = ["--iree-llvmcpu-target-cpu=cortex-a72"]
[connection]
address = "root@192.168.7.2"
identity = "~/.ssh/lab"
[power]
reset = ["relay", "3"]
"""
    card = BoardCard("lab1-rpi4", "lab1", "host-a", config=text, hw_type="rpi4")
    grant = Grant(5, "17", 17, "lab1-rpi4", 12, 6, 60, 1, JobSpec(Kind.LEASE))
    config = parse_board(leased_config(card, grant, "unix:/run/a.sock"), Path("x.toml"))
    assert (config.name, config.hw_type, config.runtime, config.description) == (
        "lab1-rpi4",
        "rpi4",
        "onnxruntime",
        "a board",
    )
    assert config.compile_flags == {"iree": ("--iree-llvmcpu-target-cpu=cortex-a72",)}
    connection = config.connection
    assert (connection.address, connection.fence, connection.identity) == ("unix:/run/a.sock", 12, "")
    assert connection.lease == "job 17, lease 5, host-a at lab1"
    assert not config.power.can("reset")


def test_a_card_without_a_config_is_enough_and_a_broken_one_is_told() -> None:
    grant = Grant(5, "17", 17, "lab1-rpi4", 12, 6, 60, 1, JobSpec(Kind.LEASE))
    config = parse_board(leased_config(BoardCard("lab1-x", hw_type="x"), grant, "unix:/a"), Path("x.toml"))
    assert (config.name, config.hw_type) == ("lab1-x", "x")
    with pytest.raises(FarmError, match="config that the farm has of lab1-x"):
        leased_config(BoardCard("lab1-x", config="[board"), grant, "unix:/a")


def test_this_machine_is_always_the_same() -> None:
    assert machine_id() and machine_id() == machine_id()
