"""Entries of a history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hil.controller.records.base import make_record
from hil.controller.records.measurements.history import HistoryEntry, StoredProgram
from hil.controller.storage.history.programs import ProgramSource, combine_digests
from hil.core.digest import digest_of


def history_entry(run: str = "r1", case: str = "m", key: dict[str, Any] | None = None, **values: Any) -> HistoryEntry:
    """Return an entry of a passing case with changed fields, given as JSON values."""
    commit = {"commit": values.pop("commit", "1a2b3c4d"), "branch": values.pop("branch", "main")}
    known: dict[str, Any] = {
        "key": {"kind": "run", "model": "m.onnx", "case": case, "board": "sim", "runtime": "iree", **(key or {})},
        **{"run": run, "case": case, "created": 1.0, "source": commit, "outcome": "PASS", "p50_ns": 20.0},
        **{"samples_ns": [10.0, 20.5, 30.0], "tools": {}, "board": {"name": "sim"}},
    }
    return make_record({**known, **values}, HistoryEntry)


def program_source(folder: Path, content: bytes, name: str = "main.vmfb") -> ProgramSource:
    """Write a program with one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    files = {name: digest_of(content)}
    size = len(content)
    record = StoredProgram(digest=combine_digests(files), runtime="iree", main=name, files=files, bytes=size)
    return ProgramSource(record, folder)
