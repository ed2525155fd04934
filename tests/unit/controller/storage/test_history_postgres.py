"""Histories in PostgreSQL: unusable databases, and values that hil did not write."""

from __future__ import annotations

import psycopg
import pytest
from support.histories import history_entry

from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.store import HistoryStore
from hil.errors import StorageError, UsageError


@pytest.fixture
def place(empty_db, tmp_path):
    found = HistoryPlace(tmp_path / "history", empty_db)
    with HistoryStore.open(found, create=True) as store:
        store.add([history_entry()])
    return found


def change(place, statement):
    with psycopg.connect(place.url, autocommit=True) as connection:
        connection.execute(statement)


def test_open_rejects_history_of_newer_hil(place):
    change(place, "update hil_history.version set number = 9")
    with pytest.raises(StorageError, match="has format version 9; this hil supports version 1"):
        HistoryStore.open(place)


def test_open_reports_missing_database_without_password(place, tmp_path):
    unknown = place.url.replace("postgres@", "postgres:secret@").replace("?", "_missing?")
    with pytest.raises(StorageError, match=r'database ".*_missing" does not exist') as caught:
        HistoryStore.open(HistoryPlace(tmp_path, unknown))
    assert "secret" not in str(caught.value)


def test_open_rejects_invalid_url_without_password(tmp_path):
    with pytest.raises(UsageError, match="invalid PostgreSQL URL of the history postgresql://lab/x") as caught:
        HistoryStore.open(HistoryPlace(tmp_path, "postgresql://anna:secret@lab/x?nonesuch=secret"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("password", ["sec?ret", "sec@ret", "sec?r/et", "sec/r?et"])
def test_open_hides_password_with_unquoted_characters(tmp_path, password):
    with pytest.raises((StorageError, UsageError)) as caught:
        HistoryStore.open(HistoryPlace(tmp_path, f"postgresql://anna:{password}@127.0.0.1:1/x"))
    assert "sec" not in str(caught.value)
    assert "ret" not in str(caught.value)


@pytest.mark.parametrize(
    "statement",
    [
        "update hil_history.entries set document = decode(repeat('20', 2000000), 'hex')",
        "update hil_history.entries set document = 'text'",
        "update hil_history.entries set samples = decode(repeat('00', 80008), 'hex')",
        "update hil_history.entries set confirmed = 'other'",
    ],
)
def test_entries_reject_oversized_or_invalid_values(place, statement):
    change(place, statement)
    with HistoryStore.open(place) as store, pytest.raises(StorageError, match="is damaged"):
        list(store.entries())


def test_entries_can_be_read_in_several_loops(place):
    with HistoryStore.open(place) as store:
        store.add([history_entry(f"r{number}") for number in range(2, 250)])
        pairs = [(one.run, other.run) for one, other in zip(store.entries(), store.entries(), strict=True)]
        assert len(pairs) == 249
        assert next(store.entries()).run == "r1"
        assert store.annotate("r1", "noted")[1] == 1
