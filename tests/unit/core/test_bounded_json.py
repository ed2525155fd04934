"""Untrusted JSON is parsed within limits in every store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.run_records import run_record

from hil.controller.analysis.bench.store import read_bench
from hil.controller.analysis.profile.store import read_profile
from hil.controller.storage.runs import Run, RunStore
from hil.controller.storage.tensor_files import load_tensors
from hil.controller.workloads.matrix.report import load_matrix
from hil.controller.workloads.suites.store import SuiteRun
from hil.core import bounded_json
from hil.core.bounded_json import parse_json, read_json
from hil.errors import UsageError

DEEP = b"[" * 100_000
READERS: dict[str, Callable[[Path], Any]] = {
    "run.json": lambda folder: RunStore(folder.parent).open(folder.name),
    "suite.json": SuiteRun.open,
    "matrix.json": load_matrix,
    "profile.json": read_profile,
    "bench.json": lambda folder: read_bench(Run(folder, run_record(id="one"))),
    "index.json": load_tensors,
}


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", DEEP, b"9" * 5000, b"[" + b"[]," * 2000 + b"[]]"])
def test_parse_json_refuses_by_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(data, 1000)


def test_parse_json_reads_few_values_in_many_bytes() -> None:
    assert parse_json(b'["' + b"x" * 5000 + b'"]', 1000) == ["x" * 5000]


def test_read_json_limits_number_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"[" + b"1," * 2000 + b"1]")
    assert len(read_json(path)) == 2001
    monkeypatch.setattr(bounded_json, "MAX_RECORD_VALUES", 1000)
    with pytest.raises(ValueError, match="more than 1000 values"):
        read_json(path)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("data", "most", "text"),
    [(DEEP, 1_000_000, "nesting exceeds the limit"), (b"[" + b"[]," * 2000 + b"[]]", 1000, "more than 1000")],
)
def test_stored_records_beyond_limits_raise_usage_error(
    name: str, data: bytes, most: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_json, "MAX_RECORD_VALUES", most)
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / name).write_bytes(data)
    with pytest.raises(UsageError) as caught:
        READERS[name](folder)
    # The error for bench.json gives the reason only as its cause.
    assert text in str(caught.value.__cause__ if name == "bench.json" else caught.value)
