"""Context of a measurement: the board's clock and counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.call import CallFailed
from hil.core import clock
from hil.core.timeline import Sample
from hil.errors import HilError, ProtocolBroken

# Interval for a clock fit: the drift is constant for minutes, but not for hours.
_EVEN_NS = 600_000_000_000
_MAX_PINGS = 64


class BoardClock:
    """Clock pings of a session.

    If there are many pings, half of them are dropped, because a clock fit needs only some.
    """

    def __init__(self) -> None:
        self._pings: list[clock.Ping] = []

    def add(self, pings: Sequence[clock.Ping]) -> None:
        """Add pings. The pings must be newer than all earlier pings."""
        kept = self._pings
        if len(kept) > _MAX_PINGS:
            # Keep the ping with the shorter round trip of each pair, because it is more accurate.
            pairs = (kept[at : at + 2] for at in range(0, len(kept), 2))
            kept = [min(pair, key=lambda ping: ping.round_trip_ns) for pair in pairs]
        self._pings = [*kept, *pings]

    def get_age_ns(self) -> float:
        """Return the age of the last ping in nanoseconds; infinity without pings."""
        return clock.get_time_ns() - self._pings[-1].received_ns if self._pings else float("inf")

    def fit(self, since_ns: int, until_ns: int) -> clock.ClockFit:
        """Fit the clock over an interval of the host's clock.

        Uses the pings of the interval, of ten minutes before the end, and the last ping before the interval if present.
        Raises ValueError without pings.
        """
        before = max((ping.sent_ns for ping in self._pings if ping.sent_ns <= since_ns), default=since_ns)
        first = min(before, until_ns - _EVEN_NS)
        return clock.fit([ping for ping in self._pings if ping.sent_ns >= first], until_ns)


# Above this number of samples, drop every second sample and halve the sampling rate, so that long runs need limited
# memory.
_MAX_LOOKS = 10_000
_READINGS_MOST, _BYTES_MOST = 1_000_000, 128 << 20
_END_SECONDS = 2.0


class CounterWatch:
    """Collect a board's counters in a thread during the block. Errors never affect the run."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._stream: Any = None
        self._thread: threading.Thread | None = None
        self._looks: list[Any] = []
        self._every = 1
        self._leaving = False
        self.problem = ""  # why sampling stopped; "" if no error occurred

    @property
    def samples(self) -> list[Sample]:
        """Samples so far, in order of time."""
        return [
            Sample(look.clock_ns, reading.name, reading.value, reading.unit)
            for look in list(self._looks)
            for reading in look.readings
        ]

    def __enter__(self) -> CounterWatch:
        try:
            self._stream = self._start()
        except HilError as error:
            self.problem = f"cannot read the board's counters: {_format_error(error)}"
        else:
            self._thread = threading.Thread(target=self._collect, daemon=True, name="hil-counters")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving = True
        if self._stream is not None:
            self._stream.cancel()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _collect(self) -> None:
        try:
            readings = size = 0
            for number, look in enumerate(self._stream):
                answers.check_sample(look)
                if number % self._every == 0:
                    self._looks.append(look)
                    readings += len(look.readings)
                    size += look.ByteSize()
                if len(self._looks) > _MAX_LOOKS or readings > _READINGS_MOST or size > _BYTES_MOST:
                    self._looks = self._looks[::2]
                    readings = sum(len(one.readings) for one in self._looks)
                    size = sum(one.ByteSize() for one in self._looks)
                    self._every *= 2
        except (CallFailed, ProtocolBroken) as error:
            self._stream.cancel()
            if not self._leaving:
                self.problem = f"reading the board's counters stopped: {_format_error(error)}"
        else:
            if not self._leaving:
                self.problem = "the board stopped reporting counters"


def _format_error(error: CallFailed | HilError) -> str:
    return error.message if isinstance(error, HilError) else error.text
