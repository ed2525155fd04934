"""The report in a module's artifact directory: a row per trace, a column per backend."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from support.suite_runs import case

from hil.controller.workloads.traces.report import RESULTS, write_report


def compared(module: Path, trace: str, reference: str = "tf_ref", **backends: str) -> None:
    """Write the report after a trace was compared: backend -> outcome."""
    records = [
        case(f"Net/{trace}", outcome, model="Net", suite="traces", flow=name, folder=f"{name}/traces/{trace}")
        for name, outcome in backends.items()
    ]
    place = module / reference / "traces" / trace
    place.mkdir(parents=True, exist_ok=True)
    write_report(module, place, records)


def rows(module: Path) -> list[dict[str, Any]]:
    table = csv.DictReader((module / "matrix.csv").read_text().splitlines())
    return [{key: row[key] for key in ("id", "differs", "iree_vmvx", "tflite") if key in row} for row in table]


def test_report_shows_last_compared_backends(tmp_path: Path) -> None:
    compared(tmp_path, "predict", iree_vmvx="FAIL", tflite="PASS")
    compared(tmp_path, "train", iree_vmvx="PASS")
    assert rows(tmp_path) == [
        {"id": "Net/predict", "differs": "yes", "iree_vmvx": "FAIL", "tflite": "PASS"},
        {"id": "Net/train", "differs": "yes", "iree_vmvx": "PASS", "tflite": "absent"},
    ]
    assert {path.name for path in tmp_path.glob("*.*")} == {"matrix.csv", "matrix.md", "matrix.html", "junit.xml"}
    assert "predict" in (tmp_path / "junit.xml").read_text()
    # Another reference, and one backend fewer.
    compared(tmp_path, "predict", "iree_ref", iree_vmvx="PASS")
    assert rows(tmp_path) == [
        {"id": "Net/predict", "differs": "no", "iree_vmvx": "PASS"},
        {"id": "Net/train", "differs": "no", "iree_vmvx": "PASS"},
    ]


def test_single_backend_skips_report(tmp_path: Path) -> None:
    compared(tmp_path, "predict", tflite="PASS")
    assert not list(tmp_path.glob("*.*"))


@pytest.mark.parametrize("text", ["{", "[]", "null\n", '{"id": 1}'])
def test_report_skips_damaged_results(tmp_path: Path, text: str) -> None:
    place = tmp_path / "tf_ref/traces/old"
    place.mkdir(parents=True)
    (place / RESULTS).write_text(text)
    compared(tmp_path, "predict", iree_vmvx="PASS", tflite="PASS")
    assert [row["id"] for row in rows(tmp_path)] == ["Net/predict"]
