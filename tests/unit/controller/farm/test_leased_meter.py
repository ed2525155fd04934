"""The meter in the config of a leased board."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.farm.client.lease_session import make_leased_config
from hil.controller.farm.messages import BoardCard, Grant, JobSpec, Kind, MeterCard
from hil.core.board_config import BoardConfig
from hil.core.board_parser import parse_board
from hil.errors import FarmError

SENSOR = MeterCard(kind="hwmon", on_board=True, path="/sys/hwmon*", channel=2, rate_hz=50.0, idle_s=0.5)


def make_config(meter: MeterCard | None) -> BoardConfig:
    card = BoardCard("rpi5-1", config="[board]\n", hw_type="rpi5", meter=meter)
    grant = Grant(5, "17", 1, "rpi5-1", 3, 15.0, 60.0, 1, JobSpec(Kind.LEASE))
    return parse_board(make_leased_config(card, grant, "unix:a"), Path("/elsewhere/b.toml"))


def test_leased_config_has_sensor_of_board():
    config = make_config(SENSOR)
    meter = config.meter
    assert (meter.kind, meter.path, meter.where, meter.channel) == ("hwmon", "/sys/hwmon*", "board", 2)
    assert (meter.rate_hz, meter.idle_s) == (50.0, 0.5)
    assert config.has_board_meter
    rapl = make_config(SENSOR.replace(kind="rapl", path="/sys/rapl:0"))
    assert (rapl.meter.kind, rapl.connection.host_meter) == ("rapl", "")
    assert not make_config(None).meter.is_set


@pytest.mark.parametrize(
    "meter",
    [MeterCard(kind="command"), MeterCard(kind="rapl"), MeterCard(kind="file", on_board=True, path="/etc/passwd")],
)
def test_leased_config_has_only_kind_of_other_meters(meter: MeterCard):
    config = make_config(meter)
    assert (config.connection.host_meter, config.meter.is_set) == (meter.kind, False)


@pytest.mark.parametrize("change", [{"path": "sensor"}, {"rate_hz": 0.0}, {"idle_s": -1.0}, {"channel": 1000}])
def test_invalid_sensor_is_farm_error(change: dict[str, object]):
    with pytest.raises(FarmError, match="cannot read the farm's meter of rpi5-1"):
        make_config(SENSOR.replace(**change))
