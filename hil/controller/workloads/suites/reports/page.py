"""One HTML file that holds everything it needs: it opens from a disk, offline, years later."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Any

from hil.controller.storage.texts import plain, shortened
from hil.controller.workloads.suites.record import CaseRecord
from hil.controller.workloads.suites.reports.delegation import Delegation, lowering_words
from hil.controller.workloads.suites.reports.load import SuiteResults
from hil.controller.workloads.suites.reports.totals import WHOLE_MODEL, Totals, host_seconds, kind_of, worst
from hil.core.results import Outcome, Stage
from hil.core.text import jsonable

_SCRIPTS = ("base.js", "plots.js", "details.js", "table.js")
_SHOWN = (
    "name",
    "passed",
    "reason",
    "dtype",
    "shape",
    "tolerance",
    "elements",
    "mismatches",
    "max_abs",
    "max_rel",
    "max_ulp",
    "rmse",
    "cosine",
    "sqnr_db",
    "worst_index",
    "worst_values",
)


def report_html(run: SuiteResults) -> str:
    """The run as a page: totals, plots, and a table of cases that filters, sorts and unfolds.

    It fetches nothing, and its policy lets no script run but its own: what models, tools and boards said is data.
    """
    style = _part("page.css")
    script = "\n".join(_part(name) for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'"
    )
    return Template(_part("page.html")).substitute(
        title=html.escape(plain(run.title)), policy=policy, style=style, script=script, data=_embedded(_data(run))
    )


def _part(name: str) -> str:
    return resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: Any) -> str:
    """JSON that nothing can end from within: no tag, comment or entity is left in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(run: SuiteResults) -> Any:
    totals = Totals.of(run)
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
        "words": totals.words,
        "failing": len(totals.failing),
        "byOp": list(totals.by_op.items()),
        "byStage": list(totals.by_stage.items()),
        "runByOp": totals.run_by_op,
        "wholeModel": WHOLE_MODEL,
        "outcomes": [one.value for one in Outcome],
        "kinds": {word: kind_of(word) for word in totals.outcomes},
        "stages": [one.value for one in Stage],
        "cases": [_case(record) for record in run.records],
    }
    return _clean(jsonable(whole))


def _case(record: CaseRecord) -> dict[str, Any]:
    place, plain_place = worst(record.outputs), worst(record.plain_outputs)
    shared = Delegation.of(record)
    found: dict[str, Any] = {
        **{
            name: getattr(record, name)
            for name in ("id", "model", "layer", "op", "board", "hw_type", "outcome", "stage")
        },
        **{
            name: getattr(record, name)
            for name in (
                "message",
                "hint",
                "against",
                "confirmed",
                "repeat",
                "diff",
                "folder",
                "iterations",
                "cold",
                "agentless",
            )
        },
        **{name: getattr(record, name) for name in ("expectation", "attempts", "cached", "started", "params")},
        "delegated": "" if shared is None else shared.words,
        "lowering": lowering_words(record),
        "ended": record.ended if record.ended != record.outcome else "",
        "plainAgainst": record.plain_against,
        "detail": shortened(record.detail),
        "p50": record.device_p50_ns,
        "bytes": record.artifact_bytes,
        "host": host_seconds(record),
        "timings": {key.removesuffix("_s"): value for key, value in record.timings.items() if value is not None},
        "outputs": [_output(one) for one in record.outputs],
        "plainOutputs": [_output(one) for one in record.plain_outputs],
        "worst": place,
        "plainWorst": plain_place,
    }
    return {key: value for key, value in found.items() if value not in (None, "", (), [], {})}


def _output(output: Mapping[str, Any]) -> dict[str, Any]:
    return {name: output[name] for name in _SHOWN if output.get(name) is not None}


def _clean(value: Any) -> Any:
    """The value with every text made fit to be shown."""
    if isinstance(value, dict):
        return {plain(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return plain(value) if isinstance(value, str) else value
