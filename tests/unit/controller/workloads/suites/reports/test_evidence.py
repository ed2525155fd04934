"""Each report contains every fact behind a verdict."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.run_records import run_case
from support.suite_runs import case, comparison, suite_run
from support.web import asking

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.evidence import list_case_evidence
from hil.controller.pipeline.settings.options import Options
from hil.controller.records.suite import CaseRecord
from hil.controller.workloads.suites.reports.junit import format_junit
from hil.controller.workloads.suites.reports.page import report_html
from hil.controller.workloads.suites.reports.results import load_run
from hil.controller.workloads.suites.reports.summary import format_summary_markdown
from hil.controller.workloads.suites.reports.tables import format_cases_csv
from hil.core.repetition import Answer, Repetition
from hil.testing.pytest_plugin import failure_text

CRITERION = {"criterion": "top1>=0.99", "value": 1.0, "bound": 0.99, "passed": True, "reason": ""}
CONTROL = {"arithmetic": "float16", "source": "sim", "factor": 4.0, "rmse": 0.1, "max_abs": 0.2, "jumping": 0}
OTHER = {"against": "tflite 2", "relation": "self-check", "outcome": "FAIL", "outputs": []}
SILENT = {"reference": "iree-llvm-cpu", "outcome": "REFERENCE_ERROR", "reason": "index 9 of 4", "detail": ""}
# Record values -> text in every report.
FACTS: dict[str, tuple[dict[str, Any], str]] = {
    "decider": ({"decided_by": "ort 1 (same library)", "relation": "same library"}, "decided by: ort 1 (same library)"),
    "relation": ({"against": "ort 1", "relation": "self-check"}, "compared with: ort 1 (self-check)"),
    "other reference": ({"other_references": (OTHER,)}, "compared with: tflite 2 (self-check): FAIL"),
    "refusal": ({"unanswered": (SILENT,)}, "failed reference: iree-llvm-cpu: index 9 of 4"),
    "disagreement": ({"disagreement": "a and b on y"}, "the references disagree: a and b on y"),
    "random": ({"random": ("drop",)}, "random: the model draws random numbers (node drop)"),
    "answers": ({"answers": "2 different answers in 9 runs"}, "answers: 2 different answers in 9 runs"),
    "criterion": ({"outputs": (comparison(criteria=[CRITERION]),)}, "criterion: y: top1>=0.99: 1, met"),
    "note": ({"outputs": (comparison(notes=["all zero"]),)}, "note: y: all zero"),
    "arithmetic": (
        {"outputs": (comparison(control=CONTROL),)},
        "arithmetic: y: float16, sim",
    ),
}


def in_csv(folder: Path, record: CaseRecord) -> str:
    return format_cases_csv(load_run(folder))


def in_junit(folder: Path, record: CaseRecord) -> str:
    return html.unescape(format_junit(load_run(folder)))


def in_markdown(folder: Path, record: CaseRecord) -> str:
    return format_summary_markdown(load_run(folder)).replace("\\", "")


def in_html(folder: Path, record: CaseRecord) -> str:
    text = report_html(load_run(folder))
    start = text.index('{"title"')
    data, _ = json.JSONDecoder().raw_decode(text[start:])
    return "\n".join(": ".join(fact) for fact in data["cases"][0]["evidence"])


def in_web(folder: Path, record: CaseRecord) -> str:
    with asking(folder.parent) as client:
        text = client.get("/case?id=run&case=net").text
    return text.replace("</dt><dd>", ": ").replace("&gt;", ">")


def in_pytest(folder: Path, record: CaseRecord) -> str:
    ended = dataclasses.replace(Case("net", Path("net.onnx"), Options(), folder), reason="wrong")
    return failure_text.describe_failure(ended, record)


def in_pytests_junit(folder: Path, record: CaseRecord) -> str:
    return str(dict(failure_text.list_properties(record))["hil_evidence"])


REPORTS: dict[str, Callable[[Path, CaseRecord], str]] = {
    "csv": in_csv,
    "junit": in_junit,
    "markdown": in_markdown,
    "html": in_html,
    "web": in_web,
    "pytest": in_pytest,
    "pytest's junit": in_pytests_junit,
}


@pytest.mark.ci
@pytest.mark.parametrize("report", REPORTS)
def test_report_contains_every_fact(report: str, tmp_path: Path) -> None:
    for number, (fact, (values, text)) in enumerate(FACTS.items()):
        record = case("net", "FAIL", **{"relation": "independent", **values})
        folder = suite_run(tmp_path / str(number) / "run", [record])
        assert text in REPORTS[report](folder, record), fact


def test_run_record_contains_same_facts() -> None:
    verdict = {"against": "ort 1", "relation": "self-check", "outcome": "FAIL", "reason": "", "outputs": []}
    repetition = Repetition((Answer(5, 0), Answer(4, 5)), differing=("y",)).record()
    record = run_case(verdicts=[verdict, {**OTHER, "reason": ""}], unanswered=[SILENT], repetition=repetition)
    assert list_case_evidence(record) == [
        ("compared with", "ort 1 (self-check)"),
        ("compared with", "tflite 2 (self-check): FAIL"),
        ("failed reference", "iree-llvm-cpu: index 9 of 4"),
        ("answers", repetition["text"]),
    ]
