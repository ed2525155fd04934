"""Read and write profile directories."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.made_profiles import profile, row, run_on

from hil.controller.analysis.profile.rows import write_csv
from hil.controller.analysis.profile.store import HEAD, PARQUET, SCHEMA, TABLE, TRACE, read_profile, write_profile
from hil.core.timeline import Sample
from hil.errors import HilError, StorageError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(run_on(), tmp_path / "out" / "m")
    return tmp_path / "out" / "m"


def test_profile_round_trips(folder):
    read = read_profile(folder)
    assert replace(read, rows=list(read.rows), console=tuple(read.console)) == run_on()
    assert gzip.decompress((folder / TRACE).read_bytes())


def test_profile_preserves_notes_and_odd_values(tmp_path):
    odd = profile(counters=[Sample(3, "load", float("inf"), "é"), Sample(4, "load", 0.1, "é")], notes=("no 'tool'",))
    write_profile(odd, tmp_path)
    read = read_profile(tmp_path)
    assert (read.counters, read.notes, list(read.rows)) == (odd.counters, odd.notes, [])


def test_profile_rows_support_slices(folder):
    rows, all_of_them = read_profile(folder).rows, list(run_on().rows)
    assert (len(rows), rows[0], rows[-1]) == (len(all_of_them), all_of_them[0], all_of_them[-1])
    assert (rows[2:9:3], rows[::-1], rows[-2:]) == (all_of_them[2:9:3], all_of_them[::-1], all_of_them[-2:])
    with pytest.raises(IndexError):
        rows[len(all_of_them)]


def test_write_replaces_previous_profile(folder):
    write_profile(profile([row("a", 1, 2)]), folder)
    assert [one.op for one in read_profile(folder).rows] == ["a"]


def test_write_preserves_rows_if_trace_fails(folder):
    early = profile([row("a", -5, 2)])
    with pytest.raises(HilError, match="cannot write a trace"):
        write_profile(early, folder)
    assert list(read_profile(folder).rows) == early.rows
    assert not {TRACE, PARQUET} & {file.name for file in folder.iterdir()}, "of the profile that was there before"


def test_write_reports_unwritable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"):
        write_profile(run_on(), tmp_path / "file" / "out")


def test_read_rejects_missing_or_empty_directory(tmp_path):
    with pytest.raises(UsageError, match=r"directory .*nowhere not found"):
        read_profile(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no profile in"):
        read_profile(tmp_path)


def test_read_rejects_truncated_profile(folder):
    whole = (folder / HEAD).read_bytes()
    for size in range(0, len(whole) - 1, 7):
        (folder / HEAD).write_bytes(whole[:size])
        with pytest.raises(UsageError, match="is damaged"):
            read_profile(folder)


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"schema": "one"}', '{"schema": 1, "rows": null}'])
def test_read_rejects_other_json(folder, text):
    (folder / HEAD).write_text(text)
    with pytest.raises(UsageError, match="or not a profile"):
        read_profile(folder)


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("clock", {"drift": "fast"}),
        ("stages", [{"name": "compile", "start_ns": "1", "end_ns": 2, "args": {}}]),
        ("counters", [{"at_ns": 1.5, "name": "load", "value": 1, "unit": "%"}]),
        ("model", None),
    ],
)
def test_read_rejects_wrong_types(folder, part, values):
    head = json.loads((folder / HEAD).read_text())
    head[part] = {**head[part], **values} if part == "clock" else values
    (folder / HEAD).write_text(json.dumps(head))
    with pytest.raises(UsageError, match=r"or not a profile: invalid record: Expected `(int|float|str)"):
        read_profile(folder)


def test_read_rejects_newer_schema(folder):
    head = json.loads((folder / HEAD).read_text())
    (folder / HEAD).write_text(json.dumps({**head, "schema": SCHEMA + 1}))
    with pytest.raises(UsageError, match="newer hil"):
        read_profile(folder)


def test_read_rejects_table_of_wrong_length(folder):
    rows = list(run_on().rows)
    read = read_profile(folder)
    write_csv(rows[:-1], folder / TABLE)
    with pytest.raises(UsageError, match=f"has {len(rows) - 1} rows"):
        list(read.rows)
    (folder / TABLE).unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        list(read.rows)
