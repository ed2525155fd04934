"""Histories in SQLite: files of other programs, damaged files, and files of an earlier hil."""

from __future__ import annotations

import sqlite3

import pytest
from support.histories import history_entry

from hil.controller.storage.history.place import FILE
from hil.controller.storage.history.store import HistoryStore
from hil.errors import StorageError

# Tables of histories since the first release. hil must open them.
EARLIER = (
    "CREATE TABLE series (id text primary key, key text not null) without rowid",
    "CREATE TABLE entries (run text, case_name text, series text not null, created real not null,"
    " commit_id text not null, branch text not null, program text not null, outcome text not null, p50_ns real,"
    " document text not null, samples blob not null, confirmed text not null, primary key (run, case_name))",
    "CREATE INDEX entries_by_series on entries (series, created)",
    "CREATE INDEX entries_by_commit on entries (commit_id)",
    "CREATE TABLE annotations (number integer primary key, commit_id text not null, run text not null,"
    " case_name text not null, created real not null, text text not null)",
    "pragma application_id = 1751739464",
    "pragma user_version = 1",
)


@pytest.fixture
def store(tmp_path):
    with HistoryStore.open(tmp_path / "history", create=True) as opened:
        yield opened


def test_open_accepts_history_of_earlier_hil(tmp_path):
    (tmp_path / "history").mkdir()
    database = sqlite3.connect(tmp_path / "history" / FILE)
    for text in EARLIER:
        database.execute(text)
    database.close()
    with HistoryStore.open(tmp_path / "history") as store:
        store.add([history_entry()])
        assert list(store.entries()) == [history_entry()]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("text", "is damaged"),
        ("pragma user_version = 9", "has format version 9; this hil supports version 1"),
        ("create view v as select 1", "not a history of hil"),
        ("pragma application_id = 7", "not a history of hil"),
        ("directory", "not a regular file"),
        ("link", "not a regular file"),
    ],
)
def test_open_rejects_unusable_database(tmp_path, change, why):
    place = tmp_path / "history"
    HistoryStore.open(place, create=True).close()
    path = place / FILE
    if change in ("text", "directory", "link"):
        path.unlink()
        if change == "text":
            path.write_bytes(b"no database, but long enough to be one" * 100)
        elif change == "directory":
            path.mkdir()
        else:
            path.symlink_to(tmp_path / "other")
    else:
        database = sqlite3.connect(path)
        database.execute(change)
        database.commit()
        database.close()
    with pytest.raises(StorageError, match=why) as raised:
        HistoryStore.open(place, create=True)
    assert raised.value.hint


@pytest.mark.parametrize("document", ["{", "[]", "{}", '{"key": 3}'])
def test_entries_report_damaged_rows(store, document):
    store.add([history_entry()])
    with sqlite3.connect(store.place.folder / FILE) as database:
        database.execute("update entries set document = ?", (document,))
    with pytest.raises(StorageError, match="is damaged"):
        list(store.entries())


@pytest.mark.parametrize(
    "change",
    [
        "document = zeroblob(2000000)",
        "document = cast('[' || replace(hex(zeroblob(200000)), '00', '0,') || '0]' as blob)",
        "document = 'text'",
        "samples = zeroblob(80008)",
        "samples = zeroblob(7)",
        "samples = 3",
        "confirmed = 'other'",
    ],
)
def test_entries_reject_oversized_or_invalid_values(store, change):
    store.add([history_entry()])
    with sqlite3.connect(store.place.folder / FILE) as database:
        database.execute(f"update entries set {change}")
    with pytest.raises(StorageError, match="is damaged"):
        list(store.entries())


def test_series_reject_oversized_key(store):
    store.add([history_entry()])
    with sqlite3.connect(store.place.folder / FILE) as database:
        database.execute("update series set key = zeroblob(2000000)")
    for attempt in (store.series, lambda: store.add([history_entry("r2")])):
        with pytest.raises(StorageError, match="is damaged"):
            attempt()
