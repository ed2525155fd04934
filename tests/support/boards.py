"""Virtual boards for tests: two shared boards, and boards of a single test. A pytest plugin for all tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tools.virtual_board import VirtualBoard, start

MakeBoard = Callable[..., VirtualBoard]


@pytest.fixture(scope="session")
def start_board() -> Iterator[MakeBoard]:
    """Start boards that exist for the whole session. Other fixtures use this fixture."""
    with ExitStack() as boards:
        yield lambda **options: _start(boards, **options)


@pytest.fixture(scope="session")
def board_x86(start_board: MakeBoard) -> VirtualBoard:
    """Board with the architecture of this machine. Tests share it: leave it powered on, connected and clean."""
    return start_board(name="x86", arch="x86_64")


@pytest.fixture(scope="session")
def board_aarch64(start_board: MakeBoard) -> VirtualBoard:
    """Emulated 64-bit Arm board. Tests share it: leave it powered on, connected and clean."""
    return start_board(name="arm", arch="aarch64")


@pytest.fixture
def make_board() -> Iterator[MakeBoard]:
    """Start boards for a single test: ``make_board(arch="aarch64", disk_mb=64, netem="delay 20ms loss 1%")``."""
    with ExitStack() as boards:
        yield lambda **options: _start(boards, **options)


def _start(boards: ExitStack, **options) -> VirtualBoard:
    if os.environ.get("HIL_NO_BOARDS"):
        pytest.skip("HIL_NO_BOARDS is set")
    # Do not use pytest's directory: the board removes this directory itself, even if the tests are killed.
    board = start(Path(tempfile.mkdtemp(prefix="hil-board-")), **options)
    boards.callback(board.down)
    return board
