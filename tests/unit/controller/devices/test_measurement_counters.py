from __future__ import annotations

import itertools

import pytest

from hil.controller.devices.agent_client import measurement
from hil.controller.devices.agent_client.call import CallFailed
from hil.controller.devices.agent_client.measurement import CounterWatch
from hil.core.timeline import Sample
from hil.errors import BoardError, BoardLost
from hil.protocol.v1 import agent_pb2 as pb


class Stream:
    """A stream of looks, then perhaps an error."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self._looks = [
            pb.CounterSample(clock_ns=number, readings=[pb.Reading(name="cpu0 busy", value=number, unit="%")])
            for number in range(count)
        ]
        self._error = error

    def __iter__(self):
        yield from self._looks
        if self._error:
            raise self._error

    def cancel(self) -> None:
        pass


BROKEN = CallFailed("UNAVAILABLE", "it broke")


def watched(stream: Stream) -> CounterWatch:
    with CounterWatch(lambda: stream) as watch:
        watch._thread.join()
    return watch


def test_samples_match_board_readings():
    assert watched(Stream(2)).samples == [Sample(0, "cpu0 busy", 0.0, "%"), Sample(1, "cpu0 busy", 1.0, "%")]


def test_broken_stream_preserves_samples():
    watch = watched(Stream(3, BROKEN))
    assert len(watch.samples) == 3
    assert "it broke" in watch.problem


def test_unreachable_board_reports_problem():
    def start():
        raise BoardLost("it broke")

    with CounterWatch(start) as watch:
        pass
    assert watch.samples == []
    assert "it broke" in watch.problem


def test_board_without_agent_reports_problem():
    def start():
        raise BoardError("reading counters requires an agent on the board", board="lab")

    with CounterWatch(start) as watch:
        pass
    assert watch.samples == []
    assert "requires an agent" in watch.problem


@pytest.mark.parametrize("count", [99, 101, 2500])
def test_long_watch_thins_samples_evenly(monkeypatch, count):
    monkeypatch.setattr(measurement, "_MAX_LOOKS", 100)
    stamps = [sample.at_ns for sample in watched(Stream(count)).samples]
    assert 50 <= len(stamps) <= 100
    gaps = {later - earlier for earlier, later in itertools.pairwise(stamps)}
    assert len(gaps) == 1, "evenly"
    assert stamps[0] == 0
    assert count - stamps[-1] <= 2 * gaps.pop()


def test_samples_use_bounded_memory(monkeypatch):
    monkeypatch.setattr(measurement, "_BYTES_MOST", 1 << 20)
    stream = Stream(500)
    for look in stream._looks:
        look.readings[0].text = "x" * 10_000
    watch = watched(stream)
    assert sum(look.ByteSize() for look in watch._looks) <= 1 << 20
    assert len(watch.samples) > 30 and not watch.problem.startswith("reading the board's counters stopped")
