from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.core.clock import Ping, fit

SECOND = 10**9
HOUR = 3600 * SECOND
START = 10**15

offsets = st.integers(-HOUR, HOUR)
drifts = st.floats(-500e-6, 500e-6)
# For each ping: the pause since the last ping, and the time in both directions.
delays = st.tuples(st.integers(1, 10 * SECOND), st.integers(1, 10**7), st.integers(1, 10**7))


def board_ns(host: int, offset: int, drift: float) -> int:
    """Return the time of a board clock with a constant offset at the start and a constant drift."""
    return host + offset + round(drift * (host - START))


def pings(offset: int, drift: float, taken: list[tuple[int, int, int]], jump: int = 0, after: int = 0) -> list[Ping]:
    """Return pings of that clock, which jumps forward by ``jump`` after ``after`` pings."""
    found, sent = [], START
    for number, (wait, there, back) in enumerate(taken):
        sent += wait
        forward = jump if number >= after else 0
        found.append(Ping(sent, board_ns(sent + there, offset, drift) + forward, sent + there + back))
        sent += there + back
    return found


@given(offsets, drifts, st.lists(delays, min_size=1, max_size=20), st.floats(0, 1))
def test_fit_error_bounds_every_time_between_pings(offset, drift, taken, share):
    asked = pings(offset, drift, taken)
    found = fit(asked)
    first, last = asked[0].sent_ns, asked[-1].received_ns
    for host in (first, first + round((last - first) * share), last):
        board = board_ns(host, offset, drift)
        assert abs(found.to_host(board) - host) <= found.error_ns + 1
    assert found.jumped_ns == 0


@given(offsets, drifts, st.lists(delays, min_size=1, max_size=5), st.integers(0, 10 * SECOND))
def test_fit_error_bounds_times_after_last_ping(offset, drift, taken, later):
    asked = pings(offset, drift, taken)
    until = asked[-1].received_ns + later
    found = fit(asked, until)
    for host in (asked[0].sent_ns, until - later // 2, until):
        assert abs(found.to_host(board_ns(host, offset, drift)) - host) <= found.error_ns + 1
    assert found.error_ns <= 1.003 * (fit(asked).error_ns + later * 2e-3) + 1


def test_fit_tolerates_slow_ping():
    quick = [(SECOND, 50_000, 50_000)] * 10
    slow = (SECOND, 10**8, 10**6)
    assert fit(pings(5, 1e-5, [*quick[:5], slow, *quick[5:]])).error_ns <= fit(pings(5, 1e-5, quick)).error_ns + 10_000


def test_fit_error_below_half_of_any_round_trip():
    """Pings delayed in opposite directions bound the clock from both sides."""
    found = fit(pings(7, 0.0, [(SECOND, 1000, 900_000), (SECOND, 900_000, 1000)] * 4))
    assert found.error_ns < 10_000


def test_fit_estimates_drift_from_distant_pings():
    found = fit(pings(HOUR, 200e-6, [(10 * SECOND, 50_000, 50_000)] * 6))
    assert found.drift == pytest.approx(200e-6, abs=5e-6)
    assert found.offset_ns == pytest.approx(HOUR, abs=20_000_000)


@given(offsets, drifts, st.integers(5 * 10**7, HOUR), st.booleans(), st.integers(1, 9))
def test_fit_detects_jump_and_uses_later_pings(offset, drift, jump, back, after):
    jump = -jump if back else jump
    asked = pings(offset, drift, [(SECOND, 40_000, 60_000)] * 10, jump, after)
    found = fit(asked)
    assert found.jumped_ns == pytest.approx(jump, abs=10**6)
    for ping in asked[after:]:
        board = board_ns(ping.sent_ns, offset, drift) + jump
        assert abs(found.to_host(board) - ping.sent_ns) <= found.error_ns + 1


def test_fit_reports_jump_for_excessive_drift():
    assert fit(pings(0, 0.01, [(SECOND, 1000, 1000)] * 5)).jumped_ns > 0


def test_fit_rejects_empty_list():
    with pytest.raises(ValueError, match="empty"):
        fit([])
