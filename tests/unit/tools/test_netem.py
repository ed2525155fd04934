"""Parsing network quality settings, and their effect on packets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.errors import UsageError
from tools.virtual_board.netem import Netem, Way, parse


@pytest.mark.parametrize(
    "words, netem",
    [
        ("", Netem()),
        ("delay 20ms", Netem(delay_s=0.02)),
        ("delay 20ms 5ms", Netem(delay_s=0.02, jitter_s=0.005)),
        ("  delay 1.5s  loss 0.5%", Netem(delay_s=1.5, loss=0.005)),
        ("loss 1% rate 10mbit", Netem(loss=0.01, rate_bps=1e7)),
        ("delay 500us 250us loss 100% rate 9600bit", Netem(0.0005, 0.00025, 1.0, 9600)),
    ],
)
def test_netem_parse_reads_settings(words: str, netem: Netem) -> None:
    assert parse(words) == netem


@pytest.mark.parametrize(
    "words", ["delay", "delay 20", "20ms", "loss 1", "loss 101%", "loss 1% delay 2ms", "delay 1ms 2ms", "delay 1.2.3s"]
)
def test_netem_parse_rejects_invalid_settings(words: str) -> None:
    with pytest.raises(UsageError, match="invalid network quality"):
        parse(words)


@given(st.lists(st.floats(0, 10), max_size=50), st.floats(0, 1), st.floats(0, 1))
def test_netem_delays_packets_in_order(gaps: list[float], delay: float, share: float) -> None:
    way = Way(Netem(delay_s=delay, jitter_s=delay * share), to=-1)
    times = list(itertools.accumulate(gaps))
    due = [way.schedule_frame(1500, now) for now in times]
    assert due == sorted(due)
    least, most = delay * (1 - share), delay * (1 + share)
    for number, (now, then) in enumerate(zip(times, due, strict=True)):
        earlier = max(due[:number], default=0.0)
        assert max(earlier, now + least) - 1e-6 <= then <= max(earlier, now + most) + 1e-6


def test_netem_rate_spaces_packets() -> None:
    way = Way(Netem(rate_bps=12_000), to=-1)
    assert [way.schedule_frame(1500, 5.0) for _ in range(3)] == [6.0, 7.0, 8.0]
    assert way.schedule_frame(1500, 100.0) == 101.0


def test_netem_full_queue_drops_packets() -> None:
    way = Way(Netem(delay_s=1.0), to=-1)
    assert way.schedule_frame(1500, 0.0) is not None
    way.held = 1000
    assert way.schedule_frame(1500, 0.0) is None


def test_netem_drops_requested_share_of_packets() -> None:
    way = Way(Netem(loss=0.25), to=-1)
    lost = sum(way.schedule_frame(1500, 0.0) is None for _ in range(20_000))
    # Ten standard deviations.
    assert abs(lost - 5000) < 620
    assert Way(Netem(loss=1.0), to=-1).schedule_frame(1500, 0.0) is None
