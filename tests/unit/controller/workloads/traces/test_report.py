"""The report beside a module's artifacts: a trace a row, a backend a column."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from hil.controller.workloads.suites.store import CaseRecord
from hil.controller.workloads.traces.report import RESULTS, write_report


def compared(module: Path, trace: str, reference: str = "tf_ref", **backends: str) -> None:
    """Write the report after a trace was compared: backend -> outcome."""
    records = [
        CaseRecord(f"Net/{trace}", "Net", "traces", name, "iree", outcome, outcome, folder=f"{name}/traces/{trace}")
        for name, outcome in backends.items()
    ]
    place = module / reference / "traces" / trace
    place.mkdir(parents=True, exist_ok=True)
    write_report(module, place, records)


def rows(module: Path) -> list[dict[str, Any]]:
    table = csv.DictReader((module / "matrix.csv").read_text().splitlines())
    return [{key: row[key] for key in ("id", "differs", "iree_vmvx", "tflite") if key in row} for row in table]


def test_each_trace_has_the_backends_that_it_was_last_compared_on(tmp_path: Path) -> None:
    compared(tmp_path, "predict", iree_vmvx="FAIL", tflite="PASS")
    compared(tmp_path, "train", iree_vmvx="PASS")
    assert rows(tmp_path) == [
        {"id": "Net/predict", "differs": "yes", "iree_vmvx": "FAIL", "tflite": "PASS"},
        {"id": "Net/train", "differs": "yes", "iree_vmvx": "PASS", "tflite": "absent"},
    ]
    assert {path.name for path in tmp_path.glob("*.*")} == {"matrix.csv", "matrix.md", "matrix.html", "junit.xml"}
    assert "predict" in (tmp_path / "junit.xml").read_text()
    # Another reference, and one backend less.
    compared(tmp_path, "predict", "iree_ref", iree_vmvx="PASS")
    assert rows(tmp_path) == [
        {"id": "Net/predict", "differs": "no", "iree_vmvx": "PASS"},
        {"id": "Net/train", "differs": "no", "iree_vmvx": "PASS"},
    ]


def test_of_one_backend_there_is_no_report(tmp_path: Path) -> None:
    compared(tmp_path, "predict", tflite="PASS")
    assert not list(tmp_path.glob("*.*"))


@pytest.mark.parametrize("text", ["{", "[]", "null\n", '{"id": 1}'])
def test_results_that_are_damaged_are_left_out(tmp_path: Path, text: str) -> None:
    place = tmp_path / "tf_ref/traces/old"
    place.mkdir(parents=True)
    (place / RESULTS).write_text(text)
    compared(tmp_path, "predict", iree_vmvx="PASS", tflite="PASS")
    assert [row["id"] for row in rows(tmp_path)] == ["Net/predict"]
