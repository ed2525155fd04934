"""Boards that are places of a real labgrid: acquire, reach, switch and release."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.agents import start_process, stop_process
from support.labgrids import Labgrid, Outlet, running_labgrid
from support.running_farms import running_farm
from support.sshd import Sshd, running_sshd
from support.waiting import eventually

from hil.controller.devices.power_control.power import switch
from hil.controller.devices.ssh.connect import open_shell
from hil.controller.farm.host.place_watch import PlaceWatch
from hil.controller.farm.labgrid import LabgridPlace, borrow_place
from hil.core import board_config
from hil.core.board_config import BoardConfig
from hil.core.boards import load_board
from hil.errors import BoardBusy, BoardUnreachable, UsageError


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="module")
def outlet() -> Iterator[Outlet]:
    outlet = Outlet()
    yield outlet
    outlet.close()


@pytest.fixture(scope="module")
def lab(
    labgrid_bin: Path,
    tmp_path_factory: pytest.TempPathFactory,
    sshd: Sshd,
    outlet: Outlet,
) -> Iterator[Labgrid]:
    """Set up the places `rpi5` with SSH and power, `bare` with neither, and `two` with two services."""
    service = f"{{address: 127.0.0.1, username: {sshd.user}, port: {sshd.port}}}"
    with running_labgrid(labgrid_bin, tmp_path_factory.mktemp("labgrid")) as lab:
        lab.export(
            "shelf",
            f"rpi5:\n  NetworkService: {service}\n"
            f"  NetworkPowerPort: {{model: rest, host: '{outlet.url}', index: 1}}\n"
            "bare:\n  NetworkPowerPort: {model: rest, host: 'http://127.0.0.1:9/{index}', index: 2}\n"
            f"two:\n  main:\n    cls: NetworkService\n    address: 10.0.0.9\n    username: root\n"
            "  spare:\n    cls: NetworkService\n    address: 10.0.0.10\n    username: root\n",
        )
        for name in ("rpi5", "bare", "two"):
            lab.place(name, f"shelf/{name}/*")
        yield lab


@pytest.fixture
def digits() -> Path:
    return Path(__file__).parents[2] / "examples/digits/digits_cnn.onnx"


@pytest.fixture
def config(lab: Labgrid, sshd: Sshd, tmp_path: Path) -> BoardConfig:
    """Write a config for the place's board."""
    path = tmp_path / "shelf-rpi5.toml"
    path.write_text(
        '[board]\nhw_type = "generic"\n'
        f'[connection]\nidentity = "{sshd.identity}"\nknown_hosts = "{sshd.known_hosts}"\n'
        f'[labgrid]\nplace = "rpi5"\ncoordinator = "{lab.address}"\nclient = "{lab.bin}/labgrid-client"\n'
    )
    return load_board(str(path)).config


def place_named(config: BoardConfig, **settings: str) -> BoardConfig:
    return replace(config, labgrid=replace(config.labgrid, **settings))


def test_labgrid_acquires_and_releases_place(config: BoardConfig, lab: Labgrid, tmp_path: Path) -> None:
    with borrow_place(config, "bench") as board:
        assert "hil-farm-bench" in lab.client("who")
        with open_shell(board.connection.address, board.connection, board=board.name, base=tmp_path) as shell:
            assert shell.run(["echo", "here"]).text == "here"
    assert "rpi5" not in lab.client("who")


@pytest.mark.slow
def test_labgrid_switches_board_power(config: BoardConfig, outlet: Outlet) -> None:
    before = len(outlet.told)
    with borrow_place(config, "bench") as board:
        switch(board.power, "off", board=board.name)
        switch(board.power, "cycle", board=board.name)
    assert outlet.told[before:] == ["0", "0", "1"]


@pytest.mark.slow
def test_board_config_overrides_labgrid_settings(config: BoardConfig, lab: Labgrid, tmp_path: Path) -> None:
    head, _, labgrid = config.path.read_text().partition("[labgrid]")
    mine = '[connection]\naddress = "unix:/run/agent.sock"\n[power]\ncycle = "true"\n[labgrid]'
    path = tmp_path / "own.toml"
    path.write_text(head.partition("[connection]")[0] + mine + labgrid)
    own = load_board(str(path)).config
    with borrow_place(own, "bench") as board:
        assert board.connection == own.connection
        assert board.power.hooks["cycle"] == own.power.hooks["cycle"]
        assert board.power.can("off")  # from labgrid


def test_labgrid_place_of_other_user_is_in_use(config: BoardConfig, lab: Labgrid) -> None:
    with (
        held_by_bob(lab),
        pytest.raises(BoardBusy, match=r"labgrid place rpi5 is in use by .*/bob"),
        borrow_place(config, "bench"),
    ):
        pass


@contextlib.contextmanager
def held_by_bob(lab: Labgrid) -> Iterator[None]:
    lab.client("-p", "rpi5", "acquire", user="bob")
    try:
        yield
        assert "bob" in lab.client("who")
    finally:
        lab.client("-p", "rpi5", "release", user="bob")


@pytest.mark.slow
def test_labgrid_reserved_place_is_in_use(config: BoardConfig, lab: Labgrid) -> None:
    lab.client("-p", "rpi5", "set-tags", "kind=pi")
    token = lab.client("reserve", "--shell", "kind=pi", user="bob").split("=")[1].strip()
    try:
        eventually(lambda: "allocated" in lab.client("reservations"))
        with pytest.raises(BoardBusy, match="not reserved for"), borrow_place(config, "bench"):
            pass
    finally:
        lab.client("cancel-reservation", token, user="bob")


@pytest.mark.slow
def test_restarted_coordinator_returns_place_to_host(config: BoardConfig, lab: Labgrid) -> None:
    messages: list[str] = []
    with borrow_place(config, "bench") as board:
        watch = PlaceWatch(LabgridPlace(board.labgrid, "bench", board.name), messages.append, recent_s=0)
        lab.restart_coordinator()
        assert "hil-farm-bench" not in lab.client("who")
        # The coordinator receives the resources a moment after the exporter has connected.
        eventually(lambda: "Matching resource" in lab.client("-p", "rpi5", "show"))
        watch.ensure_held()
        assert "hil-farm-bench" in lab.client("who")
        assert messages == ["labgrid place rpi5 was released; acquired the place again"]
        LabgridPlace(board.labgrid, "bench", board.name).release()
        with held_by_bob(lab), pytest.raises(BoardBusy, match=r"in use by .*/bob"):
            watch.ensure_held()


@pytest.mark.slow
def test_restarted_host_reacquires_labgrid_place(config: BoardConfig, lab: Labgrid) -> None:
    LabgridPlace(config.labgrid, "bench-1", config.name).acquire()  # simulate a host that dies after acquire
    with pytest.raises(BoardBusy), borrow_place(config, "bench-2"):
        pass
    with borrow_place(config, "bench-1") as board:
        assert board.connection.address
    with borrow_place(config, "bench-2"):
        pass


@pytest.mark.slow
def test_labgrid_detects_kicked_place(config: BoardConfig, lab: Labgrid) -> None:
    place = LabgridPlace(config.labgrid, "bench", config.name)
    with borrow_place(config, "bench") as board:
        assert place.is_held()
        lab.client("-p", "rpi5", "release", "--kick")
        assert not place.is_held()
        with pytest.raises(Exception, match="failed with exit code 1"):
            switch(board.power, "cycle", board=board.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"place": "rpi"}, UsageError, "place 'rpi' not found"),  # a part of a name finds the place, to labgrid
        ({"place": "nothing"}, UsageError, "matches nothing"),
        ({"place": "bare"}, UsageError, "has no NetworkService"),
        ({"place": "two"}, UsageError, "services main, spare"),
        ({"place": "two", "service": "third"}, UsageError, "services main, spare"),
        ({"coordinator": "127.0.0.1:9"}, BoardUnreachable, "connect to coordinator"),
        ({"client": "/nowhere/labgrid-client"}, UsageError, "cannot start the labgrid client"),
    ],
)
def test_labgrid_reports_invalid_settings(
    config: BoardConfig, lab: Labgrid, settings: dict[str, str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says), borrow_place(place_named(config, **settings), "bench"):
        pass
    assert "hil-farm" not in lab.client("who")


@pytest.mark.slow
def test_labgrid_selects_named_service(config: BoardConfig) -> None:
    with borrow_place(place_named(config, place="two", service="spare"), "bench") as board:
        assert board.connection.address == "root@10.0.0.10"


@pytest.mark.slow
def test_labgrid_reports_lost_exporter_as_unreachable(config: BoardConfig, lab: Labgrid) -> None:
    lab.export("attic", "old:\n  NetworkService: {address: 10.0.0.11, username: root}\n")
    lab.place("old", "attic/old/*")
    lab.stop("attic")
    with (
        pytest.raises((BoardUnreachable, UsageError)) as raised,
        borrow_place(place_named(config, place="old"), "bench"),
    ):
        pass
    assert raised.type is BoardUnreachable


@pytest.mark.slow
def test_farm_waits_for_labgrid_place_and_releases_it(
    config: BoardConfig, lab: Labgrid, tmp_path: Path, digits: Path
) -> None:
    """A simulator provides the agent, which avoids deployment over SSH."""
    agent, address = start_process("hil.sim", f"unix:{tmp_path}/agent.sock", tmp_path / "store", "--config", "sim")
    try:
        text = config.path.read_text().replace("[connection]", f'[connection]\naddress = "{address}"')
        (tmp_path / "shelf.toml").write_text(text.replace('"generic"', '"sim"'))
        with contextlib.ExitStack() as stack:
            with held_by_bob(lab):
                farm = stack.enter_context(
                    running_farm("--board", str(tmp_path / "shelf.toml"), environment=dict(os.environ))
                )
                [board] = farm.hil("farm", "boards", "--json").document["boards"]
                assert board["state"] == "quarantined"
                assert re.fullmatch("labgrid place rpi5 is in use by .*/bob; .*release", board["reason"])
            ended = farm.hil("farm", "submit", digits, "--wait", cwd=tmp_path)
            assert ended.code == 0, ended
            assert "hil-farm" in lab.client("who")
            assert farm.stop() == 0
        eventually(lambda: "hil-farm" not in lab.client("who"))
    finally:
        stop_process(agent)


@pytest.mark.slow
def test_board_without_labgrid_stays_unchanged(config: BoardConfig) -> None:
    plain = replace(config, labgrid=board_config.Labgrid())
    with borrow_place(plain, "bench") as board:
        assert board is plain
