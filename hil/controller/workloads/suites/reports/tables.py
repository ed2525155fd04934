"""CSV: a row a case, and a row an output."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from hil.controller.storage.spreadsheet import as_text
from hil.controller.storage.texts import plain
from hil.controller.workloads.suites.record import CaseRecord
from hil.controller.workloads.suites.reports.delegation import COLUMNS, cells, is_told
from hil.controller.workloads.suites.reports.load import SuiteResults
from hil.controller.workloads.suites.reports.totals import worst
from hil.core.results import Timings

_WHAT = ("id", "suite", "model", "layer", "op", "flow", "runtime", "board", "hw_type", "outcome", "ended", "stage")
_TIMINGS = tuple(one.name for one in fields(Timings))
_STATISTICS = ("max_abs", "max_rel", "max_ulp", "rmse", "cosine", "sqnr_db", "mismatches")
_OUTPUT = ("name", "passed", "reason", "dtype", "shape", "reference_dtype", "reference_shape")
_OUTPUT_STATISTICS = (
    "elements",
    "mismatches",
    "mismatch_share",
    "max_abs",
    "max_rel",
    "max_ulp",
    "mean_abs",
    "rmse",
    "cosine",
    "sqnr_db",
    "first_index",
    "first_values",
    "worst_index",
    "worst_values",
)


def cases_csv(run: SuiteResults) -> str:
    """A row a case: what it was, where it ended, seconds of each stage, and the statistics of its worst output.

    Where compilers told of their work, or tests have parameters, those columns come last:
    :data:`hil.controller.workloads.suites.reports.delegation.COLUMNS`.
    """
    told = is_told(run.records)
    header = (
        *_WHAT,
        *_TIMINGS,
        "device_p50_ms",
        "device_p90_ms",
        "iterations",
        "cold",
        "agentless",
        "artifact_bytes",
        "cached",
        "worst_output",
        *_STATISTICS,
        "plain_sqnr_db",
        "confirmed",
        "attempts",
        "message",
        *(COLUMNS if told else ()),
    )
    return _csv(header, ([*_case(record), *(cells(record) if told else ())] for record in run.records))


def outputs_csv(run: SuiteResults) -> str:
    """A row an output: beside the flow's own reference, and beside that of the model before the flow's recipe."""
    header = ("id", "beside", "against", *_OUTPUT, "rtol", "atol", *_OUTPUT_STATISTICS)
    rows = (
        _output(record, beside, against, output)
        for record in run.records
        for beside, against, outputs in (
            ("own", record.against, record.outputs),
            ("plain", record.plain_against, record.plain_outputs),
        )
        for output in outputs
    )
    return _csv(header, rows)


def _case(record: CaseRecord) -> list[Any]:
    place, plain_place = worst(record.outputs), worst(record.plain_outputs)
    shown: Mapping[str, Any] = {} if place is None else record.outputs[place]
    return [
        *(getattr(record, name) for name in _WHAT),
        *(record.timings.get(name) for name in _TIMINGS),
        *(None if value is None else value / 1e6 for value in (record.device_p50_ns, record.device_p90_ns)),
        record.iterations or None,
        record.cold if record.iterations else None,
        record.agentless,
        record.artifact_bytes,
        record.cached,
        shown.get("name"),
        *(shown.get(name) for name in _STATISTICS),
        None if plain_place is None else record.plain_outputs[plain_place].get("sqnr_db"),
        record.confirmed,
        len(record.attempts),
        record.message,
    ]


def _output(record: CaseRecord, beside: str, against: str, output: Mapping[str, Any]) -> list[Any]:
    tolerance = output.get("tolerance") or {}
    return [
        record.id,
        beside,
        against,
        *(output.get(name) for name in _OUTPUT),
        tolerance.get("rtol"),
        tolerance.get("atol"),
        *(output.get(name) for name in _OUTPUT_STATISTICS),
    ]


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return file.getvalue()


def _cell(value: Any) -> Any:
    """What csv writes: no half-words for True and None, lists with spaces, and no text that a spreadsheet would run."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    if isinstance(value, (list, tuple)):
        return " ".join(str(_cell(one)) for one in value)
    if not isinstance(value, str) or value in ("inf", "-inf", "nan"):
        return value
    return as_text(plain(value))
