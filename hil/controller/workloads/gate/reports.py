"""Reports of a gate: the table for pull requests, JUnit XML, SARIF and annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from hil.controller.records.decisions.gate import GateRecord, GateVerdict
from hil.controller.storage.screen.texts import format_count, make_plain
from hil.controller.workloads.gate.verdict_texts import (
    COMMIT_DIGITS,
    HEADS,
    MEANINGS,
    describe_cause,
    describe_total,
    describe_verdict,
    is_failure,
    list_details,
    name_verdict,
)
from hil.controller.workloads.suites.reports.junit import format_junit_document
from hil.controller.workloads.suites.reports.summary import escape_text, format_name
from hil.core import own_version

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
# Maximum rows in Markdown, because a comment on GitHub has at most 65,536 characters.
_MAX_ROWS = 100
_MAX_DETAILS = 20


def make_markdown(record: GateRecord) -> str:
    """Return a summary for a pull request: a table of all series, and details of the series that changed."""
    failed = [one for one in record.verdicts if is_failure(one, record)]
    undecided = sum(one.verdict == "undecided" for one in record.verdicts)
    title = format_count(len(failed), "failure") if failed else "passed"
    title += f", {undecided} undecided" * bool(undecided and "undecided" not in record.fail_on)
    lines = [f"### hil gate: {title}", "", escape_text(describe_total(record)), ""]
    lines += [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    shown = record.verdicts[:_MAX_ROWS]
    for one in shown:
        verdict, model, *cells, reason = describe_verdict(one)
        marked = f"**{verdict}**" if is_failure(one, record) else verdict
        lines.append(f"| {' | '.join((marked, format_name(model), *map(escape_text, cells), escape_text(reason)))} |")
    if len(record.verdicts) > len(shown):
        lines.append(f"\n... and {len(record.verdicts) - len(shown)} more series")
    for one in shown[:_MAX_DETAILS]:
        if details := [f"- {escape_text(text)}" for text in list_details(one)]:
            lines += ["", f"{format_name(one.key.model)} {escape_text(one.key.case)}: **{one.verdict}**", "", *details]
    commit = record.commit[:COMMIT_DIGITS] or "the newest measurements"
    lines += [
        "",
        f"Commit {escape_text(commit)} against branch {format_name(record.baseline)}, `hil gate` {own_version()}.",
    ]
    return "\n".join(lines) + "\n"


def make_junit(record: GateRecord) -> str:
    """Return a document with a test case per series.

    Verdicts in ``fail_on`` become failures, and board faults errors.
    """
    suite = ElementTree.Element("testsuite", name=f"hil gate {make_plain(record.baseline)}")
    for one in record.verdicts:
        about = {
            "classname": make_plain(one.key.model),
            "name": make_plain(_name_series(one)),
            "time": f"{one.board_s:.3f}",
        }
        case = ElementTree.SubElement(suite, "testcase", about)
        tag = "failure" if is_failure(one, record) else "error" if one.verdict == "board fault" else ""
        if tag:
            problem = ElementTree.SubElement(case, tag, message=make_plain(one.reason), type=one.verdict)
            problem.text = make_plain("\n".join(list_details(one)))
        elif one.verdict in ("undecided", "new", *record.fail_on):
            ElementTree.SubElement(case, "skipped", message=make_plain(f"{name_verdict(one)}: {one.reason}"))
    for key in record.unmeasured:
        about = {"classname": make_plain(key.model), "name": make_plain(f"{key.case} on {key.board}"), "time": "0"}
        ElementTree.SubElement(
            ElementTree.SubElement(suite, "testcase", about), "skipped", message="not measured at this commit"
        )
    return format_junit_document([suite])


def make_sarif(record: GateRecord) -> str:
    """Return SARIF 2.1.0 for code scanning: a result per series that changed or could not be judged.

    The location of a result is the model's file, relative to the repository.
    """
    rules = [{"id": name.replace(" ", "-"), "shortDescription": {"text": text}} for name, text in MEANINGS.items()]
    driver = {"name": "hil gate", "version": own_version(), "rules": rules}
    results = [_make_result(one, record) for one in record.verdicts if one.verdict not in ("no change", "new")]
    run = {"tool": {"driver": driver}, "results": results}
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def make_annotations(record: GateRecord) -> Iterator[str]:
    """Yield GitHub's workflow commands, which annotate the models of series that changed or could not be judged."""
    for one in record.verdicts:
        if one.verdict in ("no change", "new", "improved"):
            continue
        level = "error" if is_failure(one, record) else "warning"
        place, title = _escape_property(one.key.model), _escape_property(f"hil gate: {one.verdict}")
        cause = f"; {describe_cause(one.cause)}" if one.cause is not None else ""
        text = f"{_name_series(one)}: {one.reason}{cause}"
        yield f"::{level} file={place},title={title}::{_escape_command(text)}"


def _escape_command(text: str) -> str:
    """Escape a message of a workflow command, as GitHub's actions/toolkit does."""
    return make_plain(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_command(text).replace(":", "%3A").replace(",", "%2C")


def _make_result(one: GateVerdict, record: GateRecord) -> dict[str, Any]:
    level = "error" if is_failure(one, record) else "note" if one.verdict == "improved" else "warning"
    text = f"{_name_series(one)}: {one.verdict}: {one.reason}"
    where = {"artifactLocation": {"uri": quote(one.key.model)}, "region": {"startLine": 1}}
    return {
        "ruleId": one.verdict.replace(" ", "-"),
        "level": level,
        "message": {"text": "\n".join([text, *list_details(one)])},
        "locations": [{"physicalLocation": where}],
        "partialFingerprints": {"hilSeries/v1": one.series},
    }


def _name_series(one: GateVerdict) -> str:
    return " ".join(filter(None, (one.key.case, one.key.flow, f"on {one.key.board}", one.key.runtime, *one.key.flags)))
