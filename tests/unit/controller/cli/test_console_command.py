"""`hil board console`: input."""

from __future__ import annotations

import io

import pytest

from hil.controller.cli.board import console
from hil.controller.cli.board.console import iter_input, send_input


def test_input_may_have_other_bytes_than_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n\xc3\xa9")))
    assert list(iter_input()) == ["caf\ufffd\n", "\u00e9"]


@pytest.mark.parametrize(("ends", "expected"), [(True, ["help\n", "stop"]), (False, ["help\n"])])
def test_console_stops_after_end_of_input(ends: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class FakeConsole:
        def send_line(self, text: str) -> None:
            done.append(text)

        def stop(self) -> None:
            done.append("stop")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"help\n")))
    monkeypatch.setattr(console, "OUTPUT_SECONDS", 0.0)
    send_input(FakeConsole(), ends)
    assert done == expected
