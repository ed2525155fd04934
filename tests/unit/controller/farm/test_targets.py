"""Test a report of several submissions, with one column for each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.run_records import run_case, run_record

from hil.controller.farm.client.results import fetch_targets
from hil.controller.farm.messages import JobResult, JobSpec, Kind
from hil.controller.records.base import make_record
from hil.controller.records.lab.farm import JobResultRow
from hil.controller.records.run import RunCase
from hil.controller.workloads.matrix.report import MatrixReport


def case(name: str, path: str, outcome: str) -> RunCase:
    """Return an ended case of run.json."""
    return run_case(name=name, path=path, outcome=outcome)


def job(number: int, kind: Kind, path: str, *cases: RunCase, code: int = 0, **how: Any) -> JobResultRow:
    """Return a job as sent by a gateway."""
    record = run_record(*cases, exit_code=code).to_json() if cases else {}
    spec = JobSpec(kind, {"models": [path]}).to_json()
    result = JobResult(code, how.get("outcome", ""), how.get("reason", ""), record=record).to_json()
    return make_record({"name": f"17.{number}", "state": "done", "spec": spec, **result}, JobResultRow)


def column(*jobs: JobResultRow) -> MatrixReport:
    farm: Any = SimpleNamespace(ask=lambda verb, name, specs: jobs)
    return fetch_targets(farm, {"a53": "17"}, None)[1]


@pytest.mark.parametrize(
    ("kind", "name", "rows"),
    [(Kind.RUN, "net", ["net", "net-2"]), (Kind.BUNDLE, "main-seed0", ["net-main-seed0", "net-2-main-seed0"])],
)
def test_report_separates_equal_case_names_of_jobs(kind: Kind, name: str, rows: list[str]) -> None:
    failed = job(1, kind, "model/net.onnx", case(name, "net.onnx", "FAIL"), code=1)
    passed = job(2, kind, "model/net.onnx", case(name, "net.onnx", "PASS"))
    report = column(failed, passed)
    assert [(row.id, row.cells[0].word) for row in report.rows] == list(zip(rows, ["FAIL", "PASS"], strict=True))
    assert report.exit_code == 1
    assert [record.folder for record in report.targets[0].run.records] == [f"17.1/{name}", f"17.2/{name}"]


def test_report_preserves_names_despite_failed_job() -> None:
    report = column(job(1, Kind.RUN, "model/net.onnx", code=4), job(2, Kind.RUN, "net.onnx", case("net", "n", "PASS")))
    assert [row.id for row in report.rows] == ["net-2"]


def test_report_notes_all_failures_and_worst_exit_code() -> None:
    lost = job(1, Kind.RUN, "a.onnx", code=4, outcome="BOARD_LOST", reason="no answer")
    report = column(lost, job(2, Kind.RUN, "b.onnx", code=2, reason="no such input"))
    assert report.notes == ["a53: job 17.1: no answer; job 17.2: no such input"]
    assert report.exit_code == 4 and report.targets[0].error.outcome == "BOARD_LOST"


def test_report_preserves_case_names_of_single_job() -> None:
    report = column(job(1, Kind.BUNDLE, "net.hilb", case("main-seed0", "net.hilb", "PASS")))
    assert [(row.id, row.model) for row in report.rows] == [("main-seed0", "net")]
