from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from hil.controller.records.outputs import StoredTensor
from hil.controller.storage.runs import RunStore, check_seal, seal
from hil.errors import UsageError

ASKED = {"models": ["a.onnx"], "compile_flags": [], "rtol": 1e-3}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "hil"


def refused(folder: Path, request: dict) -> bool:
    with pytest.raises(UsageError, match="was not started by this user"):
        check_seal(folder, request)
    return True


def test_seal_accepts_unchanged_run_of_same_user(home, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    assert refused(folder, ASKED)
    seal(folder, ASKED)
    check_seal(folder, json.loads(json.dumps(ASKED)))
    assert (home / "begun.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.iterdir()] == ["begun.key"]
    assert refused(folder, {**ASKED, "compile_flags": ["-o"]})
    shutil.copytree(folder, tmp_path / "copy")
    assert refused(tmp_path / "copy", ASKED)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another user's"))
    assert refused(folder, ASKED)


def test_check_seal_rejects_malformed_seal(home, tmp_path):
    seal(tmp_path, ASKED)
    for text in (b"", b"\xff\xfe", b"0" * 64, b"a" * (1 << 20)):
        (tmp_path / ".begun").write_bytes(text)
        assert refused(tmp_path, ASKED)


def test_store_creates_run_without_user_directory(tmp_path, monkeypatch):
    monkeypatch.setattr("hil.controller.storage.runs.get_user_folder", lambda: None)
    run = RunStore(tmp_path / "runs").create("a", {"a": 1})
    assert refused(run.folder, {"a": 1})
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("hil.controller.storage.runs.get_user_folder", lambda: blocked / "hil")
    RunStore(tmp_path / "runs").create("b", {})


INDEXES = {
    "a view that lists what it likes": """
        create view runs as select '../victim' as id, 0.0 as created, '' as models, '' as board, 'PASS' as outcome,
        0 as exit_code, 1 as finished, 0 as stamp;
        create trigger d instead of delete on runs begin select 1; end;
        create trigger i instead of insert on runs begin select 1; end;""",
    "a table whose columns are computed": """
        create table runs (a, b, c, d, e, f, g, h, id text generated always as ('../victim'), created real generated
        always as (0.0), finished generated always as (1), stamp generated always as (0));
        insert into runs values (1, 2, 3, 4, 5, 6, 7, 8);""",
    "a trigger": "create table t (a); create trigger x after insert on t begin select 1; end;",
}


@pytest.mark.parametrize("made", INDEXES.values(), ids=INDEXES.keys())
def test_store_ignores_foreign_index(made, tmp_path):
    (tmp_path / "victim").mkdir()
    store = RunStore(tmp_path / "runs")
    run = store.create("a", {})
    run.record.finished = True
    run.save()
    with sqlite3.connect(tmp_path / "runs" / "index-3.sqlite") as database:
        database.executescript(made)
    assert [row.id for row in store.list_summaries()] == [run.id]
    assert store.list_old() == [run.id]
    store.delete([run.id])
    assert (tmp_path / "victim").is_dir()


def test_store_replaces_symlinked_index_without_writing_target(tmp_path):
    with sqlite3.connect(tmp_path / "precious.sqlite") as database:
        database.execute("create table mine (a)")
    store = RunStore(tmp_path / "runs")
    store.create("a", {})
    (tmp_path / "runs" / "index-3.sqlite").symlink_to(tmp_path / "precious.sqlite")
    before = (tmp_path / "precious.sqlite").read_bytes()
    assert len(store.list_summaries()) == 1
    assert (tmp_path / "precious.sqlite").read_bytes() == before


def test_gc_ignores_symlinked_run(tmp_path):
    elsewhere = RunStore(tmp_path / "elsewhere").create("a", {})
    elsewhere.record.finished = True
    elsewhere.save()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / elsewhere.id).symlink_to(elsewhere.folder)
    store = RunStore(tmp_path / "runs")
    assert store.list_old() == []
    with pytest.raises(UsageError, match="is a link"):
        store.find_deletable(elsewhere.id)
    assert (elsewhere.folder / "run.json").is_file()


@pytest.mark.parametrize(
    "change",
    [
        {"created": "now"},
        {"created": None},
        {"cases": 3},
        {"cases": [{}]},
        {"board": []},
        {"exit_code": [1]},
        {"cases": [3]},
    ],
)
def test_store_skips_record_with_invalid_fields(change, tmp_path):
    store = RunStore(tmp_path / "runs")
    run = store.create("a", {})
    (run.folder / "run.json").write_text(json.dumps({**run.record.to_json(), **change}))
    assert store.list_summaries() == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret.npy", "link.npy"])
def test_load_tensors_rejects_file_outside_run(name, tmp_path):
    run = RunStore(tmp_path).create("a", {})
    (run.folder / "link.npy").symlink_to("/etc/passwd")
    with pytest.raises(UsageError, match="not a file of the run"):
        run.load_tensors([StoredTensor(name="x", dtype="float32", shape=[], file=name)])
