"""`hil board console`: input."""

from __future__ import annotations

import io

import pytest

from hil.controller.cli.board.console import iter_input


def test_input_may_have_other_bytes_than_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n\xc3\xa9")))
    assert list(iter_input()) == ["caf\ufffd\n", "\u00e9"]
