"""The index follows the folders, whatever becomes of them and of itself."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.waiting import eventually

from hil.controller.web import indexer
from hil.controller.web.index import Reader, Writer
from hil.controller.web.indexer import Indexer
from hil.controller.web.readers import read_session
from hil.controller.web.sessions import CaseFilter, SessionFilter, find_session, list_cases, list_sessions


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
    """Folders of runs, an index of them, and who keeps it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.index = folder / "runs", folder / "cache" / "index.sqlite"
        self.root.mkdir()
        self.writer = Writer(self.index)
        self.indexer = Indexer(self.writer, [self.root])
        self.reader = Reader(self.index)

    def seen(self) -> dict[str, list[str]]:
        """Session -> its cases, with their outcomes."""
        with self.reader.reading() as database:
            found = list_sessions(database, SessionFilter()).sessions
            return {
                one.id: [f"{case['name']} {case['outcome']}" for case in list_cases(database, one, CaseFilter()).cases]
                for one in found
            }

    def look(self) -> dict[str, list[str]]:
        """What is seen after another look."""
        self.indexer.look()
        return self.seen()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    with made.writer:
        yield made


def test_a_suite_that_goes_on_is_read_from_where_it_was(desk: Desk) -> None:
    lines = write_suite(desk.root, "s", [{"id": "a"}]) / "results.jsonl"
    assert desk.look() == {"s": ["a PASS"]}
    with lines.open("a") as file:
        file.write(line("b", "FAIL") + line("c")[:9])
    assert desk.look() == {"s": ["a PASS", "b FAIL"]}
    with lines.open("a") as file:
        file.write(line("c")[9:] + "damaged\n" + line("a", "FAIL"))
    # Of an id that occurs twice the last counts, as where hil itself reads the run.
    assert sorted(desk.look()["s"]) == ["a FAIL", "b FAIL", "c PASS"]
    with desk.reader.reading() as database:
        assert find_session(database, "s").damaged == 1


@pytest.mark.parametrize("how", ["in place", "anew", "shorter"])
def test_a_suite_whose_lines_were_written_anew_is_read_anew(desk: Desk, how: str) -> None:
    lines = write_suite(desk.root, "s", [{"id": "a"}, {"id": "b"}]) / "results.jsonl"
    desk.look()
    cases = [line("a", "FAIL"), line("c"), line("d")][: 1 if how == "shorter" else 3]
    if how == "anew":
        (desk.root / "new").write_text("".join(cases))
        (desk.root / "new").replace(lines)
    else:  # as pytest does: the same file, which may be longer than before by the next look
        lines.write_text("".join(cases))
    assert desk.look()["s"] == ["a FAIL", "c PASS", "d PASS"][: len(cases)]


def test_what_is_deleted_moved_or_renamed_is_followed(desk: Desk) -> None:
    write_run(desk.root, "a", [{"name": "m"}])
    write_run(desk.root, "deep/er/b", [{"name": "m"}])
    assert desk.look().keys() == {"a", "deep/er/b"}
    (desk.root / "a").rename(desk.root / "deep" / "c")
    shutil.rmtree(desk.root / "deep" / "er")
    assert desk.look().keys() == {"deep/c"}
    shutil.rmtree(desk.root)
    assert desk.look() == {}


def test_what_nobody_has_written_to_for_long_is_followed_within_a_few_looks(desk: Desk) -> None:
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
    # A record that is replaced changes its folder, and is read at once.
    (folder / "suite.json").unlink()
    write_run(desk.root, "old", [{"name": "c"}])
    assert desk.look() == {"old": ["c PASS"]}


def test_folders_that_come_back_as_they_were_are_read_again(desk: Desk) -> None:
    write_run(desk.root, "a", [{"name": "m"}])
    before = desk.look()
    desk.look()
    desk.root.rename(desk.root.with_name("away"))
    assert desk.look() == {}
    desk.root.with_name("away").rename(desk.root)
    assert desk.look() == before == {"a": ["m PASS"]}


def test_a_folder_that_goes_while_it_is_read_is_no_error(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    import hil.controller.web.indexer as module

    folder, read = write_run(desk.root, "a"), module.read_session

    def read_late(*arguments: object) -> object:
        shutil.rmtree(folder, ignore_errors=True)
        return read(*arguments)

    monkeypatch.setattr(module, "read_session", read_late)
    assert desk.look() == {}


def test_a_record_that_comes_bit_by_bit_does_not_hide_what_was_known(desk: Desk) -> None:
    folder = write_run(desk.root, "a", [{"name": "m"}])
    whole = (folder / "run.json").read_text()
    desk.look()
    (folder / "run.json").write_text(whole[:40])
    assert desk.look() == {"a": ["m PASS"]}
    long_ago = time.time() - 60
    os.utime(folder / "run.json", (long_ago, long_ago))
    desk.look()
    with desk.reader.reading() as database:
        assert "cannot be read" in find_session(database, "a").error
    (folder / "run.json").write_text(whole)
    assert desk.look() == {"a": ["m PASS"]}


def test_folders_that_are_no_sessions_are_passed_over(desk: Desk) -> None:
    write_record(desk.root / "chrome" / "trace.json", {"traceEvents": []})
    write_record(desk.root / ".hidden" / "run.json", {})
    write_record(desk.root / "run" / "run.json", {"cases": []})
    write_record(desk.root / "run" / "layers" / "run.json", {})
    (desk.root / "link").symlink_to(desk.root / "run")
    (desk.root / "golden" / "run.json").mkdir(parents=True)
    assert desk.look().keys() == desk.look().keys() == {"run"}


def test_an_index_that_is_deleted_or_damaged_is_made_anew(desk: Desk) -> None:
    write_run(desk.root, "a", [{"name": "m"}])
    desk.look()
    shutil.rmtree(desk.index.parent)
    assert desk.look() == {"a": ["m PASS"]}
    write_run(desk.root, "b")
    desk.index.write_bytes(b"no database" * 4000)
    for suffix in ("-wal", "-shm"):
        Path(f"{desk.index}{suffix}").unlink(missing_ok=True)
    desk.indexer.look()  # this look finds the damage
    assert desk.look().keys() == {"a", "b"}


def test_of_two_on_the_same_folders_one_writes_and_the_other_takes_its_place(desk: Desk) -> None:
    write_run(desk.root, "a")
    with Writer(desk.index) as second:
        other = Indexer(second, [desk.root])
        other.look()
        assert not second.take() and other.progress.first_done
        told = other.progress.generation
        desk.look()
        other.look()
        assert other.progress.generation > told
        desk.writer.__exit__()
        write_run(desk.root, "b")
        other.look()
        assert desk.seen().keys() == {"a", "b"} and second.take()


def test_what_is_new_is_seen_within_two_seconds(desk: Desk) -> None:
    with desk.indexer:
        eventually(lambda: desk.indexer.progress.first_done)
        for number in range(3):
            lines = write_suite(desk.root, f"s{number}", [{"id": "a"}]) / "results.jsonl"
            eventually(lambda name=f"s{number}": desk.seen().get(name) == ["a PASS"], within_s=2.0)
            with lines.open("a") as file:
                file.write(line("b"))
            eventually(lambda name=f"s{number}": desk.seen()[name] == ["a PASS", "b PASS"], within_s=2.0)


def test_what_takes_long_to_read_does_not_put_off_the_next_look(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert desk.indexer.pause_s == indexer.POLL_S
    # The newest first: whoever looks at the pages meanwhile looks for it.
    assert read[0] == "r1"
