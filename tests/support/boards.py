"""Virtual boards for tests: two shared ones, and one's own. A pytest plugin for all tests."""

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
    """Starts boards that live as long as the session; for fixtures to build on."""
    with ExitStack() as boards:
        yield lambda **options: _start(boards, **options)


@pytest.fixture(scope="session")
def board_x86(start_board: MakeBoard) -> VirtualBoard:
    """A board of this machine's own kind. Shared: leave it on, plugged in and clean."""
    return start_board(name="x86", arch="x86_64")


@pytest.fixture(scope="session")
def board_aarch64(start_board: MakeBoard) -> VirtualBoard:
    """A 64-bit Arm board, emulated. Shared: leave it on, plugged in and clean."""
    return start_board(name="arm", arch="aarch64")


@pytest.fixture
def make_board() -> Iterator[MakeBoard]:
    """Starts boards of a test's own: ``make_board(arch="aarch64", disk_mb=64, netem="delay 20ms loss 1%")``."""
    with ExitStack() as boards:
        yield lambda **options: _start(boards, **options)


def _start(boards: ExitStack, **options) -> VirtualBoard:
    if os.environ.get("HIL_NO_BOARDS"):
        pytest.skip("HIL_NO_BOARDS is set")
    # Not below pytest's own folder: the board removes this one itself, also when the tests are killed.
    board = start(Path(tempfile.mkdtemp(prefix="hil-board-")), **options)
    boards.callback(board.down)
    return board
