"""Live view of a board's console on the page of a farm's board."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.fake_farm_client import busy_farm
from support.web import asking

from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.farm.client.console import FarmConsole
from hil.controller.web.pages.farm import board_console, farm_events
from hil.errors import FarmError, FarmUnreachable, UsageError

LINES = [
    ConsoleLine(1, 1e9, "Booting", "output"),
    ConsoleLine(2, 1e9 + 1.5, "\x1b[2Jpanic", "output"),
    ConsoleLine(3, 1e9 + 2, "reconnected", "note"),
]


class FakeConsole:
    """Console that sends lines, and then an error."""

    lines: list[ConsoleLine] = LINES
    error: Exception = FarmError("the host ended the console of pi")
    asked: list[tuple[Any, ...]]
    stopped: threading.Event

    def __init__(self, *asked: Any) -> None:
        self.asked.append(asked[1:])

    def iter_lines(self) -> Iterator[ConsoleLine]:
        yield from self.lines
        raise self.error

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> type[FakeConsole]:
    kind = type("Console", (FakeConsole,), {"asked": [], "stopped": threading.Event()})
    monkeypatch.setattr(board_console, "FarmConsole", kind)
    monkeypatch.setattr(board_console, "_EARLIER_SECONDS", 1e10)
    return kind


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with busy_farm().link() as link, asking(tmp_path, token="t", farm=link) as client:
        client.headers["authorization"] = "Bearer t"
        yield client


class FakeCall:
    """Call that waits for its end, like a console without output."""

    def __init__(self) -> None:
        self._is_cancelled = False

    def __iter__(self) -> Iterator[Any]:
        assert self._is_cancelled
        raise FarmError("cancelled")

    def cancel(self) -> None:
        self._is_cancelled = True


def texts(answer: str) -> list[str]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line.startswith("data: ")]


def test_board_page_shows_console_on_request(client: TestClient) -> None:
    assert "Show the console" in client.get("/board?name=pi").text
    page = client.get("/board?name=pi&console=yes&q=oops").text
    assert 'data-log="/board/console?name=pi&amp;q=oops"' in page


def test_viewer_may_not_read_console(client: TestClient, console: type[FakeConsole]) -> None:
    viewer = {"authorization": "Bearer v"}
    assert (
        "onsole"
        not in client.get("/board?name=pi&console=yes", headers=viewer).text.partition("<h1")[2].partition("<footer")[0]
    )
    answer = client.get("/board/console?name=pi", headers=viewer)
    assert answer.status_code == 403 and not console.asked


def test_console_streams_lines_and_end(client: TestClient, console: type[FakeConsole]) -> None:
    answer = client.get("/board/console?name=pi", headers={"authorization": "Bearer s"}).text
    lines, end = texts(answer)
    assert lines == "01:46:40.000 Booting\n01:46:41.500 \\x1b[2Jpanic\n01:46:42.000 -- reconnected\n"
    assert (end, console.stopped.is_set()) == ("the host ended the console of pi", True)
    assert "id: 1000000002000000" in answer


def test_console_shows_matching_lines(client: TestClient, console: type[FakeConsole]) -> None:
    assert texts(client.get("/board/console?name=pi&q=PANIC").text)[0] == "01:46:41.500 \\x1b[2Jpanic\n"


def test_console_continues_after_last_line(client: TestClient, console: type[FakeConsole]) -> None:
    answer = client.get("/board/console?name=pi", headers={"last-event-id": "1000000001500000"})
    assert texts(answer.text)[0] == "01:46:42.000 -- reconnected\n"
    assert console.asked == [("pi", 1e9 + 1.5, None, None)]


def test_console_shows_reason_without_lines(client: TestClient, console: type[FakeConsole]) -> None:
    console.lines, console.error = [], UsageError("pi has no console", hint="add [console]")
    assert texts(client.get("/board/console?name=pi").text) == ["pi has no console: add [console]"]
    console.error = FarmUnreachable("away")
    assert texts(client.get("/board/console?name=pi").text) == []  # the browser reconnects


def test_console_ignores_lines_with_invalid_time(client: TestClient, console: type[FakeConsole]) -> None:
    console.lines = [ConsoleLine(1, float(time), "x", "output") for time in ("nan", "inf", "1e30")]
    assert texts(client.get("/board/console?name=pi").text) == ["the host ended the console of pi"]


def test_console_limits_streams_of_user(
    client: TestClient, console: type[FakeConsole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(farm_events, "_followed", {number: "sue" for number in range(10)})
    assert client.get("/board/console?name=pi", headers={"authorization": "Bearer s"}).status_code == 429
    assert not console.asked


def test_stopped_console_ends_without_error() -> None:
    farm: Any = SimpleNamespace(metadata=[], stub=SimpleNamespace(Dial=lambda *_, **__: FakeCall()))
    reading = FarmConsole(farm, "pi", None, None, None)
    reading.stop()
    assert list(reading.iter_lines()) == []
