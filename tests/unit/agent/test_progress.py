from __future__ import annotations

import struct

import pytest

from hil.agent.ipc import Arena
from hil.agent.progress import SIZE, ProgressLog, describe_progress


@pytest.fixture
def arena():
    arena = Arena()
    yield arena
    arena.close()


def test_describe_progress_names_step_and_position(arena):
    log = ProgressLog(arena)
    assert describe_progress(arena) == ""
    log.note(0, 0)
    assert describe_progress(arena) == "the generation was in the prompt, position 0"
    log.note(28, 12)
    assert describe_progress(arena) == "the generation was at step 12, position 28"


@pytest.mark.parametrize("place", [(-2, 0), (1 << 40, 3), (5, -1), (5, 1 << 40)])
def test_describe_progress_ignores_invalid_place(arena, place):
    arena.view(SIZE, grow=True)[:16] = struct.pack("<qq", *place)
    assert describe_progress(arena) == ""


def test_describe_progress_without_worker_is_empty(arena):
    assert describe_progress(arena) == ""
