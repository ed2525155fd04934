"""Targets, boards and backends of an installed package, in this process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.npx import EXAMPLE
from support.pip import install

from hil.controller.devices.board_choice import fill_target, knows_target
from hil.core.boards import list_boards, load_board
from hil.errors import UsageError
from hil.testing.traces.backends import parse_backend


@pytest.fixture
def npx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the example package for this process."""
    site = tmp_path / "site"
    site.mkdir()
    install(EXAMPLE, site)
    monkeypatch.syspath_prepend(str(site))
    return site


def test_package_board_is_found_and_needs_no_trust(npx: Path):
    path = list_boards()["npx-kit"]
    assert path == npx / "hil_npx" / "boards" / "npx-kit.toml"
    board = load_board("npx-kit")
    assert (board.config.runtime, board.config.connection.address) == ("npx", "npx:local")
    assert not board.is_foreign


def test_user_board_comes_before_package_board(npx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = tmp_path / "own"
    own.mkdir()
    (own / "npx-kit.toml").write_text("")
    monkeypatch.setenv("HIL_BOARDS", str(own))
    assert list_boards()["npx-kit"] == own / "npx-kit.toml"


def test_package_chooses_target_unless_config_has_flags(npx: Path):
    config = load_board("generic").config
    assert not knows_target(config, "npx")
    filled, told = fill_target(config, "npx", {"machine": {"arch": "riscv64"}})
    assert filled.compile_flags == {"npx": ("--npx-lanes=4",)} and told == "npx with 4 lanes"
    assert knows_target(filled, "npx")


def test_failing_target_names_package(npx: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "hil.controller.devices.board_choice.resolve", lambda reference: lambda machine: machine["arch"]
    )
    config = load_board("generic").config
    with pytest.raises(UsageError, match=r"the target npx of the package hil-npx 0\.1\.0 failed: KeyError: 'arch'"):
        fill_target(config, "npx", {"machine": {}})
    with pytest.raises(UsageError, match=r"it returned 'arm': expected Target"):
        fill_target(config, "npx", {"machine": {"arch": "arm"}})


def test_hanging_target_ends_at_time_limit(npx: Path, monkeypatch: pytest.MonkeyPatch):
    over = threading.Event()
    monkeypatch.setattr("hil.controller.devices.board_choice.resolve", lambda reference: lambda machine: over.wait(600))
    try:
        with pytest.raises(UsageError, match=r"the target npx of the package .* failed: no result within 0\.2 s"):
            fill_target(load_board("generic").config, "npx", {"machine": {}}, timeout_s=0.2)
    finally:
        over.set()


def test_trace_backend_takes_runtime_of_package(npx: Path):
    assert parse_backend("board:sim:npx").runtime == "npx"
    assert parse_backend("board:npx-kit").runtime == "npx"
    assert parse_backend("board:sim").runtime == "iree"
