"""Inputs that a program changes are put back before its next run, and the arena never changes."""

from __future__ import annotations

import numpy as np
import pytest

from hil.agent.fresh_inputs import FreshInputs
from hil.agent.ipc import Arena, lay_out
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


def test_restore_leaves_inputs_alone_that_the_first_run_did_not_change():
    _, inputs, views = fresh(np.zeros(10, np.uint8))
    inputs.restore()
    views[0][:] = 1
    inputs.restore()
    assert views[0].tolist() == [1] * 10


def test_no_inputs_need_nothing():
    _, inputs, _ = fresh()
    inputs.restore()
    assert inputs.view.nbytes == 0
