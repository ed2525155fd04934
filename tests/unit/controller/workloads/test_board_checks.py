"""Checks of a board from its agent's description: passes and warnings."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from hil.controller.pipeline.runner import Runner
from hil.controller.records.commands.boards import BoardCheck
from hil.controller.workloads import board_checks
from hil.controller.workloads.board_checks import check_info
from hil.core.results import Outcome

NOW_NS = 1_790_000_000_000_000_000


def reading(name: str, value: float | str) -> dict:
    """Return a reading like MessageToDict, which omits zero and empty values."""
    return (
        {"name": name, "text": value}
        if isinstance(value, str)
        else {"name": name, **({"value": value} if value else {})}
    )


def look(*readings: dict, off_s: float = 0.0) -> dict[str, BoardCheck]:
    info = {"wall_ns": str(NOW_NS + round(off_s * 1e9)), "readings": list(readings)}
    return {one.name: one for one in check_info(info, NOW_NS)}


def test_good_board_passes_checks():
    found = look(
        reading("cpu0 governor", "performance"),
        reading("cpu4 governor", "schedutil"),
        reading("cooling_device0 (thermal-cpufreq-0)", 0.0),
        reading("firmware throttling", "0xd0000"),
        reading("throttle events", 12.0),
        reading("free memory", 512.0),
    )
    assert {name: one.state for name, one in found.items()} == {"clock": "pass", "governor": "pass", "memory": "pass"}
    assert not any(one.fix for one in found.values())
    assert found["governor"].found == "cpu0 performance, cpu4 schedutil"


@pytest.mark.parametrize(
    ("limit_mib", "said"), [(64, "64 MiB (limit of the agent)"), (0, "512 MiB free"), (900, "512 MiB free")]
)
def test_memory_check_shows_smaller_limit(limit_mib, said):
    shown = {"readings": [reading("free memory", 512.0)], "memory_limit_bytes": str(limit_mib << 20)}
    assert [(one.state, one.found) for one in check_info(shown, NOW_NS) if one.name == "memory"] == [("pass", said)]


def test_missing_readings_are_not_judged():
    assert list(check_info({}, NOW_NS)) == []


@pytest.mark.parametrize(
    ("shown", "name", "said"),
    [
        (reading("cpu0 governor", "powersave"), "governor", "cpu0 powersave"),
        (
            reading("cooling_device3 (thermal-cpufreq-0)", 2.0),
            "throttling",
            "cooling_device3 (thermal-cpufreq-0) at step 2",
        ),
        (reading("firmware throttling", "50005"), "throttling", "firmware throttling 50005"),
        (reading("free memory", 12.0), "memory", "12 MiB free"),
        (reading("free memory", 0.0), "memory", "0 MiB free"),
    ],
)
def test_doubtful_reading_gives_warning_with_fix(shown, name, said):
    one = look(shown)[name]
    assert (one.state, one.found) == ("warn", said)
    assert one.fix


@pytest.mark.parametrize(("off_s", "said"), [(3600.0, "3600.0 s ahead of"), (-90.0, "90.0 s behind")])
def test_wrong_wall_clock_gives_warning(off_s, said):
    one = look(off_s=off_s)["clock"]
    assert one.state == "warn"
    assert said in one.found
    assert look(off_s=off_s / 1000 / 100)["clock"].state == "pass"


@pytest.mark.parametrize(("runtime", "state"), [("acme", "skip"), ("onnxruntime", "fail")])
def test_refused_test_program_of_package_is_skipped(runtime: str, state: str, monkeypatch: pytest.MonkeyPatch):
    case = SimpleNamespace(outcome=Outcome.COMPILE_ERROR, reason="no operator Add", error=None)
    monkeypatch.setattr("hil.core.runtimes.can_load_onnx", lambda name: True)
    monkeypatch.setattr(Runner, "begin", lambda *_: None)
    monkeypatch.setattr(Runner, "run_on_board", lambda *_: case)
    check, error = board_checks._check_program(mock.Mock(), runtime)
    assert check.state == state and "no operator Add" in check.found
    assert (error is None) == (state == "skip")


@pytest.mark.parametrize(("python", "text"), [("3.11.7", "hil 0.1.0 on Python 3.11.7, r"), ("", "hil 0.1.0, r")])
def test_agent_check_names_python_if_the_board_has_it(python, text):
    info = {"agent_version": "0.1.0", "machine": {"python": python}}
    assert board_checks._describe_agent(info, 0.5) == ("pass", f"{text}esponds after 0.5 s")
