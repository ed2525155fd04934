"""Test the watch of a labgrid place. tests/integration/test_farm_labgrid.py restarts a real coordinator."""

from __future__ import annotations

from typing import Any

import pytest
from support.waiting import eventually

from hil.controller.farm.host.place_watch import PlaceWatch
from hil.core.board_config import Labgrid
from hil.errors import BoardBusy, BoardUnreachable


class FakePlace:
    """Place whose owner the test sets; None stands for a coordinator that does not respond."""

    labgrid = Labgrid("rpi5")

    def __init__(self) -> None:
        self.owner: str | None = "hil"
        self.checks = 0

    def is_held(self) -> bool:
        self.checks += 1
        if self.owner is None:
            raise BoardUnreachable("could not connect to coordinator")
        return self.owner == "hil"

    def acquire(self) -> None:
        if self.owner not in ("", "hil"):
            raise BoardBusy(f"labgrid place rpi5 is in use by {self.owner}")
        self.owner = "hil"


@pytest.fixture
def place() -> Any:
    return FakePlace()


def test_watch_acquires_released_place_again(place: Any) -> None:
    messages: list[str] = []
    watch = PlaceWatch(place, messages.append, recent_s=0)
    watch.ensure_held()
    assert not messages
    place.owner = ""
    watch.ensure_held()
    assert place.owner == "hil"
    assert messages == ["labgrid place rpi5 was released; acquired the place again"]


def test_watch_reports_new_owner_until_release(place: Any) -> None:
    watch = PlaceWatch(place, print, recent_s=0)
    place.owner = "bob"
    for _ in range(2):
        with pytest.raises(BoardBusy, match="in use by bob"):
            watch.ensure_held()
    place.owner = ""
    watch.ensure_held()


def test_watch_keeps_board_without_coordinator(place: Any) -> None:
    watch = PlaceWatch(place, print, recent_s=0)
    place.owner = None
    watch.ensure_held()
    assert place.checks == 1


def test_watch_reuses_recent_check_of_held_place(place: Any) -> None:
    watch = PlaceWatch(place, print, recent_s=1000)
    watch.ensure_held()
    assert place.checks == 0


def test_watch_thread_reports_lost_place_once(place: Any) -> None:
    messages: list[str] = []
    place.owner = "bob"
    with PlaceWatch(place, messages.append, every_s=0.01, recent_s=0):
        eventually(lambda: place.checks > 3)
        assert messages == ["labgrid place rpi5 is lost: labgrid place rpi5 is in use by bob"]
        place.owner = ""
        eventually(lambda: place.owner == "hil")
    checks = place.checks
    assert len(messages) == 2 and place.checks == checks


@pytest.mark.parametrize(("owner", "why"), [("", "was released by another user"), ("bob", "is in use by bob")])
def test_watch_thread_reports_each_loss_once(place: Any, owner: str, why: str) -> None:
    losses: list[str] = []
    with PlaceWatch(place, print, every_s=0.01, recent_s=0, on_lost=losses.append):
        eventually(lambda: place.checks > 3)
        assert losses == []
        for count in (1, 2):
            place.owner = owner
            eventually(lambda count=count: len(losses) == count)
            checks = place.checks
            eventually(lambda checks=checks: place.checks > checks + 3)
            assert len(losses) == count and why in losses[-1]
            place.owner = "hil"
            checks = place.checks
            eventually(lambda checks=checks: place.checks > checks + 2)
