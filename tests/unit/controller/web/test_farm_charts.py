"""Test the numbers of a farm's charts."""

from __future__ import annotations

import json

import pytest
from support.fake_farm_client import FakeFarm, at, job, parsed

from hil.controller.farm.timeline import find_lease_periods
from hil.controller.web.pages.farm.charts import PARTS, make_use_chart, wait_chart

HOUR = 3600.0


def test_stays_chart_shows_board_use_in_percent() -> None:
    farm = FakeFarm()
    farm.happen("job.granted", board="pi", job="1", lease=1, at=at(HOUR / 2))
    farm.happen("lease.ended", board="pi", job="1", lease=1, at=at(HOUR / 2 + 50))
    chart = make_use_chart(find_lease_periods(parsed("events", farm.events)), False, ["pi", "nano"], 1, now=HOUR)
    assert chart.times == pytest.approx([part * 150.0 for part in range(PARTS)])
    assert [(number, use) for number, use in enumerate(chart.lines["pi"]) if use] == [(12, 33.3)]
    assert set(chart.lines["nano"]) == {0.0}
    assert json.loads(chart.data)["lines"]["pi"][12] == 33.3
    assert chart.known_since is None


def test_stays_chart_marks_start_of_known_events() -> None:
    farm = FakeFarm()
    farm.happen("job.granted", board="pi", job="1", lease=1, at=at(1800))
    assert (
        make_use_chart(find_lease_periods(parsed("events", farm.events)), True, ["pi"], 1, now=HOUR).known_since
        == 1800.0
    )


def test_wait_chart_shows_waits_of_jobs() -> None:
    jobs = [job(str(wait), "done", queued_at=at(0), started_at=at(wait)) for wait in (10, 20, 30)]
    chart, waits = wait_chart(parsed("jobs", [*jobs, job("4")]), 1, now=HOUR)
    assert (waits[0].jobs, waits[0].half, waits[0].most) == (3, 20.0, 30.0)
    assert chart.lines["median"][:2] == [20.0, None]
    assert chart.lines["95th percentile"][:2] == [30.0, None]
