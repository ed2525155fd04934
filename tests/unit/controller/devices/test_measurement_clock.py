from __future__ import annotations

import pytest

from hil.controller.devices.agent_client.measurement import BoardClock
from hil.core.clock import Ping, get_time_ns

SECOND = 10**9


def pings(at: int, count: int = 4, ahead: int = 0) -> list[Ping]:
    starts = [at + number * 1_000_000 for number in range(count)]
    return [Ping(start, start + 50_000 + ahead, start + 100_000) for start in starts]


def test_clock_derives_drift_from_distant_pings():
    clock = BoardClock()
    clock.add(pings(SECOND))
    clock.add(pings(9 * SECOND))
    assert abs(clock.fit(SECOND, 9 * SECOND).drift) < 20e-6


def test_clock_keeps_newest_ping_of_odd_number():
    clock = BoardClock()
    clock.add(pings(SECOND, count=65))
    clock.add(pings(2 * SECOND, count=0))
    assert clock.get_age_ns() == pytest.approx(get_time_ns() - (SECOND + 64 * 1_000_000 + 100_000), rel=1e-3)


def test_clock_forgets_old_pings():
    """A clock slewed over an hour did not jump."""
    clock = BoardClock()
    clock.add(pings(SECOND))
    clock.add(pings(5000 * SECOND, ahead=30 * SECOND))
    fit = clock.fit(5001 * SECOND, 5002 * SECOND)
    assert fit.jumped_ns == 0
    assert abs(fit.offset_ns - 30 * SECOND) <= fit.error_ns


def test_clock_fits_long_run_between_pings():
    clock = BoardClock()
    clock.add(pings(SECOND, ahead=0))
    clock.add(pings(2000 * SECOND, ahead=SECOND // 10))  # 50 ppm
    fit = clock.fit(2 * SECOND, 2001 * SECOND)
    for host in (SECOND, 1000 * SECOND, 2000 * SECOND):
        board = host + round((host - SECOND) * 50.025e-6)
        assert abs(fit.to_host(board) - host) <= fit.error_ns + 2000
    assert fit.error_ns < 60_000


def test_clock_preserves_bounded_number_of_pings():
    clock = BoardClock()
    for second in range(500):
        clock.add(pings(second * SECOND))
    assert len(clock._pings) <= 70
    assert clock.fit(0, 500 * SECOND).error_ns < 60_000


def test_clock_age_counts_from_last_ping():
    clock = BoardClock()
    assert clock.get_age_ns() == float("inf")
    clock.add(pings(get_time_ns() - 10 * SECOND))
    assert clock.get_age_ns() > 9 * SECOND
