"""Test the cached history of a farm: it equals the farm's answers and repeats few queries."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.fake_farm_client import at, job, parsed

from hil.controller.web.farm import past as farm_past
from hil.controller.web.farm.past import FarmPast
from hil.errors import UsageError

SIZES = {"MOST_EVENTS": 300, "MOST_JOBS": 80, "_EVENTS_AGAIN": 40, "_MORE_EVENTS": 100}
SIZES |= {"_JOBS_AGAIN": 12, "_LATE": 10, "_ONE_BY_ONE": 3}


class Farm:
    """Farm whose boards run jobs in turn. It answers with the newest rows, oldest first."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.events: list[dict[str, Any]] = []
        self.held: list[dict[str, Any]] = []  # events reported after later ones
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, int]] = []

    def ask(self, what: str, **asked: Any) -> Any:
        if what == "job":
            self.asked.append((what, 1))
            if asked["name"] not in self.jobs:
                raise UsageError("no such job")
            return parsed(what, self.jobs[asked["name"]])
        rows = list(self.jobs.values()) if what == "jobs" else sorted(self.events, key=lambda one: one["id"])
        rows = [one for one in rows if not asked.get("state") or one["state"] in asked["state"]]
        rows = [one for one in rows if one.get("board") == asked.get("board", one.get("board"))]
        found = [dict(one) for one in rows[-asked["limit"] :]]
        self.asked.append((what, len(found)))
        return parsed(what, found)

    def happen(self, what: str, name: str, board: str = "") -> None:
        number = len(self.events) + len(self.held) + 1
        event = {"id": number, "what": what, "job": name, "board": board, "lease": number, "at": at(self.now)}
        (self.held if self.rng.random() < 0.1 else self.events).append({**event, "reason": ""})
        while self.held and self.held[0]["id"] < number - 5:
            self.events.append(self.held.pop(0))

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 1
            queued = [one for one in self.jobs.values() if one["state"] == "queued"]
            running = [one for one in self.jobs.values() if one["state"] == "running"]
            way = self.rng.random()
            if way < 0.4:
                name = f"{len(self.jobs) + 1}"
                self.jobs[name] = job(name, queued_at=at(self.now))
                self.happen("job.queued", name)
            elif way < 0.7 and queued and len(running) < 6:
                queued[0].update(state="running", started_at=at(self.now))
                self.happen("job.granted", queued[0]["name"], f"b{len(running)}")
            elif running:
                one = self.rng.choice(running)
                if way < 0.75:
                    one.update(state="queued", started_at=None)
                else:
                    one.update(state="done")
                self.happen("lease.ended", one["name"], self.rng.choice("ab"))


def times(rows: Any) -> list[tuple[Any, ...]]:
    return sorted((one.name, one.queued_at, one.started_at) for one in rows)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SIZES.items():
        monkeypatch.setattr(farm_past, name, value)


@pytest.mark.parametrize("seed", range(3))
def test_farm_past_matches_farm(small: None, seed: int) -> None:
    farm, past = Farm(seed), FarmPast()
    for _ in range(30):
        farm.go_on(farm.rng.choice((0, 1, 5, 20, 100)))
        assert (every := past.events(farm.ask)) == farm.ask("events", limit=300)
        board = farm.rng.choice(("a", "b", "c"))
        found, told = past.events(farm.ask, board), farm.ask("events", limit=300, board=board)
        assert found == told or (len(every) < 300 and found == [one for one in told if one.id >= every[0].id])
        assert times(past.list_jobs(farm.ask)) == times(farm.ask("jobs", limit=80))


def test_farm_past_queries_only_recent_rows(small: None) -> None:
    farm, past = Farm(), FarmPast()
    farm.go_on(2000)
    past.prepare(farm.ask)
    past.list_jobs(farm.ask)
    farm.go_on(10)
    farm.asked.clear()
    past.events(farm.ask)
    assert farm.asked == [("events", 40)]
    past.list_jobs(farm.ask)
    assert max(many for _, many in farm.asked) == 40 and len(farm.asked) < 8


def test_farm_past_reloads_recreated_farm(small: None) -> None:
    past = FarmPast()
    for farm in (Farm(1), Farm(2)):
        farm.go_on(500)
        assert past.events(farm.ask) == farm.ask("events", limit=300)
        assert times(past.list_jobs(farm.ask)) == times(farm.ask("jobs", limit=80))
        farm.now = 9000.0


def test_farm_past_drops_deleted_job(small: None) -> None:
    farm, past = Farm(), FarmPast()
    farm.jobs = {str(number): job(str(number), queued_at=at(number)) for number in range(60)}
    farm.happen("job.queued", "3")
    assert len(past.list_jobs(farm.ask)) == 60
    farm.happen("job.granted", "3")
    del farm.jobs["3"]
    assert "3" not in {one.name for one in past.list_jobs(farm.ask)}
