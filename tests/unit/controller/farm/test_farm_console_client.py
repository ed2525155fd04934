"""Test how the client reads the stored lines of a console."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from hil.controller.farm.client import console
from hil.controller.farm.client.console import FarmConsole
from hil.errors import FarmError
from hil.protocol.v1 import farm_pb2 as pb


class Call:
    """Stream of pieces. A cancelled stream ends."""

    def __init__(self, make: Callable[[Call], Iterator[bytes]]) -> None:
        self.is_cancelled = threading.Event()
        self._pieces = make(self)

    def __iter__(self) -> Iterator[pb.Piece]:
        for data in self._pieces:
            yield pb.Piece(data=data)

    def cancel(self) -> None:
        self.is_cancelled.set()


def line(text: str) -> bytes:
    return json.dumps({"host_ns": 1, "time_s": 1.0, "kind": "output", "text": text}).encode() + b"\n"


def read_stored(make: Callable[[Call], Iterator[bytes]]) -> list[str]:
    """Return the stored lines of a host."""
    stub = SimpleNamespace(Dial=lambda pieces, metadata: Call(make))
    farm = SimpleNamespace(metadata=(), stub=stub)
    reading = FarmConsole(farm, "pi", None, None, None, follows=False)  # type: ignore[arg-type]
    return [one.text for one in reading.iter_lines()]


def test_stored_lines_may_take_longer_than_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[object] = []

    class Timer:
        """Timer that never ends."""

        daemon = False

        def __init__(self, seconds: float, work: Callable[[], None]) -> None:
            self.pieces = sent

        def start(self) -> None:
            running.append(self)

        def cancel(self) -> None:
            running.remove(self)

    sent = 0

    def send(call: Call) -> Iterator[bytes]:
        nonlocal sent
        for sent in range(1, 4):
            yield line(str(sent))
            assert [timer.pieces for timer in running] == [sent]  # type: ignore[attr-defined]
        yield b'{"end": true}\n'

    monkeypatch.setattr(console.threading, "Timer", Timer)
    assert read_stored(send) == ["1", "2", "3"]
    assert running == []


def test_stored_lines_of_an_older_host_end_after_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_STORED_SECONDS", 0.3)

    def send(call: Call) -> Iterator[bytes]:
        yield line("old")
        call.is_cancelled.wait(60)

    assert read_stored(send) == ["old"]


def test_busy_console_of_an_older_host_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_MAX_STORED_SECONDS", 0.0)

    def send(call: Call) -> Iterator[bytes]:
        while True:
            yield line("new")

    with pytest.raises(FarmError, match="did not end the stored lines of pi within 0 s"):
        read_stored(send)
