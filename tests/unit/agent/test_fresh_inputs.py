"""Inputs that a program changes are restored before the next run, and the arena never changes."""

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
def test_fresh_inputs_restore_reverts_changes(size: int):
    given = [np.arange(size, dtype=np.uint8), np.full(size, 7, np.uint8)]
    arena, inputs, views = fresh(*given)
    views[1][-1] = 8
    inputs.restore()
    assert [view.tolist() for view in views] == [one.tolist() for one in given]
    views[1][:] = 9
    inputs.restore()
    assert views[1].tolist() == given[1].tolist()
    assert bytes(arena.view(size, grow=False)) == given[0].tobytes()


def test_fresh_inputs_writes_do_not_reach_arena():
    arena, _, views = fresh(np.zeros(100, np.uint8))
    views[0][:] = 1
    assert not any(arena.view(100, grow=False))


@pytest.mark.parametrize("size", [10, FULL_BYTES, FULL_BYTES + 1, 5 * FULL_BYTES + 7])
def test_fresh_inputs_restore_detects_change_in_later_run(size: int):
    """A changed byte in a large input is found at the latest after all blocks have been compared."""
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


def test_fresh_inputs_restore_skips_unchanged_large_inputs(monkeypatch: pytest.MonkeyPatch):
    _, inputs, views = fresh(np.zeros(2 * FULL_BYTES, np.uint8), np.zeros(2 * FULL_BYTES, np.uint8))
    views[0][5] = 1
    copied: list[tuple[int, int]] = []
    monkeypatch.setattr(inputs, "_copy", lambda begin, end: copied.append((begin, end)))
    inputs.restore()
    inputs.restore()
    assert copied == [(0, 2 * FULL_BYTES)] * 2


def test_fresh_inputs_accept_empty_inputs():
    _, inputs, _ = fresh()
    inputs.restore()
    assert inputs.view.nbytes == 0
