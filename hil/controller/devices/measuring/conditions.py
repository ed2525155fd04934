"""Record the state of a board before, during and after a measurement."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hil.controller.records.measurements.conditions import ConditionReading, Conditions
from hil.core.timeline import Sample
from hil.errors import HilError

if TYPE_CHECKING:
    from hil.controller.devices.board import Board

# Reading the counters uses about 0.2 % of a slow core at this period.
PERIOD_SECONDS = 0.25
# Name of a core's counter.
BUSY = re.compile(r"cpu\d+ busy")
# Counters that describe the measured program or are summarised over all cores.
_NOT_LISTED = (" busy", " pressure", " memory")
# Repeated events differ only in numbers. hil stores only the last text.
_NUMBER = re.compile(r"\d+(\.\d+)?")


class ConditionWatch:
    """Record the conditions of a board during the block. Errors of the counters never affect the measurement."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._watch = board.watch_counters(PERIOD_SECONDS)
        self._before: Mapping[str, Any] = {}

    def __enter__(self) -> ConditionWatch:
        # If the board is lost, the measurement reports it.
        with contextlib.suppress(HilError):
            self._board.refresh()
        self._before = self._board.info
        self._board.changes.clear()
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()

    @property
    def samples(self) -> list[Sample]:
        """Samples of the counters so far, in time order."""
        return self._watch.samples

    def summarise(self, window_ns: tuple[int, int] | None, own_cores: float | None) -> Conditions:
        """Return the conditions so far; see :func:`summarise_conditions`."""
        return summarise_conditions(
            self._before,
            self._board.info,
            self._watch.samples,
            self._board.changes,
            window_ns=window_ns,
            own_cores=own_cores,
            missing=self._watch.problem,
        )


def summarise_conditions(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    samples: Sequence[Sample],
    events: Iterable[str],
    *,
    window_ns: tuple[int, int] | None = None,
    own_cores: float | None = None,
    missing: str = "",
) -> Conditions:
    """Summarise the conditions of a measurement.

    Args:
        before, after: descriptions of the board, with the keys of Describe.
        samples: the counters during the measurement.
        events: changes of the board, from :func:`hil.controller.devices.health.list_changes`.
        window_ns: start and end of the measured iterations on the board's clock; None counts all samples.
        own_cores: mean number of cores that the measured programs keep busy; None if unknown.
        missing: why the counters could not be read.
    """
    looks: dict[int, dict[str, Sample]] = {}
    for sample in samples:
        looks.setdefault(sample.at_ns, {})[sample.name] = sample
    if window_ns is not None:
        # Each sample shows the load since the previous sample.
        start = window_ns[0] + int(PERIOD_SECONDS * 1e9)
        looks = {at: found for at, found in looks.items() if start <= at <= window_ns[1]}
    busy = [cores for found in looks.values() if (cores := [s.value for n, s in found.items() if BUSY.fullmatch(n)])]
    busy_cores = statistics.fmean(sum(cores) / 100 for cores in busy) if busy else None
    stalled = [found["memory pressure"].value for found in looks.values() if "memory pressure" in found]
    return Conditions(
        readings=_merge_readings(before, after, list(looks.values())),
        events=list({_NUMBER.sub("#", event): event for event in events}.values()),
        samples=len(looks),
        cores=max(map(len, busy)) if busy else None,
        busy_cores=busy_cores,
        other_load=None if busy_cores is None or own_cores is None else max(busy_cores - own_cores, 0.0),
        memory_pressure=statistics.fmean(stalled) if stalled else None,
        missing=missing,
    )


def _merge_readings(
    before: Mapping[str, Any], after: Mapping[str, Any], looks: Sequence[Mapping[str, Sample]]
) -> list[ConditionReading]:
    found: dict[str, ConditionReading] = {}
    for info, when in ((before, "before"), (after, "after")):
        for one in info.get("readings", ()):
            reading = found.setdefault(one["name"], ConditionReading(name=one["name"], unit=one.get("unit", "")))
            setattr(reading, when, one.get("text") or float(one.get("value", 0.0)))
    for name in dict.fromkeys(name for look in looks for name in look if not name.endswith(_NOT_LISTED)):
        during = [look[name] for look in looks if name in look]
        reading = found.setdefault(name, ConditionReading(name=name, unit=during[0].unit))
        values = [sample.value for sample in during]
        reading.low, reading.median, reading.high = min(values), statistics.median(values), max(values)
    return list(found.values())
