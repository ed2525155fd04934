from __future__ import annotations

import json
import threading

import pytest

from hil.agent.session import Journal


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_journal_writes_begin_and_end_entries(tmp_path):
    journal = Journal(tmp_path / "j.jsonl")
    with journal.record_operation("load", fence=4) as found:
        assert [one["what"] for one in lines(tmp_path / "j.jsonl")] == ["load begins"]
        found["program"] = "p"
    assert lines(tmp_path / "j.jsonl")[1].items() >= {"what": "load ended", "fence": 4, "program": "p"}.items()


def test_journal_records_error_type_on_failure(tmp_path):
    journal = Journal(tmp_path / "j.jsonl")
    with pytest.raises(ValueError), journal.record_operation("invoke"):
        raise ValueError("no")
    assert lines(tmp_path / "j.jsonl")[1]["error"] == "ValueError"


def test_journal_rotates_when_full(tmp_path):
    journal = Journal(tmp_path / "j.jsonl", most_bytes=1000)
    for number in range(100):
        journal.note("line", number=number)
    now, before = lines(tmp_path / "j.jsonl"), lines(tmp_path / "j.jsonl.1")
    assert {path.name for path in tmp_path.iterdir()} == {"j.jsonl", "j.jsonl.1"}
    assert all((tmp_path / name).stat().st_size <= 1000 for name in ("j.jsonl", "j.jsonl.1"))
    numbers = [one["number"] for one in before + now]
    assert numbers == list(range(numbers[0], 100))


def test_journal_appends_after_restart(tmp_path):
    Journal(tmp_path / "j.jsonl").note("first")
    Journal(tmp_path / "j.jsonl").note("second")
    assert [one["what"] for one in lines(tmp_path / "j.jsonl")] == ["first", "second"]


def test_journal_ignores_unwritable_path(tmp_path):
    Journal(tmp_path / "nowhere" / "j.jsonl").note("unheard")
    assert not list(tmp_path.iterdir())


def test_journal_writes_whole_lines_from_many_threads(tmp_path):
    journal = Journal(tmp_path / "j.jsonl")
    threads = [
        threading.Thread(target=lambda name=name: [journal.note("line", by=name * 200) for _ in range(50)])
        for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(tmp_path / "j.jsonl")) == 200
