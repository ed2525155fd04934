"""Power sensors and energy counters of the kernel, in a fake sysfs tree."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hil.controller.devices.metering.sysfs_meter import HwmonMeter, RaplMeter, SysfsMeter, unwrap_counter
from hil.core.meter_config import MeterConfig
from hil.errors import UsageError

LIMIT_S = 60.0


def wait_for_samples(meter: SysfsMeter, count: int) -> None:
    end = time.monotonic() + LIMIT_S
    while meter.read().times_ns.size < count:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_hwmon_reads_power(tmp_path):
    (tmp_path / "power2_input").write_text("2500000\n")
    meter = HwmonMeter(MeterConfig(kind="hwmon", path=str(tmp_path), channel=2, rate_hz=500))
    meter.start()
    try:
        wait_for_samples(meter, 5)
    finally:
        meter.stop()
    assert meter.read().watts[:5].tolist() == [2.5] * 5


def test_hwmon_multiplies_voltage_and_current(tmp_path):
    folder = tmp_path / "hwmon7"
    folder.mkdir()
    (folder / "in1_input").write_text("5000\n")
    (folder / "curr1_input").write_text("400\n")
    meter = HwmonMeter(MeterConfig(kind="hwmon", path=f"{tmp_path}/hwmon*", rate_hz=500))
    meter.start()
    try:
        wait_for_samples(meter, 1)
    finally:
        meter.stop()
    assert meter.read().watts[0] == pytest.approx(2.0)


def test_hwmon_reports_a_sensor_that_disappears(tmp_path):
    sensor = tmp_path / "power1_input"
    sensor.write_text("1000000\n")
    meter = HwmonMeter(MeterConfig(kind="hwmon", path=str(tmp_path), rate_hz=500))
    meter.start()
    try:
        sensor.unlink()
        end = time.monotonic() + LIMIT_S
        while not meter.read().problem and time.monotonic() < end:
            time.sleep(0.005)
    finally:
        meter.stop()
    assert meter.read().problem == "reading the meter failed: No such file or directory"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no power sensor for channel 1"),
        ({"power1_input": "many"}, "contains b'many', not a number"),
    ],
)
def test_hwmon_without_sensor_is_a_usage_error(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        HwmonMeter(MeterConfig(kind="hwmon", path=str(tmp_path))).start()


def test_missing_folder_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="matches 0 directories"):
        HwmonMeter(MeterConfig(kind="hwmon", path=f"{tmp_path}/hwmon*")).start()
    with pytest.raises(UsageError, match="is not a directory"):
        RaplMeter(MeterConfig(kind="rapl", path=f"{tmp_path}/none")).start()


def test_rapl_counts_across_the_wrap_around(tmp_path):
    (tmp_path / "max_energy_range_uj").write_text("999999\n")
    counter = tmp_path / "energy_uj"
    counter.write_text("800000\n")
    meter = RaplMeter(MeterConfig(kind="rapl", path=str(tmp_path), rate_hz=1000))
    meter.start()
    try:
        wait_for_samples(meter, 1)
        for value, total in ((900_000, 0.1), (100_000, 0.3), (300_000, 0.5)):
            fresh = tmp_path / "fresh"
            fresh.write_text(f"{value}\n")
            fresh.rename(counter)
            end = time.monotonic() + LIMIT_S
            while meter.read().joules[-1] < total - 1e-6 and time.monotonic() < end:
                time.sleep(0.005)
    finally:
        meter.stop()
    joules = meter.read().joules
    assert joules.tolist() == pytest.approx([0.0, 0.1, 0.3, 0.5])


def test_rapl_without_range_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="is not an energy counter"):
        RaplMeter(MeterConfig(kind="rapl", path=str(tmp_path))).start()


def test_unwrap_counter_adds_the_range():
    assert unwrap_counter(np.array([90.0, 95.0, 3.0, 99.0, 1.0]), 99.0).tolist() == [0.0, 5.0, 13.0, 109.0, 111.0]
    assert unwrap_counter(np.empty(0), 99.0).size == 0
