"""Test that the index follows changes of the directories and of its database."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.waiting import allowed_s, eventually

from hil.controller.web.index import indexer
from hil.controller.web.index.index import IndexReader, IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.index.sessions import CaseFilter, SessionFilter, find_session, list_cases, list_sessions
from hil.controller.web.readers import read_session


def write_record(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path.parent


def write_run(root: Path, name: str, cases: Sequence[dict[str, str]] = ()) -> Path:
    return write_record(root / name / "run.json", {"cases": [{"outcome": "PASS", **one} for one in cases]})


def write_suite(root: Path, name: str, cases: Sequence[dict[str, str]]) -> Path:
    folder = write_record(root / name / "suite.json", {"suite": "s", "ids": [one["id"] for one in cases]})
    (folder / "results.jsonl").write_text("".join(line(**one) for one in cases))
    return folder


def line(id: str, outcome: str = "PASS") -> str:
    return json.dumps({"id": id, "outcome": outcome}) + "\n"


class Desk:
    """Directories of runs, with an index, writer and reader."""

    def __init__(self, folder: Path) -> None:
        self.root, self.index = folder / "runs", folder / "cache" / "index.sqlite"
        self.root.mkdir()
        self.writer = IndexWriter(self.index)
        self.indexer = Indexer(self.writer, [self.root])
        self.reader = IndexReader(self.index)

    def seen(self) -> dict[str, list[str]]:
        """Return the cases and outcomes of each session."""
        with self.reader.open_snapshot() as database:
            found = list_sessions(database, SessionFilter()).sessions
            return {
                one.id: [f"{case['name']} {case['outcome']}" for case in list_cases(database, one, CaseFilter()).cases]
                for one in found
            }

    def look(self) -> dict[str, list[str]]:
        """Index again and return the sessions."""
        self.indexer.scan()
        return self.seen()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    with made.writer:
        yield made


def test_indexer_reads_appended_suite_lines(desk: Desk) -> None:
    lines = write_suite(desk.root, "s", [{"id": "a"}]) / "results.jsonl"
    assert desk.look() == {"s": ["a PASS"]}
    with lines.open("a") as file:
        file.write(line("b", "FAIL") + line("c")[:9])
    assert desk.look() == {"s": ["a PASS", "b FAIL"]}
    with lines.open("a") as file:
        file.write(line("c")[9:] + "damaged\n" + line("a", "FAIL"))
    # The last line of an id counts, as in hil itself.
    assert sorted(desk.look()["s"]) == ["a FAIL", "b FAIL", "c PASS"]
    with desk.reader.open_snapshot() as database:
        assert find_session(database, "s").damaged == 1


def hook_reads(monkeypatch: pytest.MonkeyPatch, hook: Callable[[str], None]) -> list[str]:
    """Call ``hook`` with a session's name before its record is read. Return the list of names."""
    read: list[str] = []

    def read_with_hook(folder: Path, *given: str) -> object:
        read.append(folder.name)
        hook(folder.name)
        return read_session(folder, *given)

    monkeypatch.setattr(indexer, "read_session", read_with_hook)
    return read


def test_indexer_reads_new_session_between_batches(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a session of 168,000 cases delayed all other sessions by 161 s."""
    monkeypatch.setattr(indexer, "_BATCH", 3)
    lines = write_suite(desk.root, "large", []) / "results.jsonl"
    lines.write_text("".join([line("a"), line("a", "FAIL"), "damaged\n", *map(line, "bcdefg")]))

    def write_late(name: str) -> None:
        if not (desk.root / "late").exists():
            write_run(desk.root, "late", [{"name": "m"}])

    read = hook_reads(monkeypatch, write_late)
    # Damaged lines and repeated ids do not change the order of later batches.
    expected = ["a FAIL", *(f"{name} PASS" for name in "bcdefg")]
    assert desk.look() == {"large": expected, "late": ["m PASS"]}
    assert read[:3] == ["large", "late", "large"]
    with desk.reader.open_snapshot() as database:
        assert find_session(database, "large").damaged == 1
        assert [row[0] for row in database.execute("select number from cases order by number")] == [0, 1, *range(3, 9)]


def test_indexer_stops_between_batches_and_resumes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_BATCH", 2)
    write_suite(desk.root, "large", [{"id": one} for one in "abcdefg"])
    read = hook_reads(monkeypatch, lambda name: desk.indexer._stop.set())
    assert desk.look() == {"large": ["a PASS", "b PASS"]}
    assert read == ["large"] and not desk.indexer.progress.first_done
    monkeypatch.setattr(indexer, "read_session", read_session)
    Indexer(desk.writer, [desk.root]).scan()
    assert desk.seen() == {"large": [f"{one} PASS" for one in "abcdefg"]}


def test_indexer_limits_bytes_of_batch(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_BATCH_BYTES", 50)
    write_suite(desk.root, "large", [{"id": one} for one in "abcd"])
    read = hook_reads(monkeypatch, lambda name: None)
    assert len(desk.look()["large"]) == 4 and len(read) > 1


@pytest.mark.parametrize("how", ["in place", "anew", "shorter"])
def test_indexer_reloads_rewritten_suite_lines(desk: Desk, how: str) -> None:
    lines = write_suite(desk.root, "s", [{"id": "a"}, {"id": "b"}]) / "results.jsonl"
    desk.look()
    cases = [line("a", "FAIL"), line("c"), line("d")][: 1 if how == "shorter" else 3]
    if how == "anew":
        (desk.root / "new").write_text("".join(cases))
        (desk.root / "new").replace(lines)
    else:  # like pytest: the same file, possibly longer than before
        lines.write_text("".join(cases))
    assert desk.look()["s"] == ["a FAIL", "c PASS", "d PASS"][: len(cases)]


def test_indexer_follows_deletes_moves_and_renames(desk: Desk) -> None:
    write_run(desk.root, "a", [{"name": "m"}])
    write_run(desk.root, "deep/er/b", [{"name": "m"}])
    assert desk.look().keys() == {"a", "deep/er/b"}
    (desk.root / "a").rename(desk.root / "deep" / "c")
    shutil.rmtree(desk.root / "deep" / "er")
    assert desk.look().keys() == {"deep/c"}
    shutil.rmtree(desk.root)
    assert desk.look() == {}


def test_indexer_follows_old_session_within_few_passes(desk: Desk) -> None:
    folder = write_suite(desk.root, "old", [{"id": "a"}])
    hours_ago = time.time() - 10 * 3600
    for path in (*folder.iterdir(), folder):
        os.utime(path, (hours_ago, hours_ago))
    for _ in range(3):
        assert desk.look() == {"old": ["a PASS"]}
    with (folder / "results.jsonl").open("a") as file:
        file.write(line("b", "FAIL"))
    looks = [desk.look()["old"] for _ in range(8)]
    assert looks[-1] == ["a PASS", "b FAIL"]
    # A replaced record changes its directory, so the indexer reads it at once.
    (folder / "suite.json").unlink()
    write_run(desk.root, "old", [{"name": "c"}])
    assert desk.look() == {"old": ["c PASS"]}


def test_indexer_reloads_directories_restored_unchanged(desk: Desk) -> None:
    write_run(desk.root, "a", [{"name": "m"}])
    before = desk.look()
    desk.look()
    desk.root.rename(desk.root.with_name("away"))
    assert desk.look() == {}
    desk.root.with_name("away").rename(desk.root)
    assert desk.look() == before == {"a": ["m PASS"]}


def test_indexer_ignores_directory_deleted_while_reading(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    import hil.controller.web.index.indexer as module

    folder, read = write_run(desk.root, "a"), module.read_session

    def read_late(*arguments: object) -> object:
        shutil.rmtree(folder, ignore_errors=True)
        return read(*arguments)

    monkeypatch.setattr(module, "read_session", read_late)
    assert desk.look() == {}


def test_indexer_shows_known_record_during_partial_write(desk: Desk) -> None:
    folder = write_run(desk.root, "a", [{"name": "m"}])
    whole = (folder / "run.json").read_text()
    desk.look()
    (folder / "run.json").write_text(whole[:40])
    assert desk.look() == {"a": ["m PASS"]}
    long_ago = time.time() - 60
    os.utime(folder / "run.json", (long_ago, long_ago))
    desk.look()
    with desk.reader.open_snapshot() as database:
        assert "cannot be read" in find_session(database, "a").error
    (folder / "run.json").write_text(whole)
    assert desk.look() == {"a": ["m PASS"]}


def test_indexer_skips_directories_without_sessions(desk: Desk) -> None:
    write_record(desk.root / "chrome" / "trace.json", {"traceEvents": []})
    write_record(desk.root / ".hidden" / "run.json", {})
    write_record(desk.root / "run" / "run.json", {"cases": []})
    write_record(desk.root / "run" / "layers" / "run.json", {})
    (desk.root / "link").symlink_to(desk.root / "run")
    (desk.root / "golden" / "run.json").mkdir(parents=True)
    assert desk.look().keys() == desk.look().keys() == {"run"}


def test_indexer_rebuilds_deleted_or_damaged_database(desk: Desk) -> None:
    write_run(desk.root, "a", [{"name": "m"}])
    desk.look()
    shutil.rmtree(desk.index.parent)
    assert desk.look() == {"a": ["m PASS"]}
    write_run(desk.root, "b")
    desk.index.write_bytes(b"no database" * 4000)
    for suffix in ("-wal", "-shm"):
        Path(f"{desk.index}{suffix}").unlink(missing_ok=True)
    desk.indexer.scan()  # this pass detects the damage
    assert desk.look().keys() == {"a", "b"}


def test_index_without_a_table_is_rebuilt(desk: Desk) -> None:
    write_run(desk.root, "a", [{"name": "m"}])
    desk.look()
    with contextlib.closing(sqlite3.connect(desk.index)) as database:
        database.execute("drop table cases")
    write_run(desk.root, "b")
    desk.indexer.scan()  # this scan finds the damage
    assert desk.look().keys() == {"a", "b"}


def test_index_that_another_process_locks_is_not_deleted(desk: Desk) -> None:
    write_run(desk.root, "a", [{"name": "m"}])
    desk.look()
    number = desk.index.stat().st_ino
    with contextlib.closing(sqlite3.connect(desk.index, isolation_level=None)) as database:
        database.execute("begin exclusive")
        desk.writer.recover(sqlite3.OperationalError("database is locked"))
    assert desk.index.stat().st_ino == number
    assert desk.look() == {"a": ["m PASS"]}


def test_indexer_runs_single_writer_with_takeover(desk: Desk) -> None:
    write_run(desk.root, "a")
    with IndexWriter(desk.index) as second:
        other = Indexer(second, [desk.root])
        other.scan()
        assert not second.take() and other.progress.first_done
        told = other.progress.generation
        desk.look()
        other.scan()
        assert other.progress.generation > told
        desk.writer.__exit__()
        write_run(desk.root, "b")
        other.scan()
        assert desk.seen().keys() == {"a", "b"} and second.take()


@pytest.mark.ci
def test_indexer_shows_changes_within_two_seconds(desk: Desk) -> None:
    with desk.indexer:
        eventually(lambda: desk.indexer.progress.first_done)
        for number in range(3):
            lines = write_suite(desk.root, f"s{number}", [{"id": "a"}]) / "results.jsonl"
            eventually(lambda name=f"s{number}": desk.seen().get(name) == ["a PASS"], within_s=allowed_s(2.0))
            with lines.open("a") as file:
                file.write(line("b"))
            eventually(lambda name=f"s{number}": desk.seen()[name] == ["a PASS", "b PASS"], within_s=allowed_s(2.0))


def test_indexer_pause_ignores_slow_reads(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now, time = 0.0, staticmethod(time.time)

        def monotonic(self) -> float:
            return self.now

    clock, read = Clock(), []

    def slowly(folder: Path, *given: str) -> object:
        clock.now += 100.0
        read.append(folder.name)
        return read_session(folder, *given)

    monkeypatch.setattr(indexer, "time", clock)
    monkeypatch.setattr(indexer, "read_session", slowly)
    for number in range(3):
        os.utime(write_run(desk.root, f"r{number}") / "run.json", (1e9, 1e9 + number % 2))
    assert len(desk.look()) == 3
    assert desk.indexer.pause_s == indexer.POLL_SECONDS
    # The newest session is read first.
    assert read[0] == "r1"
