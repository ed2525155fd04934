"""Boards of `hil bisect --over`: names, and all boards of a farm that match a selector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.cli.analysis import bisect
from hil.controller.workloads.stack_search.verdict import get_version
from hil.errors import UsageError


def make_board(name: str, state: str, hw_type: str, reason: str = "") -> SimpleNamespace:
    labels = {"name": name, "hw_type": hw_type, "stack.driver": f"{name}.0"}
    return SimpleNamespace(name=name, state=state, reason=reason, labels=labels)


BOARDS = [
    make_board("pi-1", "online", "rpi5"),
    make_board("pi-2", "quarantined", "rpi5", "health check failed"),
    make_board("pi-3", "suspect", "rpi5", "last check is overdue"),
    make_board("nano", "online", "nano"),
    make_board("lab", "online", "lab"),
]
ANSWERS = {"boards": BOARDS, "access": [SimpleNamespace(board=one.name, allowed=one.name != "lab") for one in BOARDS]}


@pytest.fixture(autouse=True)
def farm(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def connect() -> Iterator[Any]:
        yield SimpleNamespace(ask=ANSWERS.__getitem__)

    monkeypatch.setattr(bisect, "connect_farm", connect)


def test_selector_stands_for_each_board_that_runs_jobs() -> None:
    boards, unavailable = bisect.list_boards(["a.toml", "farm:hw_type=rpi5"])
    assert boards == ["a.toml", 'farm:name="pi-1"', 'farm:name="pi-3"']
    assert [(one.name, one.answer, one.reason) for one in unavailable] == [
        ("pi-2", "board error", "the board is quarantined: health check failed")
    ]
    assert get_version(unavailable[0], "driver") == "pi-2.0"
    boards, unavailable = bisect.list_boards(["farm:"])
    assert boards == ['farm:name="pi-1"', 'farm:name="pi-3"', 'farm:name="nano"']
    assert [one.name for one in unavailable] == ["pi-2", "lab"]


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("gpu", "no online board matches farm:gpu"),
        ("name=pi-2", "pi-2: the board is quarantined: health check failed"),
        ("name=lab", "lab: you may not use the board"),
    ],
)
def test_selector_without_usable_board_is_usage_error(selector: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bisect.list_boards([f"farm:{selector}"])
