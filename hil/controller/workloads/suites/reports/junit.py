"""Write a run as JUnit XML for Jenkins, GitLab, GitHub's test reporters and Azure."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from hil.controller.pipeline.records.evidence import format_evidence
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.outcomes import classify_outcome
from hil.controller.storage.screen.texts import format_seconds, line, make_plain, shorten
from hil.controller.workloads.suites.reports.links import iter_links
from hil.controller.workloads.suites.reports.results import EXPECTED, SuiteResults, format_timed, sum_host_seconds


def format_junit(run: SuiteResults) -> str:
    """Return the run as a document with a single test suite.

    Mismatches and unexpected passes are failures. In JUnit's terms, expected failures and cases that did not run are
    skipped, with the reason. Other outcomes except passes are errors. A case's time is the sum over the host stages.
    """
    return format_junit_document([make_junit_suite(run, f"{run.suite} {run.flow}")])


def make_junit_suite(run: SuiteResults, name: str, target: str = "", base: Path | None = None) -> ElementTree.Element:
    """Return the run as a document element.

    Args:
        target: replaces the flow in the class names of cases.
        base: the document's directory; None is the run's directory.
    """
    target = target or run.flow
    suite = ElementTree.Element("testsuite", name=make_plain(name))
    if run.started is not None:
        suite.set("timestamp", time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(run.started)))
    properties = ElementTree.SubElement(suite, "properties")
    resume = {"resume": run.command} if run.missing else {}
    facts = {**resume, "boards": ", ".join(run.boards), "runtime": run.runtime, **run.versions}
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", name=make_plain(name), value=make_plain(value))
    for record in run.records:
        _add_case(suite, record, target, list(iter_links(run, record, base)))
    for name in run.missing:
        about = {"classname": _format_class_name(run.suite, target), "name": make_plain(name), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", about)
        ElementTree.SubElement(case, "skipped", message="not run: the run is unfinished or was aborted")
    return suite


# Attribute -> counted elements. Jenkins' schema allows the last attribute only for suites.
_COUNTS = {
    "tests": "testcase",
    "failures": "testcase/failure",
    "errors": "testcase/error",
    "skipped": "testcase/skipped",
}


def format_junit_document(suites: Sequence[ElementTree.Element]) -> str:
    """Return suites as a document with total counts."""
    root = ElementTree.Element("testsuites", name="hil")
    for element, of in [(root, suites), *((suite, [suite]) for suite in suites)]:
        for name, path in _COUNTS.items():
            if name != "skipped" or element is not root:
                element.set(name, str(sum(len(suite.findall(path)) for suite in of)))
        times = [float(case.get("time", 0)) for suite in of for case in suite.findall("testcase")]
        element.set("time", f"{sum(times):.3f}")
    root.extend(suites)
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, record: CaseRecord, target: str, links: Sequence[tuple[str, str]]) -> None:
    about = {"classname": _format_class_name(record.suite, target, record.model), "name": make_plain(record.id)}
    case = ElementTree.SubElement(suite, "testcase", {**about, "time": f"{sum_host_seconds(record):.3f}"})
    kind = classify_outcome(record.outcome)
    if kind == "quiet":
        ElementTree.SubElement(case, "skipped", message=_format_skip_reason(record))
    elif kind != "pass":
        tag = "failure" if kind == "fail" else "error"
        message = line(record.message) or record.outcome
        problem = ElementTree.SubElement(case, tag, message=message, type=make_plain(record.outcome))
        problem.text = _format_problem(record)
    out = [f"board: {record.board}" if record.board else "", _format_device_time(record), *format_evidence(record)]
    for one in record.attempts:
        tried = f"other attempt ({one.get('why')}) on {one.get('board') or 'no board'}: {one.get('outcome')}"
        out.append(f"{tried} {line(one.get('message') or '')}".strip())
    if kind in ("fail", "error", "board"):
        out += [f"repeat: {record.repeat}" if record.repeat else "", f"diff: {record.diff}" if record.diff else ""]
        out += [f"{what}: {where}" for what, where in links]
    if text := make_plain("\n".join(filter(None, out))):
        ElementTree.SubElement(case, "system-out").text = text


def _format_device_time(record: CaseRecord) -> str:
    if not record.device_p50_ns:
        return ""
    return f"device time: {format_seconds(record.device_p50_ns / 1e9)}, median of {format_timed(record)}"


def _format_skip_reason(record: CaseRecord) -> str:
    if record.outcome != EXPECTED:
        return line(record.message or record.outcome)
    reason = " ".join(filter(None, (record.expectation.get("reason"), record.expectation.get("issue"))))
    return line(f"expected failure ({record.ended}): {reason or record.message}")


def _format_problem(record: CaseRecord) -> str:
    where = f"stage {record.stage}" + (f", board {record.board}" if record.board else "")
    differing = [f"{one.name}: {one.reason}" for one in record.outputs if not one.passed]
    parts = (
        f"{record.outcome} ({where})" + (f", {record.confirmed}" if record.confirmed else ""),
        record.message,
        f"hint: {record.hint}" if record.hint else "",
        "\n".join(differing),
        shorten(record.detail),
    )
    return make_plain("\n".join(filter(None, parts)))


def _format_class_name(*parts: str) -> str:
    """Return a class name. Parsers split it into packages at the dots."""
    return ".".join(re.sub(r"[^\w+-]+", "_", make_plain(part)) or "_" for part in parts)
