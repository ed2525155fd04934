"""Test the holder's side of a lease: queue, broken streams, release, and the tunnel to the board."""

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

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.farm.client import machine
from hil.controller.farm.client.lease_session import LeaseSession, lease_order, make_leased_config
from hil.controller.farm.client.machine import get_machine_id
from hil.controller.farm.messages import BoardCard, BoardRequest, Grant, JobSpec, Kind
from hil.core.board_parser import parse_board
from hil.core.digest import digest_of
from hil.errors import BoardBusy, FarmError, FarmUnreachable, SessionEnded, UsageError, VersionMismatch
from hil.protocol.v1 import farm_pb2 as pb

BOARD_CONFIGS = Path(__file__).parents[4] / "board_configs"


@pytest.fixture
def sim(start_agent: Callable[..., str]) -> str:
    return start_agent(module="hil.sim")


@pytest.fixture
def hold(fake_farm: FakeFarm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LeaseSession]]:
    """Order leases and close all of them at the end."""
    made: list[LeaseSession] = []
    monkeypatch.setattr("hil.controller.farm.client.lease_session._CLOSE_SECONDS", 60.0)

    def order(selector: str = "") -> LeaseSession:
        made.append(LeaseSession(fake_farm.address, lease_order(selector, "a test")))
        return made[-1]

    yield order
    for holding in made:
        holding.close()


def test_session_acquires_and_releases_board(fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str) -> None:
    fake_farm.add("lab1-sim-1", sim)
    holding = hold()
    assert holding.wait(60)
    assert holding.held.card.name == "lab1-sim-1"
    assert holding.address == sim
    assert holding.over == ""
    holding.close()
    assert fake_farm.leases[0].over == "released"
    assert fake_farm.boards["lab1-sim-1"].lease is None


@pytest.mark.ci
def test_session_reports_queue_position(fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str) -> None:
    fake_farm.add("lab1-sim-1", sim)
    first = hold()
    assert first.wait(60)
    second = hold()
    with pytest.raises(BoardBusy, match="no farm board became available within 3 s: 3 ahead of you"):
        second.wait_with_progress(3, lambda text: None)
    told: list[str] = []
    waiting = threading.Thread(target=second.wait_with_progress, args=(60, told.append))
    waiting.start()
    eventually(lambda: told)
    first.close()
    waiting.join(60)
    assert told[0] == "waiting for a farm board: 3 ahead of you"
    assert told[-1] == "farm board lab1-sim-1 (host-a at lab1)"


def test_session_reports_nearest_board_without_match(hold: Callable[..., LeaseSession]) -> None:
    holding = hold("impossible")
    with pytest.raises(FarmError, match="no board of the farm matches") as caught:
        holding.wait(60)
    assert "sim-1" in caught.value.hint


@pytest.mark.ci
def test_session_close_leaves_queue(fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str) -> None:
    holding = hold()
    eventually(lambda: fake_farm.leases)
    assert not holding.wait(0.5)
    holding.close()
    assert fake_farm.leases[0].over == "released"
    fake_farm.add("lab1-sim-1", sim)
    time.sleep(0.3)
    assert fake_farm.boards["lab1-sim-1"].lease is None


@pytest.mark.ci
def test_session_resumes_lease_after_broken_stream(
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


@pytest.mark.ci
def test_session_preserves_queue_position_after_broken_stream(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str
) -> None:
    holding = hold()
    assert not holding.wait(0.5)
    fake_farm.cut()
    fake_farm.add("lab1-sim-1", sim)
    assert holding.wait(60)
    assert len(fake_farm.leases) == 1


@pytest.mark.ci
def test_session_retains_lease_during_gateway_outage(
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


@pytest.mark.ci
def test_session_reports_reason_when_farm_ends_lease(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str
) -> None:
    fake_farm.add("lab1-sim-1", sim)
    holding = hold()
    assert holding.wait(60)
    threading.Timer(0.2, lambda: fake_farm.end("lab1-sim-1", "its 30 minutes are over")).start()
    assert holding.ended(60) == "its 30 minutes are over"
    with pytest.raises(FarmError, match="30 minutes"):
        holding.wait(0)
    holding.close()


def test_session_fails_immediately_without_gateway(fake_farm: FakeFarm) -> None:
    fake_farm.stop()
    with pytest.raises(FarmUnreachable, match="no farm gateway responds"):
        LeaseSession(
            replace(fake_farm.address, gateways=("unix:/nowhere/gateway.sock",)), lease_order("", "a test"), wait_s=0
        )


@pytest.mark.ci
def test_session_rejects_invalid_grant(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = pb.Grant(lease=1, spec=pb.JobSpec(kind="dance"))
    monkeypatch.setattr("support.fake_farm.encode_grant", lambda _: grant)
    fake_farm.add("lab1-sim-1", sim)
    with pytest.raises(FarmError, match="invalid response from the farm: invalid job"):
        hold().wait(20)


def test_session_rejects_grant_with_fewer_boards(fake_farm: FakeFarm, sim: str) -> None:
    fake_farm.add("lab1-sim-1", sim)
    order = lease_order("", "a test", requests=(BoardRequest(), BoardRequest()))
    with (
        LeaseSession(fake_farm.address, order) as holding,
        pytest.raises(VersionMismatch, match="does not support several boards"),
    ):
        holding.wait(60)
    assert fake_farm.leases[0].over == "released"


def test_session_keeps_lease_while_login_provider_is_down(fake_farm: FakeFarm, sim: str) -> None:
    errors: list[FarmUnreachable | UsageError] = []

    def get_token() -> str:
        if errors:
            raise errors[0]
        return fake_farm.address.token

    fake_farm.add("lab1-sim-1", sim)
    with LeaseSession(replace(fake_farm.address, token_source=get_token), lease_order("", "a test")) as holding:
        assert holding.wait(60)
        errors.append(FarmUnreachable("the login provider is not responding"))
        fake_farm.cut()
        assert not holding.ended(0.5)
        errors.clear()
        eventually(lambda: fake_farm.leases[0].resumed)
        errors.append(UsageError("the login has expired"))
        fake_farm.cut()
        assert holding.ended(60) == "the login has expired"


def test_session_close_ends_wait(hold: Callable[..., LeaseSession]) -> None:
    holding = hold()
    begin = time.monotonic()
    threading.Timer(0.3, holding.close).start()
    assert not holding.wait(2.0)
    assert time.monotonic() - begin < 20


@pytest.mark.ci
@pytest.mark.parametrize("direct", [True, False])
def test_session_runs_programs_directly_and_by_tunnel(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str, add: Program, direct: bool
) -> None:
    board = fake_farm.add("lab1-sim-1", sim, direct=direct)
    holding = hold()
    assert holding.wait(60)
    client = AgentClient(AgentEndpoint(holding.address), "lab1-sim-1", over=lambda: holding.over)
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


@pytest.mark.ci
def test_session_uses_tunnel_for_socket_of_other_machine(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str
) -> None:
    board = fake_farm.add("lab1-sim-1", sim)
    board.card = board.card.replace(machine="another boot")
    holding = hold()
    assert holding.wait(60)
    assert holding.address != sim
    folder = Path(holding.address.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o077 == 0
    holding.close()
    assert not folder.exists()


@pytest.mark.ci
def test_tunnel_carries_large_blob_and_ends_with_lease(
    fake_farm: FakeFarm, hold: Callable[..., LeaseSession], sim: str, tmp_path: Path
) -> None:
    fake_farm.add("lab1-sim-1", sim, direct=False)
    holding = hold()
    assert holding.wait(60)
    content = np.random.default_rng(0).bytes(20 << 20)
    (tmp_path / "blob").write_bytes(content)
    name = digest_of(content)
    client = AgentClient(AgentEndpoint(holding.address), "lab1-sim-1", over=lambda: holding.ended(1))
    try:
        client.describe()
        client.open_session("test", fence=1, wait_s=5, on_wait=print)
        client.put({name: (tmp_path / "blob", 0)})
        assert bytes(client.get(name)) == content
        fake_farm.end("lab1-sim-1", "it was cancelled")
        assert holding.ended(60)
        # The tunnel closes a moment later.
        with pytest.raises(SessionEnded, match="the lease ended: it was cancelled"):
            eventually(lambda: client.pings(1) is None)
    finally:
        client.close()


def test_leased_config_replaces_address_and_adds_fence() -> None:
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
    config = parse_board(make_leased_config(card, grant, "unix:/run/a.sock"), Path("x.toml"))
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


def test_leased_config_reads_console_through_farm() -> None:
    grant = Grant(5, "17", 17, "lab1-rpi4", 12, 6, 60, 1, JobSpec(Kind.LEASE))
    text = '[[patterns]]\nname = "npu"\npattern = "npu: fault"\n'
    card = BoardCard(
        "lab1-rpi4", config='[console]\ncommand = ["x"]\n', console=f'farm = "other"\ncommand = ["x"]\n{text}'
    )
    console = parse_board(make_leased_config(card, grant, "unix:/a"), Path("x.toml")).console
    assert (console.farm, console.command, [one.name for one in console.patterns]) == ("lab1-rpi4", (), ["npu"])
    without = parse_board(make_leased_config(card, grant, "unix:/a", has_console=False), Path("x.toml"))
    assert not without.console.is_set
    with pytest.raises(FarmError, match=r"cannot read the farm's config of lab1-rpi4: .*pattern"):
        make_leased_config(card.replace(console='patterns = ["x"]'), grant, "unix:/a")


def test_leased_config_accepts_missing_and_rejects_broken_config() -> None:
    grant = Grant(5, "17", 17, "lab1-rpi4", 12, 6, 60, 1, JobSpec(Kind.LEASE))
    config = parse_board(make_leased_config(BoardCard("lab1-x", hw_type="x"), grant, "unix:/a"), Path("x.toml"))
    assert (config.name, config.hw_type) == ("lab1-x", "x")
    with pytest.raises(FarmError, match="cannot read the farm's config of lab1-x"):
        make_leased_config(BoardCard("lab1-x", config="[board"), grant, "unix:/a")


def test_machine_id_is_boot_id_or_mac_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr("uuid.getnode", lambda: 0xAB)
    assert get_machine_id() == "0000000000ab"
    (tmp_path / "boot_id").write_text("5f3e\n")
    assert get_machine_id() == "5f3e"


@pytest.mark.parametrize(
    "text",
    [
        '[compile_flags]\niree = ["--iree-llvmcpu-system-linker-path=/tmp/x"]',
        '[compile_flags]\niree = ["--iree-llvmcpu-target-triple=a", "--iree-hal-dump-executable-files-to=/tmp"]',
        '[compile_flags]\niree = ["--iree-llvmcpu-target-triple=a b"]',
        '[compile_flags]\niree = ["--iree-hal-dump-executable-files-to=all"]',
        '[compile_flags]\ntfcompile = ["-o", "x"]',
        '[runtime]\nfile = "/etc/passwd"',
        '[runtime]\nenvironment = { LD_PRELOAD = "x" }',
    ],
)
def test_leased_config_rejects_settings_affecting_client(text: str) -> None:
    card, grant = BoardCard("lab1-x", config=text), Grant(5, "17", 17, "lab1-x", 12, 6, 60, 1, JobSpec(Kind.LEASE))
    with pytest.raises(FarmError, match="has settings that are forbidden for leased boards") as caught:
        make_leased_config(card, grant, "unix:/a")
    assert caught.value.hint


@pytest.mark.parametrize("file", sorted(BOARD_CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_leased_config_accepts_shipped_board_configs(file: Path) -> None:
    card = BoardCard("lab1-x", config=file.read_text())
    grant = Grant(5, "17", 17, "lab1-x", 12, 6, 60, 1, JobSpec(Kind.LEASE))
    leased = parse_board(make_leased_config(card, grant, "unix:/a"), Path("x.toml"))
    assert leased.compile_flags == parse_board(file.read_text(), file).compile_flags


@pytest.mark.parametrize(
    "text",
    ["board = 3", "[board]\nx = 1", "[x]", "a = " + "[" * 5000, "[labels]\n" + "a.b = 1\n" * 9000, "compile_flags = 3"],
)
def test_leased_config_reports_invalid_config_as_farm_error(text: str) -> None:
    grant = Grant(5, "17", 17, "lab1-x", 12, 6, 60, 1, JobSpec(Kind.LEASE))
    with pytest.raises(FarmError, match="farm's config of lab1-x"):
        make_leased_config(BoardCard("lab1-x", config=text), grant, "unix:/a")
