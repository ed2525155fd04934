from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.clock import Ping, fit

HOUR = 3600 * 10**9


def pings(start: int, offset: int, drift: float, delays: list[tuple[int, int]]) -> list[Ping]:
    """Pings of a board whose clock reads host + offset + drift * host, with delays there and back."""
    found = []
    for number, (there, back) in enumerate(delays):
        sent = start + number * 1_000_000
        arrived = sent + there
        found.append(Ping(sent, arrived + offset + round(drift * arrived), arrived + back))
    return found


delays = st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)), min_size=1, max_size=8)


@given(st.integers(-HOUR, HOUR), delays)
def test_the_offset_is_within_its_error(offset, delay):
    found = fit(pings(10**9, offset, 0.0, delay))
    assert abs(found.offset_ns - offset) <= found.error_ns


@given(st.integers(-HOUR, HOUR), st.floats(-300e-6, 300e-6))
def test_a_stamp_of_a_drifting_clock_is_found_on_the_host(offset, drift):
    quick = [(50_000, 50_000)] * 4
    before, after = pings(10**9, offset, drift, quick), pings(61 * 10**9, offset, drift, quick)
    found = fit(before, after)
    host = 30 * 10**9
    board = host + offset + round(drift * host)
    assert abs(found.to_host(board) - host) <= 2 * found.error_ns
    assert found.drift == pytest.approx(drift, abs=1e-5)


def test_without_a_ping_there_is_no_fit():
    with pytest.raises(ValueError, match="empty"):
        fit([])
