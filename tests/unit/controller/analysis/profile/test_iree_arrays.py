from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hil.controller.analysis.profile.iree_arrays import EVENT, NONE, mapped_rows, places_of, submissions_of, within

DISPATCH, ALLOCA = 0, 1


def rows(*events: tuple[int, int, int, int]) -> np.ndarray:
    """Events of (op, submission, command, start)."""
    made = np.zeros(len(events), EVENT)
    for row, (op, submission, command, start) in zip(made, events, strict=True):
        row["op"], row["submission"], row["command"], row["start"] = op, submission, command, start
    return made


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ([4, 2, 9], [1, 0, 2]),  # done side by side: the one that was told first is not the first
        ([NONE, NONE, NONE], [0, 1, 2]),
    ],
)
def test_dispatches_have_their_place_by_command_or_else_in_the_order_told(
    commands: list[int], expected: list[int]
) -> None:
    events = rows((ALLOCA, 7, NONE, 0), *((DISPATCH, 7, command, 1) for command in commands))
    assert places_of(events, DISPATCH).tolist() == [-1, *expected]


def test_submissions_that_do_the_same_are_of_one_kind() -> None:
    same = [(ALLOCA, 0, NONE, 5), (DISPATCH, 1, 2, 9), (DISPATCH, 1, 4, 8), (ALLOCA, 2, NONE, 20), (DISPATCH, 3, 2, 30)]
    events = rows(*same, (DISPATCH, 3, 4, 31))
    numbers, kinds = submissions_of(events, places_of(events, DISPATCH))
    assert numbers.tolist() == [0, 1, 1, 2, 3, 3]
    assert kinds[0] == kinds[2]
    assert kinds[1] == kinds[3]
    assert kinds[0] != kinds[1]


def test_the_order_of_dispatches_makes_another_kind() -> None:
    events = rows((DISPATCH, 0, 1, 0), (DISPATCH, 0, 2, 1), (DISPATCH, 1, 1, 2), (DISPATCH, 1, 2, 3))
    events["key"] = [10, 11, 11, 10]
    kinds = submissions_of(events, places_of(events, DISPATCH))[1]
    assert kinds[0] != kinds[1]


def test_submissions_are_counted_within_their_iteration() -> None:
    assert within(np.array([-1, -1, 0, 0, 0, 1, 1, 1])).tolist() == [0, 1, 0, 1, 2, 0, 1, 2]


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "events.bin").write_bytes(b"")
    assert len(mapped_rows(tmp_path / "events.bin", EVENT)) == 0
