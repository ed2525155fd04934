from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.power_control.recovery import recover_board
from hil.core.board_config import BoardCommand, BoardConfig, Command, Power, Recover
from hil.errors import BoardUnreachable, HilError, RunFailed

STUCK = RunFailed("the device is stuck")
GONE = BoardUnreachable("it reboots")


def touch(path: Path) -> Command:
    return Command((sys.executable, "-c", f"open({str(path)!r}, 'a').write('x')"))


def checks(*found: HilError | None) -> Callable[[], HilError | None]:
    left = list(found)
    return lambda: left.pop(0)


@pytest.fixture
def choice(tmp_path) -> BoardChoice:
    """Return a board with a reset, a local command, a command over SSH, a failing command and a power cycle."""
    power = Power({"reset": touch(tmp_path / "reset"), "cycle": touch(tmp_path / "cycle")}, boot_s=30.0)
    fails = Command((sys.executable, "-c", "import sys; sys.exit(3)"))
    steps = ("reset", touch(tmp_path / "driver"), BoardCommand(("rmmod", "npu")), fails, "cycle")
    return BoardChoice(BoardConfig("b", "npu", power=power, recover=Recover(steps)), address="unix:/b")


def done(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_recovery_leaves_working_board(choice, tmp_path):
    found = recover_board(choice, checks(None), say=pytest.fail)
    assert found.is_working and found.problem is None and found.steps == () and not done(tmp_path)


def test_recovery_stops_at_successful_step(choice, tmp_path):
    said: list[str] = []
    found = recover_board(choice, checks(STUCK, STUCK, None), say=said.append)
    assert found.is_working and found.problem is STUCK
    assert [step.problem for step in found.steps] == ["the device is stuck", ""]
    assert done(tmp_path) == {"reset", "driver"}
    assert said[0] == "unix:/b does not work (the device is stuck): trying reset"


def test_recovery_tries_every_step_and_reports_failures(choice, tmp_path):
    found = recover_board(choice, checks(*[STUCK] * 4), say=lambda text: None)
    assert not found.is_working and found.left is STUCK
    assert done(tmp_path) == {"reset", "driver", "cycle"}
    assert [step.name for step in found.steps][::4] == ["reset", "power cycle"]
    assert [bool(step.error) for step in found.steps] == [False, False, True, True, False]
    assert "not connected over SSH" in found.steps[2].error and "failed with exit code 3" in found.steps[3].error


def test_recovery_waits_for_boot_after_reset(choice, monkeypatch):
    monkeypatch.setattr("hil.controller.devices.power_control.recovery._PAUSE_SECONDS", 0.0)
    found = recover_board(choice, checks(STUCK, GONE, GONE, None), say=lambda text: None)
    assert found.is_working and len(found.steps) == 1


def test_command_step_does_not_wait_for_boot(choice, monkeypatch):
    found = recover_board(choice, checks(STUCK, STUCK, GONE, STUCK), say=lambda text: None)
    assert [step.problem for step in found.steps[:2]] == ["the device is stuck", "it reboots"]
