"""Meters that read the output of a program, or a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from hil.controller.devices.metering.stream_meter import CommandMeter, FileMeter, StreamMeter
from hil.core.meter_config import MeterConfig
from hil.errors import UsageError

LIMIT_S = 60.0


def make_command(code: str, **keys) -> CommandMeter:
    # Without site packages, Python starts in a few milliseconds.
    return CommandMeter(MeterConfig(kind="command", command=(sys.executable, "-S", "-u", "-c", code), **keys))


def wait_for(meter: StreamMeter, is_done) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_done(meter.read()):
        assert time.monotonic() < end, meter.read()
        time.sleep(0.01)


def test_command_delivers_samples_between_garbage():
    meter = make_command(
        "print('Meter v1')\nfor i in range(50): print(f'{i / 100},{i}'); print('?')\nimport time; time.sleep(99)"
    )
    meter.start()
    try:
        wait_for(meter, lambda found: found.times_ns.size == 50)
    finally:
        meter.stop()
    samples = meter.read()
    assert samples.watts.tolist() == list(range(50))
    assert samples.period_ns == pytest.approx(1e7, rel=0.01)
    assert samples.problem == ""


def test_slow_command_has_no_samples_at_first():
    meter = make_command("import time; time.sleep(0.3); print('0,1'); print('1,1', flush=True); time.sleep(99)")
    meter.start()
    try:
        assert meter.read().times_ns.size == 0
        wait_for(meter, lambda found: found.times_ns.size == 2)
    finally:
        meter.stop()


def test_command_that_dies_is_a_problem():
    meter = make_command("import sys; print('0,1'); print('no device', file=sys.stderr); sys.exit(3)")
    meter.start()
    try:
        wait_for(meter, lambda found: found.problem)
    finally:
        meter.stop()
    assert "ended with exit code 3: no device" in meter.read().problem
    assert meter.read().times_ns.size == 1


def test_command_that_prints_only_garbage_is_a_problem():
    meter = make_command("while True: print('\\x1b[0m usage: stream [-h]')")
    meter.start()
    try:
        wait_for(meter, lambda found: found.problem)
    finally:
        meter.stop()
    assert meter.read().problem.startswith("the meter prints no samples, for example '")
    assert "\x1b" not in meter.read().problem


def test_stop_ends_the_processes_of_the_command(tmp_path):
    pid = tmp_path / "pid"
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(pid)!r}, 'w').write(str(os.getpid())); print('0,1', flush=True); time.sleep(99)"
    )
    meter = make_command(code)
    meter.start()
    wait_for(meter, lambda found: found.times_ns.size == 1)
    meter.stop()
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_missing_command_is_a_usage_error():
    with pytest.raises(UsageError, match="cannot start the meter's command hil-no-such-meter"):
        CommandMeter(MeterConfig(kind="command", command=("hil-no-such-meter",))).start()


def test_file_delivers_only_new_lines(tmp_path):
    path = tmp_path / "power.csv"
    path.write_text("time,volts,amps\n1,5,1\n2,5,1\n")
    meter = FileMeter(MeterConfig(kind="file", path=str(path), clock="monotonic"))
    meter.start()
    try:
        with path.open("a") as file:
            file.write("3,5,2\n4,5,")
            file.flush()
            wait_for(meter, lambda found: found.times_ns.size == 1)
            file.write("3\n")
            file.flush()
            wait_for(meter, lambda found: found.times_ns.size == 2)
    finally:
        meter.stop()
    assert meter.read().watts.tolist() == [10.0, 15.0]


def test_file_may_start_again(tmp_path):
    path = tmp_path / "power.csv"
    path.write_text("1,1\n2,2\n3,3\n")
    meter = FileMeter(MeterConfig(kind="file", path=str(path), clock="monotonic"))
    meter.start()
    try:
        path.write_text("4,4\n")
        wait_for(meter, lambda found: found.times_ns.size == 1)
    finally:
        meter.stop()
    assert meter.read().watts.tolist() == [4.0]


def test_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read the meter's file"):
        FileMeter(MeterConfig(kind="file", path=str(tmp_path / "none.csv"))).start()
