"""Events during a run, derived from board descriptions before and after."""

from __future__ import annotations

import pytest
from google.protobuf.json_format import MessageToDict

from hil.controller.devices.health import list_changes
from hil.protocol.v1 import agent_pb2 as pb


def info(*readings: pb.Reading, boot: str = "a", clock_s: float = 0.0, wall_s: float = 1e9) -> dict:
    """Return a description as decoded from the wire."""
    reply = pb.DescribeReply(
        machine=pb.Machine(boot_id=boot), readings=readings, clock_ns=int(clock_s * 1e9) + 1, wall_ns=int(wall_s * 1e9)
    )
    return MessageToDict(reply, preserving_proto_field_name=True)


def reading(name: str, value: float | str) -> pb.Reading:
    return pb.Reading(name=name, text=value) if isinstance(value, str) else pb.Reading(name=name, value=value)


def test_unchanged_board_has_empty_report():
    steady = [
        reading("cpu0 frequency", 600.0),
        reading("cpu0 highest frequency", 1800.0),
        reading("cpu0 governor", "performance"),
        reading("thermal_zone0 (cpu)", 50.0),
        reading("throttle events", 7.0),
        reading("firmware throttling", "50000"),
        reading("cooling_device0 (cpufreq-cpu0)", 0.0),
    ]
    later = [reading("cpu0 frequency", 1800.0), reading("thermal_zone0 (cpu)", 61.0), *steady[1:3], *steady[4:]]
    assert list_changes(info(*steady), info(*later, clock_s=5.0, wall_s=1e9 + 5.2)) == []


@pytest.mark.parametrize(
    ("name", "was", "now", "said"),
    [
        ("throttle events", 0.0, 3.0, "3 CPU throttle events"),
        ("cooling_device2 (thermal-cpufreq-0)", 0.0, 2.0, "thermal-cpufreq-0) at step 2"),
        ("cooling_device2 (thermal-cpufreq-0)", 4.0, 0.0, "at step 4"),
        ("cpu4 highest frequency", 1800.0, 1200.0, "cpu4 highest frequency fell from 1800 to 1200 MHz"),
        ("cpu0 governor", "performance", "powersave", "cpu0 governor was changed from performance to powersave"),
        ("firmware throttling", "0", "0x50000", "undervoltage|throttled the CPU"),
        ("firmware throttling", "0x2", "0x0", "limited the clock"),
        ("firmware throttling", "80000", "80008", "soft temperature limit"),
    ],
)
def test_changed_reports_throttling_and_frequency(name, was, now, said):
    lines = list_changes(info(reading(name, was)), info(reading(name, now)))
    wanted = said.split("|")
    assert len(lines) == len(wanted)
    assert [text for line, text in zip(lines, wanted, strict=True) if text not in line] == []


def test_changed_reports_only_reboot_after_reboot():
    events = reading("throttle events", 9.0)
    assert list_changes(info(boot="a"), info(events, boot="b", wall_s=2e9)) == ["the board rebooted"]


def test_changed_reports_wall_clock_step():
    assert list_changes(info(), info(clock_s=10, wall_s=1e9 + 3610)) == [
        "the board's wall clock was set 3600 s forward"
    ]
    assert list_changes(info(), info(clock_s=10, wall_s=1e9 - 3590)) == ["the board's wall clock was set 3600 s back"]


def test_changed_ignores_missing_readings():
    assert list_changes({}, info(reading("throttle events", 9.0))) == []
    assert list_changes(info(reading("firmware throttling", "odd")), info(reading("firmware throttling", "0x1"))) == []
    assert list_changes(info(boot=""), info(boot="b")) == []
