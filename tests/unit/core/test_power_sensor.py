"""Power sensors and energy counters of the kernel, in a fake sysfs tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hil.core import power_sensor
from hil.core.power_sensor import RaplCounter, open_sensor
from hil.errors import UsageError


def make_counter(folder: Path, value: int, largest: int = 999_999) -> Path:
    (folder / "max_energy_range_uj").write_text(f"{largest}\n")
    (folder / "energy_uj").write_text(f"{value}\n")
    return folder


def test_hwmon_sensor_multiplies_voltage_and_current(tmp_path):
    folder = tmp_path / "hwmon7"
    folder.mkdir()
    (folder / "in1_input").write_text("5000\n")
    (folder / "curr1_input").write_text("400\n")
    assert open_sensor("hwmon", f"{tmp_path}/hwmon*", 1).read_value() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no power sensor for channel 1: expected power1_input"),
        ({"power1_input": "many"}, "contains b'many', not a number"),
    ],
)
def test_hwmon_without_value_is_a_usage_error(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        open_sensor("hwmon", str(tmp_path), 1)
    assert "sensors of this machine" in caught.value.hint or "has no hwmon sensor" in caught.value.hint


def test_pipe_is_not_a_sensor(tmp_path):
    os.mkfifo(tmp_path / "power1_input")
    with pytest.raises(UsageError, match="not a number"):
        open_sensor("hwmon", str(tmp_path), 1)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/hwmon*", "matches 0 directories"),
        ("/nowhere/hwmon3", "is not a directory"),
        ("hwmon3", "is not absolute"),
        ("/*/*/*/*", "too many wildcards"),
        ("/" + "a" * 2000, "is too long"),
    ],
)
def test_invalid_path_is_a_usage_error(path, message):
    with pytest.raises(UsageError, match=message):
        open_sensor("hwmon", path, 1)


def test_counter_adds_its_range_after_a_wrap_around(tmp_path):
    counter = RaplCounter(make_counter(tmp_path, 900_000))
    found = []
    for value in (900_000, 950_000, 30_000, 990_000, 10_000):
        make_counter(tmp_path, value)
        found.append(round(counter.read_value() * 1e6))
    assert found == [0, 50_000, 130_000, 1_090_000, 1_110_000]


def test_counter_that_was_set_back_is_refused(tmp_path):
    counter = RaplCounter(make_counter(tmp_path, 400_000))
    counter.read_value()
    make_counter(tmp_path, 100_000)
    with pytest.raises(ValueError, match="went back from 400000 to 100000"):
        counter.read_value()


def test_counter_that_was_set_back_near_its_end_is_refused(tmp_path, monkeypatch):
    times_s = iter((10.0, 10.1, 20.0))
    monkeypatch.setattr(power_sensor, "get_time_ns", lambda: round(next(times_s) * 1e9))
    range_uj = 262_143_328_850
    counter = RaplCounter(make_counter(tmp_path, 200_000_000_000, range_uj))
    counter.read_value()
    make_counter(tmp_path, 5_000, range_uj)
    with pytest.raises(ValueError, match="went back"):
        counter.read_value()
    # A pause of 10 s explains the energy.
    assert counter.read_value() == pytest.approx(62_143.3, abs=0.1)


def test_counter_without_range_is_a_usage_error(tmp_path):
    (tmp_path / "energy_uj").write_text("1\n")
    with pytest.raises(UsageError, match="is not an energy counter"):
        open_sensor("rapl", str(tmp_path), 0)


def test_counter_of_root_is_a_usage_error_with_a_hint(tmp_path, monkeypatch):
    make_counter(tmp_path, 1)

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(power_sensor.os, "open", refuse)
    with pytest.raises(UsageError, match="permission denied: cannot read") as caught:
        open_sensor("rapl", str(tmp_path), 0)
    assert "sudo chmod a+r" in caught.value.hint
