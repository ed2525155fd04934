"""Write a run as a self-contained HTML file that works offline."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from hil.compare.stats import STATISTICS
from hil.controller.pipeline.records.evidence import format_criterion, list_evidence
from hil.controller.records.outputs import StoredComparison
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.outcomes import classify_outcome
from hil.controller.storage.screen.texts import make_plain, shorten
from hil.controller.workloads.suites.reports.links import iter_links
from hil.controller.workloads.suites.reports.results import (
    WHOLE_MODEL,
    Delegation,
    SuiteResults,
    Totals,
    find_worst,
    format_lowering,
    list_slowest,
    sum_host_seconds,
)
from hil.controller.workloads.suites.reports.tables import CaseColumn, list_columns
from hil.core.results import Outcome, Stage
from hil.core.text import convert_to_json

_SCRIPTS = ("base.js", "plots.js", "details.js", "table.js")
_STATISTICS = [one for one in STATISTICS if one.report]
_OF_STATISTICS = ("key", "title", "unit", "digits")
_SHOWN = (
    *("name", "passed", "reason", "dtype", "shape", "tolerance", "elements", "mismatches"),
    *(one.key for one in _STATISTICS),
    *("worst_index", "worst_values"),
)
# Record fields that the page uses with the same names, in this order.
_COPIED = (
    *("id", "model", "layer", "op", "board", "hw_type", "outcome", "stage", "message", "hint", "against", "confirmed"),
    *(
        "repeat",
        "diff",
        "folder",
        "iterations",
        "cold",
        "answers",
        "agentless",
        "expectation",
        "attempts",
        "cached",
        "started",
    ),
    *("params", "disagreement"),
)


def report_html(run: SuiteResults) -> str:
    """Return the page: totals, plots, and a table of cases. Users can filter, sort and expand the table.

    The page makes no requests, and the content security policy allows only inline scripts. Texts from models, tools and
    boards are embedded as data, never as HTML.
    """
    style, script = _read_asset("page.css"), "\n".join(map(_read_asset, _SCRIPTS))
    sources = f"img-src data:; style-src {digest_page_part(style)}; script-src {digest_page_part(script)}"
    policy = f"default-src 'none'; {sources}; base-uri 'none'"
    return Template(_read_asset("page.html")).substitute(
        title=html.escape(make_plain(run.title)),
        policy=policy,
        style=style,
        script=script,
        data=_embed_json(_build_page_data(run)),
    )


def _read_asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def digest_page_part(text: str) -> str:
    """Return the hash of a style or script for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embed_json(data: Any) -> str:
    """Return JSON with escapes for all characters that HTML could parse as a tag, a comment or an entity."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _build_page_data(run: SuiteResults) -> Any:
    totals = Totals(run)
    columns = [column for column in list_columns(run) if column.title]
    whole = {
        "title": run.title,
        "facts": {
            "run": run.id,
            "suite": run.source or run.suite,
            "flow": run.flow,
            "runtime": run.runtime,
            "boards": ", ".join(run.boards),
            **({"resume": run.command} if run.missing else {}),
            "exit code": run.exit_code,
            **run.versions,
        },
        "boards": run.boards,
        "started": run.started,
        "finished": run.finished,
        "notes": run.notes,
        "remarks": totals.remarks,
        "failing": len(totals.failing),
        "byOp": list(totals.by_op.items()),
        "byStage": list(totals.by_stage.items()),
        "runByOp": totals.run_by_op,
        "unranked": list_slowest(run.records)[1],
        "wholeModel": WHOLE_MODEL,
        "outcomes": [one.value for one in Outcome],
        "kinds": {outcome: classify_outcome(outcome) for outcome in totals.outcomes},
        "stages": [one.value for one in Stage],
        "columns": [{"name": one.name, "title": one.title, "unit": one.unit} for one in columns],
        "statistics": [{name: getattr(one, name) for name in _OF_STATISTICS} for one in _STATISTICS],
        "cases": [_build_case(run, record, columns) for record in run.records],
    }
    return _clean_strings(convert_to_json(whole))


def _build_case(run: SuiteResults, record: CaseRecord, columns: Sequence[CaseColumn]) -> dict[str, Any]:
    delegation = Delegation.of(record)
    found: dict[str, Any] = {
        **{name: getattr(record, name) for name in _COPIED},
        "delegated": "" if delegation is None else delegation.text,
        "lowering": format_lowering(record),
        "ended": record.ended if record.ended != record.outcome else "",
        "plainAgainst": record.plain_against,
        "evidence": list_evidence(record),
        "detail": shorten(record.detail),
        "p50": record.device_p50_ns,
        "bytes": record.artifact_bytes,
        "host": sum_host_seconds(record),
        "timings": {key.removesuffix("_s"): value for key, value in record.timings.items() if value is not None},
        "outputs": [_build_output(one) for one in record.outputs],
        "otherReferences": [
            {**one.to_json(), "outputs": [_build_output(output) for output in one.outputs]}
            for one in record.other_references
        ],
        "plainOutputs": [_build_output(one) for one in record.plain_outputs],
        "links": list(iter_links(run, record)),
        "worst": find_worst(record.outputs),
        "plainWorst": find_worst(record.plain_outputs),
        "cells": {one.name: value for one in columns if (value := one.value(record)) not in (None, "")},
    }
    return {key: value for key, value in found.items() if value not in (None, "", (), [], {})}


def _build_output(output: StoredComparison) -> dict[str, Any]:
    shown = {name: value for name in _SHOWN if (value := getattr(output, name)) is not None}
    criteria = list(map(format_criterion, output.criteria))
    return shown | ({"criteria": criteria} if criteria else {})


def _clean_strings(value: Any) -> Any:
    """Return the value with all strings made printable."""
    if isinstance(value, dict):
        return {make_plain(key): _clean_strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean_strings(item) for item in value]
    return make_plain(value) if isinstance(value, str) else value
