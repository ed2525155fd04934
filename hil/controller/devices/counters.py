"""A board's counters, read beside a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from hil.controller.devices import answers
from hil.core.timeline import Sample
from hil.errors import BoardError, HilError, ProtocolBroken

# More looks than so many are thinned to half, and so is what comes after: all of a long run is seen, in bounded memory.
_LOOKS_MOST = 10_000
_READINGS_MOST = 1_000_000
_END_S = 2.0


class CounterWatch:
    """Collects a board's counters in a thread of its own, from entering to leaving. It never fails what runs beside it.

    Args:
        start: opens the stream of ``pb.CounterSample``; raises what gRPC raises, or BoardError where there is none.

    Attributes:
        trouble: why there are no more samples; "" where nothing went wrong.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._stream: Any = None
        self._thread: threading.Thread | None = None
        self._looks: list[Any] = []
        self._every = 1
        self._leaving = False
        self.trouble = ""

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
        except (grpc.RpcError, ValueError, BoardError) as error:  # ValueError: the channel is closed
            self.trouble = f"the board tells no counters: {_text(error)}"
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
        except (grpc.RpcError, ProtocolBroken) as error:
            self._stream.cancel()
            if not self._leaving:
                self.trouble = f"the board told no more counters: {_text(error)}"
        else:
            if not self._leaving:
                self.trouble = "the board ended its counters"


def _text(error: Any) -> str:
    """An error in a line."""
    return (
        error.message if isinstance(error, HilError) else str(error.details() if hasattr(error, "details") else error)
    )
