"""Test `hil farm lease --at` and `hil farm reservations`, with made-up answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from support.fake_farm_client import parsed
from support.schemas import check_document

from hil.controller.cli.farm import lease
from hil.controller.cli.farm.farm import farm
from hil.errors import UsageError

BEGIN = datetime.now().astimezone() + timedelta(hours=2)
BOOKED = {
    **{"id": 3, "user": "anna", "project": "", "board": "pi"},
    **{"begins_at": BEGIN.isoformat(), "ends_at": (BEGIN + timedelta(hours=1)).isoformat()},
}


class Farm:
    """Fake connection that records the questions."""

    asked: list[tuple[str, dict[str, Any]]]

    def __init__(self, address: object, **settings: object) -> None:
        pass

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, what: str, **arguments: Any) -> Any:
        self.asked.append((what, arguments))
        return parsed(what, {"reserve": BOOKED, "reservations": [BOOKED], "unreserve": {"board": "pi"}}[what])

    do = ask


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    Farm.asked = []
    monkeypatch.setattr("hil.controller.farm.client.client.FarmClient", Farm)
    monkeypatch.setenv("HIL_FARM", "unix:/nowhere")
    monkeypatch.setenv("HIL_FARM_TOKEN", "token")
    return lambda *words: CliRunner().invoke(farm, words)


def test_lease_at_reserves_board(run: Callable[..., Any]) -> None:
    before = time.time()
    done = run("lease", "--at", "2h", "--for", "1h", "--select", "chip=a76", "--json")
    after = time.time()
    check_document(json.loads(done.stdout), "farm lease", "farm")
    [(what, asked)] = Farm.asked
    assert (what, asked["selector"], asked["seconds"]) == ("reserve", "chip=a76", 3600.0)
    assert before + 7199 < asked["begin"] < after + 7201
    text = run("lease", "--at", "2h").stdout
    assert "pi is reserved for you from" in text and "hil farm lease --select name=pi" in text


def test_lease_at_with_command_waits_for_start(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease.time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    done = run("lease", "--at", "2h", "--", "true")
    assert "pi is reserved; waiting up to" in done.stderr
    assert "hil farm reservations --cancel 3 cancels it" in done.stderr


def test_lease_at_rejects_past_time(run: Callable[..., Any]) -> None:
    ended = run("lease", "--at", "2020-01-01")
    assert isinstance(ended.exception, UsageError) and "in the past" in str(ended.exception) and Farm.asked == []


def test_reservations_are_listed_and_cancelled(run: Callable[..., Any]) -> None:
    assert json.loads(run("reservations", "--json").stdout) == {"schema": 1, "reservations": [BOOKED]}
    check_document(json.loads(run("reservations", "--json").stdout), "farm reservations", "farm")
    rows = run("reservations").stdout.splitlines()
    assert rows[0].split() == ["ID", "BOARD", "USER", "FROM", "TO"] and rows[-1].split()[:3] == ["3", "pi", "anna"]
    gone = run("reservations", "--cancel", "3", "--json")
    check_document(json.loads(gone.stdout), "farm reservations", "farm")
    assert Farm.asked[-1] == ("unreserve", {"id": 3})
