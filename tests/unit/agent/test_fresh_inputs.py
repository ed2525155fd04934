"""Inputs that a program changes are put back before its next run, and the arena never changes."""

from __future__ import annotations

import numpy as np
import pytest

from hil.agent.fresh_inputs import FreshInputs
from hil.agent.ipc import Arena, lay_out
from hil.agent.iterations import BLOCK_BYTES, FULL_BYTES
from hil.core.tensors import Array


def fresh(*arrays: Array) -> tuple[Arena, FreshInputs, list[Array]]:
    arena = Arena()
    entries, size = lay_out(arena, [(str(number), array) for number, array in enumerate(arrays)])
    inputs = FreshInputs(arena, entries, size)
    views = [np.frombuffer(inputs.view[one["at"] : one["at"] + one["bytes"]], np.uint8) for one in entries]
    return arena, inputs, views


@pytest.mark.parametrize("size", [1, 1000, 1 << 16, 300_000])
def test_restore_puts_back_what_changed(size: int):
    given = [np.arange(size, dtype=np.uint8), np.full(size, 7, np.uint8)]
    arena, inputs, views = fresh(*given)
    views[1][-1] = 8
    inputs.restore()
    assert [view.tolist() for view in views] == [one.tolist() for one in given]
    views[1][:] = 9
    inputs.restore()
    assert views[1].tolist() == given[1].tolist()
    assert bytes(arena.view(size, grow=False)) == given[0].tobytes()


def test_writing_never_reaches_the_arena():
    arena, _, views = fresh(np.zeros(100, np.uint8))
    views[0][:] = 1
    assert not any(arena.view(100, grow=False))


@pytest.mark.parametrize("size", [10, FULL_BYTES, FULL_BYTES + 1, 5 * FULL_BYTES + 7])
def test_restore_notices_a_change_of_a_later_run(size: int):
    """The changed byte of a large input is in a block that is compared at the latest when all blocks were."""
    given = [np.zeros(3, np.uint8), np.arange(size, dtype=np.uint32).view(np.uint8)]
    _, inputs, views = fresh(*given)
    inputs.restore()
    inputs.restore()
    views[1][-1] ^= 1
    for _ in range(-(-size // BLOCK_BYTES) + 1):
        inputs.restore()
    assert np.array_equal(views[1], given[1])
    views[1][0] ^= 1
    inputs.restore()
    assert np.array_equal(views[1], given[1])


def test_large_inputs_that_do_not_change_are_not_copied(monkeypatch: pytest.MonkeyPatch):
    _, inputs, views = fresh(np.zeros(2 * FULL_BYTES, np.uint8), np.zeros(2 * FULL_BYTES, np.uint8))
    views[0][5] = 1
    copied: list[tuple[int, int]] = []
    monkeypatch.setattr(inputs, "_copy", lambda begin, end: copied.append((begin, end)))
    inputs.restore()
    inputs.restore()
    assert copied == [(0, 2 * FULL_BYTES)] * 2


def test_no_inputs_need_nothing():
    _, inputs, _ = fresh()
    inputs.restore()
    assert inputs.view.nbytes == 0
