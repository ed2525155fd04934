from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.farm.host.board_connection import BoardConnection
from hil.controller.farm.host.job_attempt import check_health
from hil.controller.storage.isolated import Isolated
from hil.controller.workloads import run_job
from hil.controller.workloads.board_checks import tiny_model
from hil.core.board_config import BoardConfig, Command, Power
from hil.core.boards import load_board
from hil.errors import BoardUnreachable


class SilentBoard(BoardConnection):
    """A way to a board that answers after so many looks."""

    def __init__(self, silent: int, power: Power) -> None:
        self.config: BoardConfig = replace(load_board("generic"), power=power)
        self.post: Any = SimpleNamespace(name="rpi5")
        self.did: list[str] = []
        self._silent = silent

    def look(self) -> None:
        self.did.append("look")
        self._silent -= 1
        if self._silent >= 0:
            raise BoardUnreachable("nobody answers")

    def hang_up(self) -> None:
        self.did.append("hang up")


@pytest.fixture
def switched(tmp_path: Path) -> Power:
    """Power whose every cycle is a line in the file ``cycles``."""
    return Power({"cycle": Command(("sh", "-c", f"echo x >> {tmp_path}/cycles"))}, boot_s=5.0)


def cycles(folder: Path) -> int:
    return len((folder / "cycles").read_text().splitlines()) if (folder / "cycles").exists() else 0


@pytest.mark.parametrize(
    ("failures", "silent", "wanted"),
    [(0, 0, 0), (0, 1, 1), (1, 0, 1), (3, 0, 1)],
    ids=["well", "silent", "failed before", "failed often"],
)
def test_power_is_cycled_where_a_check_failed_before_or_the_board_stays_silent(
    failures, silent, wanted, switched, tmp_path
):
    way = SilentBoard(silent, switched)
    way.revive(failures, lambda text: None)
    assert cycles(tmp_path) == wanted and way.did[-1] == "look"


def test_a_board_whose_power_nobody_can_switch_is_only_looked_at():
    way = SilentBoard(1, Power())
    with pytest.raises(BoardUnreachable):
        way.revive(2, lambda text: None)
    assert way.did == ["look"]


def attempt(runtime: str, host: Path, folder: Path, isolated: Isolated) -> Any:
    """What a health check uses of an attempt at a job."""
    board = BoardChoice(BoardConfig("rack3", "rpi5"))
    site: Any = SimpleNamespace(folder=host)
    return SimpleNamespace(runtime=runtime, board=board, site=site, folder=folder, print=print, isolated=isolated)


@pytest.mark.parametrize("runtime", ["tflite", "vendor"])
def test_where_there_is_no_program_to_try_it_is_enough_that_the_board_answers(runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hil.controller.workloads.run_job.run_job", lambda *args, **more: pytest.fail("nothing is to be run")
    )
    with Isolated(1) as isolated:
        result = check_health(attempt(runtime, tmp_path, tmp_path, isolated))
    assert result.exit_code == 0 and "no program" in result.reason


@pytest.mark.parametrize(
    ("record", "code", "reason"),
    [
        ({"exit_code": 0, "cases": [{"outcome": "PASS", "reason": ""}]}, 0, ""),
        ({"exit_code": 1, "cases": [{"outcome": "FAIL", "reason": "3 differ"}]}, 1, "a tiny model: FAIL: 3 differ"),
    ],
)
def test_a_board_is_as_healthy_as_its_answer_is_right(record, code, reason, tmp_path, monkeypatch):
    asked: list[Any] = []

    def ran(job: Any, **more: Any) -> Any:
        asked.append(job)
        return record

    monkeypatch.setattr(run_job, "run_job", ran)
    (tmp_path / "job").mkdir()
    with Isolated(1) as isolated:
        for _ in range(2):
            result = check_health(attempt("onnxruntime", tmp_path, tmp_path / "job", isolated))
            assert (result.exit_code, result.reason) == (code, reason)
    (tmp_path / "again").mkdir()
    assert {job.models for job in asked} == {(tmp_path / "tiny.onnx",)} and asked[0].board == "rack3"
    assert (tmp_path / "tiny.onnx").read_bytes() == tiny_model(tmp_path / "again").read_bytes()
