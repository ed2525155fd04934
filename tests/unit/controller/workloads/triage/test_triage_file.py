"""Triage files: bounded, atomic, and safe in directories of other users."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from hil.controller.workloads.triage import triage_file
from hil.controller.workloads.triage.entries import make_entry, put_entry
from hil.controller.workloads.triage.triage_file import NAME, choose_triage_file, read_triage, update_triage
from hil.errors import UsageError


def add(path: Path, case: str) -> None:
    update_triage(path, lambda entries: put_entry(entries, make_entry(case=case, state="known")))


def test_missing_file_has_no_entries(tmp_path: Path) -> None:
    assert read_triage(tmp_path / NAME).entries == ()


def test_pages_use_file_of_commands_if_directory_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()
    assert choose_triage_file(runs) == (runs / NAME, "")
    add(tmp_path / NAME, "a")
    assert choose_triage_file(Path()) == (Path(NAME), "")
    path, note = choose_triage_file(Path("runs"))
    assert path == Path(NAME) and "in the working directory" in note
    add(runs / NAME, "b")
    path, note = choose_triage_file(Path("runs"))
    assert path == Path("runs") / NAME and f"not {NAME} in the working directory" in note


def test_update_keeps_other_entries(tmp_path: Path) -> None:
    for case in ("a", "b", "a"):
        add(tmp_path / NAME, case)
    assert [one.case for one in read_triage(tmp_path / NAME).entries] == ["a", "b"]


def test_concurrent_updates_lose_nothing(tmp_path: Path) -> None:
    threads = [threading.Thread(target=add, args=(tmp_path / NAME, f"case{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.case for one in read_triage(tmp_path / NAME).entries} == {f"case{number}" for number in range(8)}


@pytest.mark.parametrize("name", [NAME, ".hil-triage.lock"])
def test_update_never_follows_link(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    with pytest.raises(UsageError, match="symbolic link"):
        add(folder / NAME, "a")
    assert victim.read_text() == "precious"


def test_named_pipe_is_rejected_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(UsageError, match="named pipe"):
        read_triage(tmp_path / NAME)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"schema": 1}',
        '{"schema": 9, "entries": []}',
        '{"schema": 1, "entries": [{"case": "a"}]}',
        '{"schema": 1, "entries": [{"case": "a", "state": "odd"}]}',
        '{"schema": 1, "entries": [{"case": "a", "state": "wontfix", "until": "2030-99-99"}]}',
        '{"schema": 1, "entries": [{"case": "a", "state": "wontfix"}]}',
        r'{"schema": 1, "entries": [{"case": "a\udcff", "state": "known"}]}',
        r'{"schema": 1, "entries": [{"case": "a", "state": "known", "outcomes": ["\ud800"]}]}',
        '{"schema": 1, "entries": ' + "[" * 5000,
        json.dumps({"schema": 1, "entries": [{"case": "a" * 501, "state": "known"}]}),
    ],
)
def test_invalid_file_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UsageError, match=NAME):
        read_triage(tmp_path / NAME)


def test_unreadable_entry_is_never_written(tmp_path: Path) -> None:
    add(tmp_path / NAME, "a")
    with pytest.raises(UsageError, match="length <= 500"):
        update_triage(tmp_path / NAME, lambda entries: [one.replace(owner="x" * 501) for one in entries])
    assert read_triage(tmp_path / NAME).entries[0].owner == ""


def test_file_size_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path / NAME, "a")
    monkeypatch.setattr(triage_file, "MAX_ENTRIES", 1)
    with pytest.raises(UsageError, match="is full"):
        add(tmp_path / NAME, "b")
    monkeypatch.setattr(triage_file, "MAX_BYTES", 10)
    with pytest.raises(UsageError, match="at most 10 are allowed"):
        read_triage(tmp_path / NAME)


def test_missing_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"directory .* not found"):
        add(tmp_path / "none" / NAME, "a")
