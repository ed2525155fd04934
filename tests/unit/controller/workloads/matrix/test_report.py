"""Matrix reports of stored runs in every format: a row per case, a column per target, differences marked."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from support.generations import stored_generation
from support.run_records import run_record
from support.schemas import check_document
from support.suite_runs import case, comparison, suite_run

from hil.compare.verdict import compare
from hil.controller.models.flows.flow import Flow
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.record import record_case
from hil.controller.pipeline.settings.options import Options
from hil.controller.records.matrix import TargetError
from hil.controller.records.run import make_run
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.runs import Run
from hil.controller.workloads.matrix import files
from hil.controller.workloads.matrix.job import Matrix
from hil.controller.workloads.matrix.report import (
    MatrixReport,
    TargetResults,
    combine_runs,
    convert_run,
    load_matrix,
    make_empty_results,
)
from hil.controller.workloads.matrix.targets import MatrixTarget, combine_targets
from hil.controller.workloads.suites.cases.spec import CaseSpec
from hil.controller.workloads.suites.outcome import record_of
from hil.controller.workloads.suites.reports.results import load_run
from hil.controller.workloads.suites.request import SuiteRequest
from hil.controller.workloads.suites.store import SuiteDirectory
from hil.controller.workloads.suites.tasks import Task
from hil.core.digest import digest_of
from hil.core.results import Artifact, Outcome, RunResult, Timings
from hil.errors import BoardUnreachable, UsageError

UNREACHED = TargetError(outcome="BOARD_UNREACHABLE", message="no answer from it", hint="", exit_code=4)


def report_of(place: Path, **targets: list[CaseRecord]) -> MatrixReport:
    """A matrix of stored runs, a folder each."""
    found = [TargetResults(name, load_run(suite_run(place / name, cases))) for name, cases in targets.items()]
    return MatrixReport("nets", found)


def printed(report: MatrixReport) -> str:
    console = Console(file=io.StringIO(), width=100)
    files.print_matrix(console, report)
    return console.file.getvalue()


def test_matrix_row_differs_if_outcomes_differ(tmp_path: Path):
    report = report_of(tmp_path, sim=[case("a"), case("b")], rpi=[case("a"), case("b", "FAIL")])
    assert [(row.id, row.differs, [cell.word for cell in row.cells]) for row in report.rows] == [
        ("a", False, ["PASS", "PASS"]),
        ("b", True, ["PASS", "FAIL"]),
    ]
    assert report.exit_code == 1


def test_matrix_row_differs_for_absent_or_unrun_case(tmp_path: Path):
    report = report_of(tmp_path, sim=[case("a"), case("b")], rpi=[case("a")])
    assert [cell.word for cell in report.rows[1].cells] == ["PASS", "absent"] and report.rows[1].differs
    whole, cut = (load_run(suite_run(tmp_path / name, [case("a")], missing=("b",))) for name in ("whole", "cut"))
    assert cut.missing == ("b",)
    report = MatrixReport("nets", [TargetResults("x", whole), TargetResults("y", cut)])
    assert [[cell.word for cell in row.cells] for row in report.rows] == [["PASS"] * 2, ["not run"] * 2]


def test_unreachable_target_gets_column_and_sets_exit_code(tmp_path: Path):
    passed = TargetResults("sim", load_run(suite_run(tmp_path / "sim", [case("a")])))
    report = MatrixReport("nets", [passed, TargetResults("rpi", make_empty_results(tmp_path / "rpi"), UNREACHED)])
    assert report.exit_code == 4
    assert [cell.word for cell in report.rows[0].cells] == ["PASS", "BOARD_UNREACHABLE"]
    assert report.notes == ["rpi: no answer from it"]
    suite = ElementTree.fromstring(files.format_matrix_junit(report, tmp_path)).findall("testsuite")[1]
    assert suite.get("errors") == "1" and suite.find("testcase/error").get("type") == "BOARD_UNREACHABLE"


def test_skipped_target_does_not_change_exit_code(tmp_path: Path):
    report = report_of(tmp_path, sim=[case("a")], rpi=[case("a", "SKIP")])
    assert [target.exit_code for target in report.targets] == [0, 5] and report.exit_code == 0
    assert report_of(tmp_path / "none", sim=[case("a", "SKIP")], rpi=[case("a", "SKIP")]).exit_code == 5


def test_unknown_outcome_counts_as_failure(tmp_path: Path):
    report = report_of(tmp_path, sim=[case("a"), case("b", "MELTED")])
    assert report.exit_code == 3 and report.rows[1].fails


def test_stored_model_run_matches_suite_record(tmp_path: Path):
    mine, theirs, third = (
        RunResult(name, {"y": np.float32([value])}) for name, value in [("a", 1), ("b", 1), ("c", 9)]
    )
    ended = Case(
        *("net", tmp_path / "net.onnx", Options(), tmp_path),
        artifact=Artifact(
            "iree", "net", {}, {"net": digest_of(b"")}, "main", "iree 3", cached=True, notes={"text": "it"}
        ),
        timings=Timings(compile_s=0.5),
        result=replace(mine, provenance={"elsewhere": "1 of 2 nodes", "placement": [{"device": "cpu"}]}),
        verdicts=(compare(mine, theirs), compare(mine, third)),
        disagreement="b and c disagree on y",
        outcome=Outcome.PASS,
    )
    stored = run_record(record_case(ended, {}), board={"name": "sim", "hw_type": "", "info": {}})
    (record,) = convert_run(Run(tmp_path, make_run(json.loads(json.dumps(stored.to_json()))))).records
    spec, task = CaseSpec("net", "net", lambda folder: pytest.fail("it has ended")), Task(ended, board="sim")
    suites = record_of(spec, task, "", Flow("", "iree"), SuiteRequest(""), SuiteDirectory(tmp_path / "suite"))
    assert suites.replace(program="", repeat="", folder="net", started=0.0) == record
    assert (record.disagreement, len(record.other_references)) == ("b and c disagree on y", 1)
    assert (record.cached, record.elsewhere, record.notes) == (True, "1 of 2 nodes", {"text": "it"})
    disputed = MatrixReport("nets", [TargetResults("sim", replace(make_empty_results(tmp_path), records=(record,)))])
    assert "the references disagree: b and c disagree on y" in files.format_matrix_junit(disputed, tmp_path)


def test_matrix_csv_has_row_per_case_and_column_per_target(tmp_path: Path):
    failed = case("b", "FAIL", outputs=(comparison(passed=False, sqnr_db=7.1),), device_p50_ns=1_500_000.0)
    report = report_of(tmp_path, sim=[case("b")], rpi=[failed])
    (row,) = csv.DictReader(io.StringIO(files.format_matrix_csv(report)))
    assert (row["id"], row["differs"], row["sim"], row["rpi"]) == ("b", "yes", "PASS", "FAIL")
    assert (row["rpi sqnr_db"], row["rpi device_p50_ms"], row["rpi max_abs"]) == ("7.1", "1.5", "0.37")
    assert row["rpi message"].startswith("y: 41 of 1024") and row["sim message"] == ""


def test_matrix_csv_has_generation_columns_only_with_prompts(tmp_path: Path):
    report = report_of(tmp_path / "both", sim=[case("b")], rpi=[case("b", generation=stored_generation().to_json())])
    (row,) = csv.DictReader(io.StringIO(files.format_matrix_csv(report)))
    assert (row["rpi worst_kl"], row["rpi ttft_ms"], row["sim worst_kl"]) == ("1e-09", "2.0", "")
    plain = files.format_matrix_csv(report_of(tmp_path / "plain", sim=[case("b")]))
    assert "worst_kl" not in plain


def test_matrix_document_matches_schema(tmp_path: Path):
    report = report_of(tmp_path, sim=[case("a"), case("b")], rpi=[case("a", "FAIL")])
    report = MatrixReport(
        "nets", [*report.targets, TargetResults("off", make_empty_results(tmp_path / "off"), UNREACHED)]
    )
    document = json.loads(json.dumps({"schema": 1, **report.to_document(None).to_json()}))
    check_document(document, "matrix")
    assert document["rows"][0]["cells"]["rpi"]["outcome"] == "FAIL" and document["differing"] == 2


HOSTILE = "=1+1<script>alert(1)</script>|`*"


def test_matrix_formats_escape_hostile_text(tmp_path: Path):
    bad = case("b", "FAIL", model=HOSTILE, message=HOSTILE, hint=HOSTILE, repeat=HOSTILE)
    good = suite_run(tmp_path / "good", [case("b", model=HOSTILE)])
    targets = [TargetResults(HOSTILE, load_run(good)), TargetResults("x", load_run(suite_run(tmp_path / "x", [bad])))]
    report = MatrixReport(HOSTILE, targets)
    header, row = csv.reader(io.StringIO(files.format_matrix_csv(report)))
    assert (
        not any(text.startswith("=") for text in (*header, *row)) and f"'{HOSTILE}" in header and f"'{HOSTILE}" in row
    )
    page = files.format_matrix_html(report, tmp_path)
    tags: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            tags.append(tag)

    Tags().feed(page)
    assert "script" not in tags and "script-src" not in page and "default-src 'none'" in page
    assert "<script" not in files.format_matrix_markdown(report).replace("\\<script", "")
    assert ElementTree.fromstring(files.format_matrix_junit(report, tmp_path)).find(".//script") is None


def test_matrix_junit_separates_targets_and_names_differences(tmp_path: Path):
    report = report_of(tmp_path, sim=[case("a"), case("b")], rpi=[case("a"), case("b", "FAIL")])
    root = ElementTree.fromstring(files.format_matrix_junit(report, tmp_path))
    assert [suite.get("name") for suite in root] == ["nets sim", "nets rpi"]
    assert (root.get("tests"), root.get("failures")) == ("4", "1")
    assert len({(one.get("classname"), one.get("name")) for one in root.iter("testcase")}) == 4
    told = [
        one.get("name")
        for one in root.iter("testcase")
        if "differs: sim PASS, rpi FAIL" in str(one.findtext("system-out"))
    ]
    assert told == ["b", "b"]


def test_matrix_text_shows_differences_first(tmp_path: Path):
    report = report_of(tmp_path, sim=[case("a"), case("b")], rpi=[case("a"), case("b", "FAIL")])
    text = printed(report)
    assert "2 cases on 2 targets, 1 differs" in text and text.index("*  b") < text.index(" a ")
    assert "FAIL  b  rpi" in text and "41 of 1024" in text
    markdown = files.format_matrix_markdown(report)
    assert markdown.index("**`b`** differs") < markdown.index("`a`")


def test_matrix_page_links_target_reports(tmp_path: Path):
    report = report_of(tmp_path, sim=[case("a")], rpi=[case("a")])
    (tmp_path / "sim" / "report.html").touch()
    page = files.format_matrix_html(report, tmp_path / "elsewhere")
    assert 'href="../sim/report.html"' in page and "rpi/report.html" not in page


def test_stored_runs_are_named_by_differences(tmp_path: Path):
    one, two = (suite_run(tmp_path / name, [case("a")]) for name in ("monday", "tuesday"))
    assert [target.name for target in combine_runs([one, two]).targets] == ["monday", "tuesday"]
    head = json.loads((two / "suite.json").read_text())
    (two / "suite.json").write_text(json.dumps({**head, "flow": "onnxruntime"}))
    assert [target.name for target in combine_runs([one, two]).targets] == ["iree", "onnxruntime"]
    with pytest.raises(UsageError, match="duplicate run "):
        combine_runs([one, one])


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"schema": 99}', '{"schema": 1, "title": "x", "targets": [{"name": "../../etc"}]}'],
)
def test_load_matrix_rejects_invalid_file(tmp_path: Path, text: str):
    (tmp_path / "matrix.json").write_text(text)
    with pytest.raises(UsageError):
        load_matrix(tmp_path)


def test_matrix_report_includes_earlier_error_during_run(tmp_path: Path):
    def run(target: MatrixTarget, folder: Path) -> None:
        if target.name == "a":
            raise BoardUnreachable("no answer")
        told.append((tmp_path / "two" / "matrix.md").read_text())
        suite_run(folder, [case("net")])

    told: list[str] = []
    targets = combine_targets({"board": ("a", "b")})
    report = Matrix.create(tmp_path / "two", "suite", "nets", {}, targets, "").run(run, say=lambda text: None)
    assert "a: no answer" in told[0]
    head = json.loads((tmp_path / "two" / "matrix.json").read_text())
    assert (report.exit_code, head["exit_code"], head["outcome"], head["finished"]) == (4, 4, "PASS", True)
    assert head["cases"] == [{"name": "net", "outcome": "BOARD_UNREACHABLE/PASS"}]
