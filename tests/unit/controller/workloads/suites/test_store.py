"""A suite directory keeps finished records after any interruption."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from support.suite_runs import suite_head

from hil.controller.records.suite import CaseRecord, make_case_record
from hil.controller.workloads.suites.store import HEAD, LINES, SuiteRun
from hil.errors import UsageError


def record(name: str, **more) -> CaseRecord:
    known = {"model": "m", "suite": "s", "flow": "iree", "runtime": "iree", "outcome": "PASS", "ended": "PASS"}
    return make_case_record({"id": name, **known, **more})


@pytest.fixture
def run(tmp_path) -> SuiteRun:
    return SuiteRun.create(tmp_path / "run", suite_head(ids=["a", "b", "c"]))


def test_records_round_trip_in_suite_order(run):
    records = [
        record(
            "c",
            outputs=[{"name": "y", "passed": True, "sqnr_db": float("inf"), "max_abs": 0.0}],
            timings={"run_s": 0.5},
        ),
        record("a", attempts=[{"why": "confirm", "board": "x", "outcome": "FAIL", "message": "m"}]),
    ]
    for one in records:
        run.append(one)
    again = SuiteRun.open(run.folder).read_records()
    assert [one.id for one in again] == ["a", "c"]
    assert again[0] == records[1]
    (output,) = again[1].outputs
    assert (output.name, output.sqnr_db, output.max_abs) == ("y", "inf", 0.0)


def test_record_of_earlier_version_is_read():
    new = record("a", directories={"ir": "../ir/a"})
    stored = new.to_json() | {"left": new.directories}
    del stored["directories"]
    assert make_case_record(stored) == new


def test_store_ignores_partial_line(run):
    run.append(record("a"))
    with (run.folder / LINES).open("ab") as file:
        file.write(b'{"id": "b", "mod')
    assert [one.id for one in run.read_records()] == ["a"]
    with run.lock_for_writing():
        run.append(record("c"))
    assert [one.id for one in run.read_records()] == ["a", "c"]
    assert all(json.loads(line) for line in (run.folder / LINES).read_text().splitlines())


def test_drop_stale_removes_changed_records_only(run):
    for name in "abc":
        run.append(record(name, content=f"of {name}"))
    before = (run.folder / LINES).read_bytes()
    assert run.drop_stale({name: f"of {name}" for name in "abcd"}) == []
    assert (run.folder / LINES).read_bytes() == before
    assert run.drop_stale({"a": "of a", "b": "of another"}) == ["b", "c"]
    assert (run.folder / LINES).read_bytes() == before.splitlines(keepends=True)[0]
    assert [path.name for path in run.folder.iterdir() if LINES in path.name] == [LINES]


def test_store_allows_single_writer(run):
    used = "is in use by a different hil process"
    with run.lock_for_writing(), pytest.raises(UsageError, match=used), SuiteRun.open(run.folder).lock_for_writing():
        pass
    with run.lock_for_writing():
        pass


def test_create_rejects_directory_with_run(run):
    with pytest.raises(UsageError, match="already contains a suite run"):
        SuiteRun.create(run.folder, suite_head())


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"schema": 99}', '{"no": 1}'])
def test_open_rejects_directory_without_run(tmp_path, text):
    if text is not None:
        (tmp_path / HEAD).write_text(text)
    with pytest.raises(UsageError, match=r"not a suite run|cannot read|newer hil"):
        SuiteRun.open(tmp_path)


def test_tensors_are_stored_in_case_directory(run):
    files = run.save_tensors("a", "outputs", {"y/0": np.arange(3)})
    assert files[0] == run.get_case_folder("a") / "outputs" / "0-y_0.npy"
    assert (np.load(files[0]) == np.arange(3)).all()


def test_full_disk_raises_error_without_partial_record(run, tmp_path):
    # A file size limit simulates a full disk: the first write beyond it is short.
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from hil.controller.records.suite import CaseRecord\n"
        "from hil.controller.workloads.suites.store import SuiteRun\n"
        "from hil.errors import StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "run = SuiteRun.open(Path(sys.argv[1]))\n"
        "try:\n"
        "    names = dict.fromkeys(('model', 'suite', 'flow', 'runtime', 'outcome', 'ended'), 'x' * 800)\n"
        "    run.append(CaseRecord(id='a', **names))\n"
        "except StorageError:\n"
        "    print('said')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, run.folder], capture_output=True, text=True, check=False)
    assert ended.stdout == "said\n", ended.stderr
    assert run.read_records() == []
    with run.lock_for_writing():
        run.append(record("b"))
    assert [one.id for one in run.read_records()] == ["b"]
