"""Meters of this machine's kernel, in a fake sysfs tree."""

from __future__ import annotations

import time

import pytest

from hil.controller.devices.metering.sysfs_meter import SysfsMeter
from hil.core.meter_config import MeterConfig
from hil.errors import UsageError

LIMIT_S = 60.0


def wait_for(meter: SysfsMeter, is_done) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_done(meter.read()):
        assert time.monotonic() < end, meter.read()
        time.sleep(0.005)


def test_hwmon_meter_samples_power(tmp_path):
    (tmp_path / "power2_input").write_text("2500000\n")
    meter = SysfsMeter(MeterConfig(kind="hwmon", path=str(tmp_path), channel=2, rate_hz=500))
    meter.start()
    try:
        wait_for(meter, lambda found: found.times_ns.size >= 5)
    finally:
        meter.stop()
    assert meter.read().watts[:5].tolist() == [2.5] * 5


def test_hwmon_meter_reports_a_sensor_that_disappears(tmp_path):
    sensor = tmp_path / "power1_input"
    sensor.write_text("1000000\n")
    meter = SysfsMeter(MeterConfig(kind="hwmon", path=str(tmp_path), rate_hz=500))
    meter.start()
    try:
        sensor.unlink()
        wait_for(meter, lambda found: found.problem)
    finally:
        meter.stop()
    assert meter.read().problem == "reading the meter failed: No such file or directory"


def test_missing_sensor_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="has no power sensor"):
        SysfsMeter(MeterConfig(kind="hwmon", path=str(tmp_path))).start()


def test_rapl_meter_counts_across_the_wrap_around(tmp_path):
    (tmp_path / "max_energy_range_uj").write_text("999999\n")
    counter = tmp_path / "energy_uj"
    counter.write_text("800000\n")
    meter = SysfsMeter(MeterConfig(kind="rapl", path=str(tmp_path), rate_hz=1000))
    meter.start()
    try:
        wait_for(meter, lambda found: found.times_ns.size)
        for value, total in ((900_000, 0.1), (100_000, 0.3), (300_000, 0.5)):
            fresh = tmp_path / "fresh"
            fresh.write_text(f"{value}\n")
            fresh.rename(counter)
            wait_for(meter, lambda found, total=total: found.joules[-1] > total - 1e-6)
    finally:
        meter.stop()
    assert meter.read().joules.tolist() == pytest.approx([0.0, 0.1, 0.3, 0.5])
