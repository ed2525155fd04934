"""Test the validation of fetched results before hil writes reports."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.suite_runs import suite_head

from hil.controller.cli.farm import result as commands
from hil.controller.farm.client.results import EndedJob, fetch_run, fetch_suite
from hil.controller.records.lab.farm import JobResultRow
from hil.controller.workloads.suites.request import SuiteRequest
from hil.errors import FarmError

TYPED = {"source": "s", "flow": "f", "filters": [], "suite": "s", "flow_name": "f", "runtime": "", "expected": None}


def row(kind: str = "suite", case: dict[str, Any] | None = None, **record: Any) -> dict[str, Any]:
    """Return a job's row as sent by a gateway, with one case."""
    whole = {"id": "a", "model": "m", "suite": "s", "flow": "f", "runtime": "iree", "outcome": "FAIL", "ended": "FAIL"}
    options = {**SuiteRequest("s", "f").to_json(), "typed": TYPED, "cases": [["a", "m", "", ""]]}
    head = suite_head().to_json() | {"folder": "/tmp/r", "cases": [{**whole, **(case or {})}], **record}
    result = {"exit_code": 0, "outcome": "PASS", "record": head}
    return {"name": "17.2", "state": "done", "spec": {"kind": kind, "options": options}, **result}


def make_ended(row: dict[str, Any]) -> EndedJob:
    return EndedJob.from_row(msgspec.convert(row, JobResultRow))


def fetch(row: dict[str, Any], folder: Path) -> Any:
    """Return the record of the case after the merge."""
    return fetch_suite(SimpleNamespace(), [make_ended(row)], folder).read_records()[0]  # type: ignore[arg-type]


def nest(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("was", "diff", "replaced"),
    [
        ("/tmp/r", "hil compare /tmp/r/a.npy '/tmp/r/b c.npy'", "hil compare {0}/a.npy '{0}/b c.npy'"),
        ("/tmp/r", "hil compare /tmp/rest/a.npy /x/tmp/r/b", "hil compare /tmp/rest/a.npy /x/tmp/r/b"),
        ("/tmp/r", "/tmp/r " * 10, "{0} {0} {0} {0} " + "/tmp/r " * 6),
        ("/", "/a /b", "/a /b"),
        ("/a", "/a /a", "/a /a"),
        ("a/b", "a/b", "a/b"),
        ("", "/a", "/a"),
    ],
)
def test_merge_replaces_folder_only_in_paths(tmp_path: Path, was: str, diff: str, replaced: str) -> None:
    out = tmp_path / "out"
    assert fetch(row(case={"diff": diff}, folder=was), out).diff == replaced.format(out)


BAD_CASES: list[dict[str, Any]] = [
    {"diff": "/" * 100_000},
    {"unanswered": [{"reason": "x"}]},
    {"other_references": [{"outputs": []}]},
    {"outputs": [{"tolerance": 1}]},
    {"outputs": [{"max_abs": 10**400}]},
    {"placement": [{"names": "nan", "nodes": -1e308}]},
    {"device_p90_ns": 10**400},
    {"timings": {"run_s": float("nan")}},
    {"notes": {"delegation": nest(900)}},
    {"folder": "../../.."},
    {"started": 1e308},
]


@pytest.mark.parametrize("case", BAD_CASES)
def test_bad_case_is_farm_error_with_job_name(tmp_path: Path, case: dict[str, Any]) -> None:
    with pytest.raises(FarmError, match=r"result of job 17\.2 "):
        fetch(row(case=case), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "record", [{"started": 1e308}, {"finished": "x"}, {"boards": [1]}, {"versions": []}, {"models": {"m": None}}]
)
def test_bad_suite_is_farm_error_with_job_name(tmp_path: Path, record: dict[str, Any]) -> None:
    with pytest.raises(FarmError, match=r"result of job 17\.2 "):
        fetch(row(**record), tmp_path / "out")


def test_files_and_versions_of_suite_are_kept(tmp_path: Path) -> None:
    head = {"models": {"m": {"path": "m.onnx", "digest": "blake3:0"}}, "versions": {"hil": "0.1.0"}}
    fetch(row(**head), tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert (stored["models"], stored["versions"]) == (head["models"], head["versions"])


def test_error_of_reports_is_farm_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("generator raised StopIteration")

    monkeypatch.setattr("hil.controller.farm.client.results.write_reports", fail)
    with pytest.raises(FarmError, match=r"result of job 17\.2 .*StopIteration"):
        fetch(row(), tmp_path / "out")


def test_fetch_run_rejects_deep_paths(tmp_path: Path) -> None:
    job = make_ended({**row("run"), "files": {"a/" * 1000 + "x": "blake3:0"}})
    with pytest.raises(FarmError, match="more than 32 parts"):
        fetch_run(SimpleNamespace(), job, tmp_path / "out")  # type: ignore[arg-type]


def test_result_of_bad_run_record_is_farm_error() -> None:
    farm: Any = SimpleNamespace(ask=lambda verb, name, specs: [msgspec.convert(row("run"), JobResultRow)])
    with pytest.raises(FarmError):
        commands._show(farm, "17.2", out=None, as_json=False)
