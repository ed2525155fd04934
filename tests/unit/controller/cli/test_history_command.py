"""`hil history`: commands and documents."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.histories import history_entry
from support.run_records import run_case, run_record
from support.schemas import check_document

from hil.controller.cli.automatic_history import add_to_history
from hil.controller.cli.main import cli
from hil.controller.cli.stored.history import import_files
from hil.controller.storage.history.place import HistoryPlace
from hil.controller.storage.history.store import HistoryStore
from hil.controller.workloads.history.entry_changes import find_entry_changes
from hil.controller.workloads.history.foreign import FORMATS
from hil.controller.workloads.history.tables import describe_entries, write_csv
from hil.errors import UsageError

DATA = Path(__file__).parents[3] / "data/history"


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run `hil history ARGS` in a directory with a stored run, and return the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HIL_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "hil-runs" / "20261130-000000-m-0000"
    folder.mkdir(parents=True)
    origin = {"labels": [], "branch": "main", "commit": "1a2b3c4d5e"}
    record = run_record(run_case(name="m", path="m.onnx"), id=folder.name, origin=origin)
    (folder / "run.json").write_text(json.dumps(record.to_json()))

    def run(*words: object) -> str:
        arguments = ["history", *map(str, words)]
        done = CliRunner().invoke(cli, arguments, standalone_mode=False, prog_name="hil", catch_exceptions=False)
        return done.stdout

    return run


def test_commands_print_valid_documents(call):
    commands = {
        "history add": ("add", "latest", "--commit", "abcdef"),
        "history import": ("import", DATA / "google-benchmark.json", "--board", "rpi5"),
        "history ls": ("ls",),
        "history show": ("show", "m"),
        "history annotate": ("annotate", "abcdef", "known"),
    }
    documents = {name: json.loads(call(*words, "--json")) for name, words in commands.items()}
    for name, document in documents.items():
        check_document(document, name)
    assert (documents["history add"]["added"], documents["history import"]["added"]) == (1, 1)
    assert [one["key"]["board"] for one in documents["history ls"]["series"]] == ["rpi5", "sim"]
    (entry,) = documents["history show"]["entries"]
    assert entry["source"]["commit"] == "abcdef"


def test_history_option_selects_postgresql_database(call, empty_db, tmp_path):
    assert "added 1 entry" in call("add", "latest", "--history", empty_db)
    found = json.loads(call("ls", "--history", empty_db, "--json"))
    assert found["history"] == f"postgresql:///{empty_db.partition('@/')[2].partition('?')[0]}"
    assert len(found["series"]) == 1
    assert json.loads(call("ls", "--json"))["series"] == []
    with pytest.raises(UsageError, match="invalid history 'mysql://lab/h'"):
        call("ls", "--history", "mysql://anna:secret@lab/h")


def test_history_option_selects_farm_of_this_machine(call, empty_db, tmp_path, monkeypatch):
    monkeypatch.setenv("HIL_FARM_HOME", str(tmp_path / "farm"))
    monkeypatch.setenv("HIL_FARM_DB", empty_db)
    with pytest.raises(UsageError, match="has no history"):
        call("ls", "--history", "farm")
    (tmp_path / "farm").mkdir()
    (tmp_path / "farm" / "farm.toml").write_text("[history]\nauto = true\n")
    call("add", "latest", "--history", "farm")
    with HistoryStore.open(HistoryPlace(tmp_path / "farm" / "history", empty_db)) as store:
        assert [one.case for one in store.entries()] == ["m"]


def test_show_prints_entries_with_notes(call):
    call("add", "latest")
    assert call("add", "latest") == "added 0 entries, 1 present, 0 programs\n"
    assert call("annotate", "1a2b", "known: slow") == "annotated 1 entry\n"
    shown = call("show", "m")
    assert "1a2b3c4d5 " in shown
    assert "20261130-000000-m-0000 m: note: known: slow" in shown
    assert "m.onnx" in call("ls")


def test_tables_show_grades_and_instructions_of_entries():
    grade = {"grade": "B", "reasons": ["noisy"]}
    entries = [history_entry("r1", grade=grade), history_entry("r2")]
    heads, rows = describe_entries(entries, is_evaluation=False)
    assert [row[heads.index("grade")] for row in rows] == ["B", "-"]
    assert "grade" not in describe_entries(entries[1:], is_evaluation=False)[0]
    head, *lines = csv.reader(write_csv(entries).splitlines())
    assert [line[head.index("grade")] for line in lines] == ["B", ""]


def test_export_prints_lines_and_csv(call):
    call("add", "latest")
    (line,) = call("export").splitlines()
    check_document(json.loads(line), "history entry")
    head, row = call("export", "--to", "csv", "m").splitlines()
    assert dict(zip(head.split(","), row.split(","), strict=True))["commit"] == "1a2b3c4d5e"


def test_add_stores_nothing_for_unknown_run(call, tmp_path):
    with pytest.raises(UsageError, match="session 'other' not found"):
        call("add", "latest", "other")
    assert not (tmp_path / "hil-runs/history").exists()


def test_annotate_rejects_empty_note(call):
    with pytest.raises(UsageError, match="the note is empty"):
        call("annotate", "1a2b", " ")


def test_results_are_added_if_the_project_asks(call, tmp_path, capsys):
    run = tmp_path / "hil-runs" / "20261130-000000-m-0000"
    add_to_history(run)
    (tmp_path / "hil.toml").write_text("[history]\n")
    add_to_history(run)
    assert not (tmp_path / "hil-runs/history").exists()
    (tmp_path / "hil.toml").write_text('[history]\nauto = true\npath = "kept"\n')
    add_to_history(run)
    assert "added to the history" in capsys.readouterr().err
    with HistoryStore.open(tmp_path / "kept") as store:
        assert len(list(store.entries())) == 1
    add_to_history(tmp_path)
    assert "not added to the history" in capsys.readouterr().err
    add_to_history(None)


def test_import_offers_all_formats():
    (option,) = [one for one in import_files.params if one.name == "kind"]
    assert tuple(option.type.choices) == tuple(FORMATS)


def test_table_shows_changed_and_unknown_stacks():
    stacks = [None, {"driver": "1.0", "usb": ""}, {"driver": "1.0"}, {"driver": "2.0"}]
    entries = [history_entry(f"r{number}", board={"name": "b", "parts": one}) for number, one in enumerate(stacks)]
    heads, rows = describe_entries(entries, is_evaluation=False)
    assert [row[heads.index("stack")] for row in rows] == ["unknown", "-", "-", "driver 1.0 -> 2.0"]
    assert "stack" not in describe_entries(entries[:1], is_evaluation=False)[0]
    assert "stack" not in describe_entries(entries[1:3], is_evaluation=False)[0]


def test_entries_without_stack_are_not_compared():
    known, unknown = ({"name": "b", "parts": one} for one in ({"driver": "1.0"}, None))
    entries = [history_entry("r0", board=unknown), history_entry("r1", board=known)]
    assert find_entry_changes(entries).judged == [1]
    assert find_entry_changes(entries[:1]).judged == [0]
