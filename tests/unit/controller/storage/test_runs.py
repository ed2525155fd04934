from __future__ import annotations

import json
import math

import numpy as np
import pytest
from support.run_records import run_case

from hil.controller.storage.runs import RunStore, make_safe_name, store_tensors
from hil.core.results import Outcome
from hil.core.text import convert_to_json
from hil.errors import StorageError, UsageError


def finished(store: RunStore, title: str, created: float):
    run = store.create(title, {})
    ended = {"outcome": Outcome.PASS, "exit_code": 0, "finished": True}
    run.record = run.record.replace(created=created, cases=[run_case(name=title)], **ended)
    run.save()
    return run


def test_store_opens_run_by_id_prefix_latest_or_directory(tmp_path):
    store = RunStore(tmp_path)
    run = store.create("model", {"seed": 1})
    for name in (run.id, run.id[:20], "latest", str(run.folder)):
        assert store.open(name).record.request == {"seed": 1}
    with pytest.raises(UsageError, match="not found in"):
        store.open("nonesuch")


def test_resume_command_includes_custom_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunStore().create("model", {})
    assert run.resume_command == f"hil run --resume {run.id}"
    run = RunStore(tmp_path / "my runs").create("model", {})
    assert run.resume_command == f"hil run --resume {run.id} --out '{tmp_path}/my runs'"


def test_store_rejects_ambiguous_prefix(tmp_path):
    store = RunStore(tmp_path)
    store.create("a", {})
    store.create("b", {})
    with pytest.raises(UsageError, match="ambiguous run"):
        store.open("2")


DAMAGED = [
    *("", "{", "[]", '{"schema": 99}', "null", "[" * 100_000, '{"schema": 1}'),
    '{"schema": 1, "created": 1, "board": {}, "cases": [7], "outcome": "PASS", "exit_code": 0, "finished": true}',
    '{"schema": 1, "created": 1, "board": {}, "cases": [], "outcome": "PASS", "exit_code": {}, "finished": true}',
    '{"schema": 1, "created": 1, "board": 3, "cases": [], "outcome": "PASS", "exit_code": 0, "finished": true}',
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_store_rejects_damaged_record_and_lists_valid_runs(tmp_path, text):
    store = RunStore(tmp_path)
    good, bad = finished(store, "good", 1.0), finished(store, "bad", 2.0)
    (bad.folder / "run.json").write_text(text)
    with pytest.raises(UsageError):
        store.open(bad.id)
    assert [row.id for row in store.list_summaries()] == [good.id]


def test_store_index_follows_files(tmp_path):
    store = RunStore(tmp_path)
    first, second = finished(store, "first", 1.0), finished(store, "second", 2.0)
    assert [row.models for row in store.list_summaries()] == ["first", "second"]
    second.record.outcome = Outcome.FAIL
    second.save()
    assert store.list_summaries()[1].outcome == "FAIL"
    (first.folder / "run.json").unlink()
    assert [row.id for row in store.list_summaries()] == [second.id]
    (tmp_path / "index-3.sqlite").write_bytes(b"damaged")
    assert [row.id for row in store.list_summaries()] == [second.id]


def test_gc_spares_newest_and_unfinished_runs(tmp_path):
    store = RunStore(tmp_path)
    runs = [finished(store, f"run{number}", float(number)) for number in range(4)]
    runs[0].record.finished = False
    runs[0].save()
    old = store.list_old(keep=1)
    assert old == [runs[1].id, runs[2].id]
    store.delete(old)
    assert [row.id for row in store.list_summaries()] == [runs[0].id, runs[3].id]


def test_run_restores_saved_tensors(tmp_path):
    run = RunStore(tmp_path).create("m", {})
    tensors = {"x/y": np.arange(3, dtype=np.float32), "": np.array(["a", "b"], dtype=object)}
    entries = store_tensors(run.folder, "m", "outputs", tensors)
    back = run.load_tensors(entries)
    assert list(back) == list(tensors)
    for name, array in tensors.items():
        assert (back[name] == array).all()
    assert all((run.folder / entry.file).resolve().is_relative_to(run.folder.resolve()) for entry in entries)


def test_store_reports_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"):
        RunStore(tmp_path / "file").create("m", {})


def test_jsonable_replaces_nan():
    text = json.dumps(convert_to_json({"a": math.nan, "b": [math.inf, np.float32(1.5)], "c": b"x"}), allow_nan=False)
    assert json.loads(text) == {"a": "nan", "b": ["inf", 1.5], "c": "b'x'"}


@pytest.mark.parametrize("text", ["../x", "/etc/passwd", "a b", "", "..", "x" * 500, "\0"])
def test_safe_name_stays_in_directory(tmp_path, text):
    path = tmp_path / make_safe_name(text)
    assert path.parent == tmp_path
    path.write_text("")
