"""Files that hil checks before it starts an SSH client."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hil.controller.devices.ssh import connect
from hil.core.board_config import Connection
from hil.core.files import MAX_TEXT_BYTES
from hil.errors import UsageError


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create unusual files. A login fails the test."""
    monkeypatch.setattr(connect, "_log_in", lambda *_: pytest.fail("no check before the login"))
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)


@pytest.mark.parametrize("name", ["identity", "known_hosts"])
@pytest.mark.parametrize(
    ("file", "reason"),
    [("/dev/zero", "is a device"), ("pipe", "is a named pipe"), ("large", "has 16777217 bytes"), (".", "is a folder")],
)
def test_open_shell_rejects_irregular_key_files(tmp_path: Path, name: str, file: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"invalid {name}: .* {reason}") as refused:
        connect.open_shell("root@pi", Connection(**{name: file}), board="b", base=tmp_path)
    assert f"--{name.replace('_', '-')} FILE" in refused.value.hint


@pytest.mark.parametrize("file", ["absent", "/dev/null"])
def test_open_shell_accepts_missing_and_empty_known_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr(connect, "_log_in", lambda *_: "transport")
    monkeypatch.setattr(connect, "Shell", lambda transport, *_: transport)
    assert connect.open_shell("root@pi", Connection(known_hosts=file), board="b", base=tmp_path) == "transport"
