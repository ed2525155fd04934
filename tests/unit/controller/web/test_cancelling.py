"""Test that work for a page ends with its request."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from hil.controller.web.files.cached import Results
from hil.controller.web.index.index import IndexReader, IndexWriter
from hil.core.cancellation import WorkCancelled, cancel_on


def test_database_query_stops_when_cancelled(tmp_path: Path) -> None:
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
    flag = threading.Event()
    threading.Timer(0.2, flag.set).start()
    with (
        IndexWriter(tmp_path / "index.sqlite"),
        cancel_on(flag),
        pytest.raises(sqlite3.OperationalError, match="interrupted"),
        IndexReader(tmp_path / "index.sqlite").open_snapshot() as database,
    ):
        database.execute(endless).fetchall()


def test_results_wait_stops_when_cancelled() -> None:
    cancelled = threading.Event()
    cancelled.set()
    results = Results(1000, 1)
    begun, done = threading.Event(), threading.Event()

    def make() -> tuple[str, int]:
        begun.set()
        done.wait(60)
        return "made", 4

    thread = threading.Thread(target=results.get, args=["key", make])
    thread.start()
    begun.wait(60)
    with cancel_on(cancelled):
        for key in ("key", "another"):  # the first is being made, the second waits for its turn
            with pytest.raises(WorkCancelled):
                results.get(key, lambda: ("x", 1))
    done.set()
    thread.join()
    assert results.get("key", lambda: ("x", 1)) == "made"
    assert results.get("another", lambda: ("x", 1)) == "x"
