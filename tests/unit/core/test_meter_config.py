"""The table [meter] of board configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.core.board_parser import parse_board
from hil.core.boards import LoadedBoard
from hil.core.meter_config import RAPL_FOLDER, MeterConfig
from hil.errors import UsageError

PATH = Path("/boards/pi.toml")


def parse(table: str) -> MeterConfig:
    return parse_board(f"[meter]\n{table}\n", PATH).meter


def test_config_without_meter_has_no_meter():
    assert not parse_board("", PATH).meter.is_set


def test_command_is_relative_to_the_config():
    meter = parse('kind = "command"\ncommand = "./stream --csv"\nclock = "epoch"\ncolumns = ["time_ms", "watts"]')
    assert meter.command == ("/boards/stream", "--csv")
    assert (meter.clock, meter.columns) == ("epoch", ("time_ms", "watts"))


def test_paths_are_relative_to_the_config():
    assert parse('kind = "file"\npath = "power.csv"').path == "/boards/power.csv"
    assert parse('kind = "rapl"').path == RAPL_FOLDER


def test_simulated_meter_has_options():
    meter = parse('kind = "simulated"\nrate_hz = 50\n[meter.options]\nactive_w = 7')
    assert (meter.simulated.active_w, meter.simulated.idle_w, meter.rate_hz) == (7, 2.0, 50.0)


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ("rate_hz = 5", "kind is ''", "expected one of simulated, command"),
        ('kind = "hwmom"', "kind is 'hwmom'", "did you mean 'hwmon'"),
        ('kind = "joulescope"', "kind is 'joulescope'", "install a package with an entry point in hil.meters"),
        ('kind = "command"', "has no command", "for example"),
        ('kind = "file"', "has no path", "power.csv"),
        ('kind = "rapl"\nchannel = 1', "channel has no effect with kind 'rapl'", "remove channel"),
        ('kind = "rapl"\nchanel = 1', "unknown key 'chanel'", "did you mean 'channel'"),
        ('kind = "rapl"\nrate_hz = 0', "rate_hz must be a number from 0.1 to 10000", ""),
        ('kind = "rapl"\nrate_hz = 1e-12', "rate_hz must be a number from 0.1 to 10000", ""),
        ('kind = "rapl"\nidle_s = -1', "idle_s must be a number of seconds above 0", ""),
        ('kind = "rapl"\nwindows = "gpio"', "needs a meter with a column gpio", "command or file"),
        ('kind = "rapl"\nwindows = "edge"', "windows is 'edge'", "clock, gpio"),
        ('kind = "hwmon"\npath = "/s"\nchannel = 100', "channel must be a whole number", ""),
        ('kind = "file"\npath = "p"\nclock = "gps"', "clock is 'gps'", "meter, monotonic, epoch"),
        ('kind = "file"\npath = "p"\ncolumns = ["time", "wats"]', "unknown column 'wats'", "did you mean 'watts'"),
        ('kind = "file"\npath = "p"\ncolumns = ["time", "volts"]', "no power", "volts and amps"),
        ('kind = "file"\npath = "p"\ncolumns = ["watts", "milliwatts"]', "two columns", ""),
        ('kind = "rapl"\n[meter.options]\nidle_w = 1', "options has no effect", ""),
        ('kind = "simulated"\noptions = 3', "options must be a table", ""),
        ('kind = "simulated"\n[meter.options]\nidle_w = "1"', "idle_w must be a number", ""),
        ('kind = "simulated"\n[meter.options]\nlost = 1', "lost must be below 1", ""),
        ('kind = "simulated"\n[meter.options]\nwatts = 1', "unknown key 'watts'", "idle_w"),
    ],
)
def test_invalid_meter_is_a_usage_error(table, message, hint):
    with pytest.raises(UsageError) as caught:
        parse(table)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_meter_needs_trust(tmp_path):
    program = tmp_path / "stream"
    program.write_text("one")
    path = tmp_path / "b.toml"
    path.write_text('[meter]\nkind = "command"\ncommand = ["./stream"]\n')
    config = parse_board(path.read_text(), path)
    assert config.asks == ("[meter] kind", "[meter] command")
    before = LoadedBoard(config, path, is_foreign=True).digest
    program.write_text("two")
    assert LoadedBoard(config, path, is_foreign=True).digest != before
