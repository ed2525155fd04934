"""Reports of unexpected exceptions."""

from __future__ import annotations

import stat
import sys
import tempfile
from pathlib import Path

import pytest

from hil.core.crash import report_crash
from hil.errors import EXIT_INTERNAL

SECRETS = ("t0ken", "p4ss", "k3y", "user:pw", "w3b", "0pen")
WORDS = [
    "farm",
    "jobs",
    "--token",
    "t0ken",
    "--db-password=p4ss",
    "--api-key",
    "k3y",
    "--db",
    "postgresql://user:pw@db/x",
    "http://localhost:8080/?s=1&token=w3b",
    "postgresql://db/x?sslmode=require&password=0pen",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hil", *WORDS])
    return tmp_path


def crash(text: str) -> Exception:
    try:
        raise KeyError(text)
    except KeyError as error:
        return error


def test_crash_report_contains_traceback_without_secrets(folder):
    error = report_crash(crash("no t0ken for https://user:pw@host"))
    (path,) = folder.iterdir()
    text = path.read_text()
    assert error.exit_code == EXIT_INTERNAL and str(path) in error.hint
    assert "in crash" in text and "KeyError" in text and "command: hil farm jobs --token ***" in text
    assert "numpy " in text and "Python 3." in text
    assert not any(secret in text or secret in str(error) + error.detail for secret in SECRETS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_crash_report_falls_back_to_error_text(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    error = report_crash(crash("lost"))
    assert "KeyError" in error.message and "file" not in error.hint and "in crash" in error.detail


def test_crash_report_without_arguments(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hil"])
    assert report_crash(crash("lost")).exit_code == EXIT_INTERNAL
