"""The command of virtual boards, without boards."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from filelock import FileLock

from tools.virtual_board.cli import cli


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lock of the board `pi`, which `up` left."""
    monkeypatch.setenv("HIL_VIRTUAL_LAB", str(tmp_path))
    path = tmp_path / "pi.lock"
    path.touch()
    return path


def test_down_removes_lock(lock: Path) -> None:
    assert CliRunner().invoke(cli, ["down", "pi"]).exit_code == 0
    assert list(lock.parent.iterdir()) == []


def test_down_keeps_lock_of_another_command(lock: Path) -> None:
    with FileLock(lock):
        assert CliRunner().invoke(cli, ["down", "pi"]).exit_code == 0
        assert lock.exists()
