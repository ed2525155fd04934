"""A profile of IREE's as arrays: a row an event, in the order in which the device told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

EVENTS = "events.bin"
MEMORY = "memory.bin"
# What IREE writes where there is no number to give.
NONE = 0xFFFFFFFF
# A row an event, and one a change of the memory in use: a tenth of what the lines of JSON take.
EVENT = np.dtype(
    [
        ("start", "<i8"),
        ("duration", "<i8"),
        ("tile_time", "<i8"),
        ("bytes", "<i8"),
        ("submission", "<i8"),
        ("queue", "<i8"),
        ("executable", "<i8"),
        ("command", "<u4"),
        ("function", "<u4"),
        ("tiles", "<i4"),
        ("op", "<i4"),
        ("key", "<i4"),
        ("workgroups", "<u4", (3,)),
    ]
)
MEMORY_SAMPLE = np.dtype([("at", "<i8"), ("reserved", "<i8")])


def mapped_rows(path: Path, dtype: Any) -> NDArray[Any]:
    """A file's rows, mapped: they need no memory of ours."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")


def places_of(rows: NDArray[Any], dispatch: int) -> NDArray[np.int64]:
    """[events] which of its submission's dispatches each one is, by command where the driver tells it; else -1."""
    own = np.flatnonzero(rows["op"] == dispatch)
    # Where all commands are alike (unknown), the file's own order, in which they were executed, stays.
    own = own[np.lexsort((rows["command"][own], rows["submission"][own], rows["queue"][own]))]
    places = np.full(len(rows), -1, np.int64)
    places[own] = _counted(rows["queue"][own], rows["submission"][own])
    return places


def submissions_of(rows: NDArray[Any], places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[events] each one's submission by number in their order; [submissions] their kind."""
    pairs = np.stack([rows["queue"], rows["submission"]], 1)
    unique, numbers = np.unique(pairs, axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)
    # What a submission does: its operations and dispatches, in order, summed up with factors that make the order count.
    weights = (rows["op"].astype(np.int64) * 1_000_003 + rows["key"] + 1) * (2 * places + 5)
    kinds = np.zeros(len(unique), np.int64)
    np.add.at(kinds, numbers, weights * weights)
    return numbers, kinds


def within(per_submission: NDArray[np.int64]) -> NDArray[np.int64]:
    """[submissions] which of its iteration's each one is."""
    order = np.argsort(per_submission, kind="stable")
    within = np.empty(len(per_submission), np.int64)
    within[order] = _counted(per_submission[order])
    return within


def _counted(*keys: NDArray[Any]) -> NDArray[np.int64]:
    """[n] how many equal ones stand before each, in arrays whose equal elements stand together."""
    count = len(keys[0])
    if not count:
        return np.zeros(0, np.int64)
    new = np.ones(count, bool)
    new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    firsts = np.flatnonzero(new)
    return np.arange(count) - np.repeat(firsts, np.diff([*firsts, count]))
