"""Meters of leased boards, with an in-process gateway: sensors of the board, and meters that only jobs can use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.agents import start_process, stop_process
from support.commands import Ended
from support.fake_farm import FakeFarm
from support.power_sensors import FakeSensor, check_energy_of_sensor

from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.farm.messages import MeterCard

# The board's clock is far from this machine's, and runs too fast.
CLOCK = "clock:offset=5000,ppm=300"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a simulator with a skewed clock."""
    process, address = start_process("hil.sim", f"unix:{tmp_path}/s.sock", tmp_path / "store", "--fault", CLOCK)
    yield address
    stop_process(process)


def test_sensor_of_leased_board_is_read_through_tunnel(fake_farm: FakeFarm, agent: str, tmp_path: Path):
    sensor = FakeSensor(tmp_path)
    leased = fake_farm.add("rpi5-1", agent, direct=False)
    leased.card = leased.card.replace(
        meter=MeterCard(kind="hwmon", on_board=True, path=str(tmp_path), rate_hz=100.0, idle_s=0.6)
    )
    board = connect_board(choose("farm:"))
    try:
        board.take()
        check_energy_of_sensor(board, sensor)
    finally:
        board.close()
    assert leased.dials > 0


def test_meter_of_host_is_reported(
    fake_farm: FakeFarm, agent: str, hil: Callable[..., Ended], doubling: Path, tmp_path: Path
):
    leased = fake_farm.add("rpi5-1", agent)
    leased.card = leased.card.replace(meter=MeterCard(kind="command"))
    words = (doubling, "--board", "farm:", "--runtime", "onnxruntime", "--reference", "onnxruntime")
    ended = hil("run", *words, "--energy", "--json")
    assert ended.code == 0, ended.err
    (case,) = ended.document["cases"]
    assert case["energy"]["refused"] == "no meter"
    assert "hil farm submit MODEL --board rpi5-1 --energy" in case["energy"]["reason"]
    ended = hil("bench", *words, "--iterations", "5")
    assert ended.code == 0, ended.err
    reason = "the command meter of board rpi5-1 is on the board's host, so only jobs can use it"
    assert f"energy not measured: {reason}" in ended.err
    ended = hil("bench", *words, "--iterations", "5", "--energy")
    assert (ended.code, f"--energy needs a meter, but {reason}" in ended.err) == (2, True), ended.err
