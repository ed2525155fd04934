"""Convert dispatch events that a device timed to the host's clock.

A GPU stamps the start and the end of a dispatch with its own clock. The driver samples both clocks several times during
a profile. A line through these samples gives the host time of a tick.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Tile time of an event without times of its tiles.
NO_TILE_TIME = -1
_MAX_TILES = (1 << 31) - 1
# Row type for events. Rows need a tenth of the space that IREE's JSON lines need.
EVENT = np.dtype(
    [
        ("start", "<i8"),
        ("duration", "<i8"),
        ("tile_time", "<i8"),
        ("bytes", "<i8"),
        ("submission", "<i8"),
        ("queue", "<i8"),
        ("command", "<u4"),
        ("tiles", "<i4"),
        ("op", "<i4"),
        ("key", "<i4"),
    ]
)


class DeviceEvents:
    """Dispatch events and clock samples of a profile.

    Args:
        names: string -> index of the names of operations, which new events extend.
    """

    def __init__(self, names: dict[str, int]) -> None:
        self._names = names
        self._rows: list[tuple[int, ...]] = []
        # device -> (tick, host time in ns) pairs
        self._samples: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add_correlation(self, record: Mapping[str, Any]) -> None:
        """Add a sample of both clocks."""
        host = (record["host_time_begin_ns"] + record["host_time_end_ns"]) // 2
        self._samples.setdefault(record["physical_device_ordinal"], []).append((record["device_tick"], host))

    def add_dispatch(self, record: Mapping[str, Any]) -> bool:
        """Add an event. Return False if the device did not time the event."""
        if not record["valid"] or record["end_tick"] < record["start_tick"]:
            return False
        op, key = (self._names.setdefault(name, len(self._names)) for name in ("dispatch", record["key"] or ""))
        queue = record["physical_device_ordinal"] << 16 | record["queue_ordinal"]
        start, duration = record["start_tick"], record["end_tick"] - record["start_tick"]
        tiles = int(np.prod(record["workgroup_count"], dtype=np.int64))
        place = record["submission_id"], queue, record["command_index"]
        self._rows.append((start, duration, NO_TILE_TIME, 0, *place, min(tiles, _MAX_TILES), op, key))
        return True

    def build_rows(self) -> NDArray[Any]:
        """Return the events with times of the host's clock, [events] of :data:`EVENT`.

        Events of a device without two clock samples are omitted: their host time is unknown.
        """
        rows = np.array(self._rows, EVENT)
        kept = np.zeros(len(rows), bool)
        for device, samples in self._samples.items():
            if len({tick for tick, _ in samples}) < 2:
                continue
            here = rows["queue"] >> 16 == device
            rate, tick, host = _fit_line(samples)
            rows["start"][here] = np.rint((rows["start"][here] - tick) * rate).astype(np.int64) + host
            rows["duration"][here] = np.rint(rows["duration"][here] * rate).astype(np.int64)
            kept |= here
        return rows[kept]


def _fit_line(samples: list[tuple[int, int]]) -> tuple[float, int, int]:
    """Return host nanoseconds per tick, and a tick with its host time, by least squares."""
    tick, host = samples[0]
    ticks, times = (np.array([one[place] - samples[0][place] for one in samples], np.float64) for place in (0, 1))
    rate, offset = np.polyfit(ticks, times, 1)
    return float(rate), tick, host + round(float(offset))
