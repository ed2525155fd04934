"""Peaks and profiles with round numbers, for tests of rooflines."""

from __future__ import annotations

from typing import Any

from hil.controller.records.base import Interval
from hil.controller.records.measurements.roofline import BoardPeaks, PeakValue


def make_peaks(
    *, f32: float = 100e9, memory: float | None = 10e9, margin: float = 0.0, board: str = "sim", **more: Any
) -> BoardPeaks:
    """Return peaks of 100 Gop/s and 10 GB/s, with a ridge at 10 operations per byte.

    Args:
        margin: relative distance of the intervals' ends; 0 omits the intervals.
    """

    def make_value(rate: float) -> PeakValue:
        interval = Interval(low=rate * (1 - margin), high=rate * (1 + margin), level=0.99) if margin else None
        return PeakValue(rate=rate, interval=interval, spread=0.01, kernel="matmul f32, 256 x 256")

    compute = more.pop("compute", {"f32": make_value(f32)})
    known: dict[str, Any] = {
        "schema": 1,
        "id": "20261130-120000",
        "source": "measured",
        "created": 1_796_000_000.0,
        "runtime": "iree",
        "runtime_version": "3.13.0",
        "device": "local-task",
    }
    return BoardPeaks(
        **{**known, **more},
        board=board,
        compute=compute,
        memory=None if memory is None else make_value(memory),
    )
