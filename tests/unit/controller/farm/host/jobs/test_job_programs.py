from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.histories import program_source
from support.run_records import run_case, run_record

from hil.controller.farm.host.jobs.job_programs import copy_programs
from hil.controller.storage.history.programs import ProgramFolder
from hil.controller.workloads.history.case_programs import CaseProgramFinder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(run_record(run_case(name="m"), id="run").to_json()))
    return folder


def test_programs_are_copied_with_records(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = program_source(tmp_path / "cache", b"program")
    monkeypatch.setattr(CaseProgramFinder, "find", lambda *_: source)
    monkeypatch.setattr("hil.controller.workloads.history.collect.combine_digests", lambda _: source.record.digest)
    notes: list[str] = []
    copy_programs(run, notes.append)
    assert ProgramFolder(run / ".programs").read(source.record.digest) == source.record
    assert notes == []


def test_missing_program_file_is_only_noted(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = program_source(tmp_path / "cache", b"program")
    (tmp_path / "cache" / "main.vmfb").unlink()
    monkeypatch.setattr(CaseProgramFinder, "find", lambda *_: source)
    notes: list[str] = []
    copy_programs(run, notes.append)
    assert len(notes) == 1 and "program file not found" in notes[0]
