"""What is known of a measurement beside its numbers: the board's clock and its counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hil.controller.devices import answers
from hil.controller.devices.call import CallFailed
from hil.core import clock
from hil.core.timeline import Sample
from hil.errors import HilError, ProtocolBroken

# A clock runs evenly for some minutes, not for hours.
_EVEN_NS = 600_000_000_000
_MOST = 64


class BoardClock:
    """A session's pings, as many as fits need."""

    def __init__(self) -> None:
        self._pings: list[clock.Ping] = []

    def add(self, pings: Sequence[clock.Ping]) -> None:
        """More pings, taken after all others."""
        kept = self._pings
        if len(kept) > _MOST:
            # The quicker one of two neighbours tells more.
            kept = [min(pair, key=lambda ping: ping.round_trip_ns) for pair in zip(kept[::2], kept[1::2], strict=False)]
        self._pings = [*kept, *pings]

    def age_ns(self) -> float:
        """How long ago the last ping was; infinite where there was none."""
        return clock.now_ns() - self._pings[-1].received_ns if self._pings else float("inf")

    def fit(self, since_ns: int, until_ns: int) -> clock.ClockFit:
        """The line through the pings of that time on the host's clock, of the minutes before it, and one from before
        it in any case, where there is one. Raises ValueError: there were none."""
        before = max((ping.sent_ns for ping in self._pings if ping.sent_ns <= since_ns), default=since_ns)
        first = min(before, until_ns - _EVEN_NS)
        return clock.fit([ping for ping in self._pings if ping.sent_ns >= first], until_ns)


# More looks than so many are thinned to half, and so is what comes after: all of a long run is seen, in bounded memory.
_LOOKS_MOST = 10_000
_READINGS_MOST = 1_000_000
_END_S = 2.0


class CounterWatch:
    """Collects a board's counters in a thread, from entering to leaving. It never fails what runs beside it."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._stream: Any = None
        self._thread: threading.Thread | None = None
        self._looks: list[Any] = []
        self._every = 1
        self._leaving = False
        self.problem = ""  # why there are no more samples; "" where nothing went wrong

    @property
    def samples(self) -> list[Sample]:
        """What was seen so far, in the order of time."""
        return [
            Sample(look.clock_ns, reading.name, reading.value, reading.unit)
            for look in list(self._looks)
            for reading in look.readings
        ]

    def __enter__(self) -> CounterWatch:
        try:
            self._stream = self._start()
        except HilError as error:
            self.problem = f"the board tells no counters: {_text(error)}"
        else:
            self._thread = threading.Thread(target=self._collect, daemon=True, name="hil-counters")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving = True
        if self._stream is not None:
            self._stream.cancel()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _collect(self) -> None:
        try:
            readings = 0
            for number, look in enumerate(self._stream):
                answers.check_sample(look)
                if number % self._every == 0:
                    self._looks.append(look)
                    readings += len(look.readings)
                if len(self._looks) > _LOOKS_MOST or readings > _READINGS_MOST:
                    self._looks = self._looks[::2]
                    readings = sum(len(one.readings) for one in self._looks)
                    self._every *= 2
        except (CallFailed, ProtocolBroken) as error:
            self._stream.cancel()
            if not self._leaving:
                self.problem = f"the board told no more counters: {_text(error)}"
        else:
            if not self._leaving:
                self.problem = "the board ended its counters"


def _text(error: CallFailed | HilError) -> str:
    """An error in a line."""
    return error.message if isinstance(error, HilError) else error.text
