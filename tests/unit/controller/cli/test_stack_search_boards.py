"""Boards of `hil bisect --over`: names, and all boards of a farm that match a selector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.cli.analysis import bisect
from hil.errors import UsageError

BOARDS = [
    SimpleNamespace(name="pi-1", state="online", labels={"name": "pi-1", "hw_type": "rpi5"}),
    SimpleNamespace(name="pi-2", state="offline", labels={"name": "pi-2", "hw_type": "rpi5"}),
    SimpleNamespace(name="nano", state="online", labels={"name": "nano", "hw_type": "nano"}),
]


@pytest.fixture(autouse=True)
def farm(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def connect() -> Iterator[Any]:
        yield SimpleNamespace(ask=lambda what: BOARDS)

    monkeypatch.setattr(bisect, "connect_farm", connect)


def test_selector_stands_for_each_online_board() -> None:
    assert bisect.list_boards(["a.toml", "farm:hw_type=rpi5"]) == ["a.toml", 'farm:name="pi-1"']
    assert bisect.list_boards(["farm:"]) == ['farm:name="pi-1"', 'farm:name="nano"']


def test_selector_without_online_board_is_usage_error() -> None:
    with pytest.raises(UsageError, match="no online board matches farm:gpu"):
        bisect.list_boards(["farm:gpu"])
