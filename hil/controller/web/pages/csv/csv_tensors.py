"""Tables of a tensor's page as CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.compare.stats import STATISTICS
from hil.controller.analysis.tensors.overview import Bin, SideCounts
from hil.controller.analysis.tensors.texts import list_text_rows
from hil.controller.web.access.heavy import run_heavy
from hil.controller.web.readers.fields import read_mapping
from hil.controller.web.tensors.query import list_tensor_parameters, query_of
from hil.controller.web.tensors.subjects import find_subjects
from hil.controller.web.tensors.tensors import find_subject
from hil.controller.web.tensors.view import TensorView
from hil.controller.web.text.csv_answer import AT_A_TIME, Rows, respond_with_pages, respond_with_rows
from hil.controller.web.text.entries import read_real, read_text
from hil.errors import UsageError

router = APIRouter()
Table = tuple[Sequence[str], Rows]


@router.get("/tensors.csv")
async def tensors_csv(request: Request) -> Response:
    """Return a table of a tensor's page, by default the worst elements. Raises UsageError for an unknown table."""
    return await run_heavy(_make_table_response, request)


def _make_table_response(request: Request) -> Response:
    query, wanted = query_of(request), request.query_params.get("table", "worst")
    _, _, subjects = find_subjects(request, query)
    subject = find_subject(subjects, query.kind, query.output, query.beside)
    shown = TensorView.of(query, subject, "all")
    if wanted == "texts" and shown.is_text:
        return _stream_texts(shown)
    if wanted not in _TABLES or (shown.is_text and wanted != "statistics"):
        raise UsageError(
            f"unknown table {wanted[:40]!r} for {subject.name}", hint=f"valid tables: {', '.join(_TABLES)}"
        )
    return respond_with_rows(subject.name, *_TABLES[wanted](shown))


def _make_worst_table(shown: TensorView) -> Table:
    _check_pair(shown)
    rows = [
        (str(list(one.index)), one.actual, one.reference, one.difference, one.relative, one.ulp, one.mismatch)
        for one in shown.worst()
    ]
    sides = (name.lower() for name in _list_side_titles(shown))
    return ("index", *sides, "difference", "relative", "ulp", "out_of_tolerance"), rows


def _make_statistics_table(shown: TensorView) -> Table:
    _check_pair(shown)
    judged, recorded = shown.judgement(), shown.subject.recorded
    if judged.comparison is None:
        raise UsageError(f"statistics unavailable for {shown.subject.name}: {judged.reason}")
    now, was = judged.comparison, read_mapping(recorded.get("tolerance"))
    tolerance = {name: getattr(now.tolerance, name, None) for name in ("rtol", "atol")}
    rows: list[tuple[Any, ...]] = [(name, value, read_real(was.get(name))) for name, value in tolerance.items()]
    for name in ("mismatches", "elements", "nonfinite", *(one.key for one in STATISTICS)):
        rows.append((name, getattr(now, name), read_real(recorded.get(name))))
    before = "PASS" if recorded.get("passed") else "BLIND" if recorded.get("blind") else "FAIL"
    rows.append(("outcome", judged.outcome.value if judged.outcome else "refused", before if recorded else ""))
    rows.append(("reason", judged.reason, read_text(recorded.get("reason"))))
    return ("statistic", "now", "in_the_record"), rows


def _make_values_table(shown: TensorView) -> Table:
    counted = tuple(one.name for one in fields(SideCounts))
    sides = zip(_list_side_titles(shown), shown.charts().sides, strict=False)
    return ("tensor", *counted), [(name, *(getattr(one, field) for field in counted)) for name, one in sides]


def _make_histogram_table(shown: TensorView) -> Table:
    found = shown.charts()
    return ("from", "to", *_list_side_titles(shown)[: len(found.sides)]), _list_histogram_rows(found.values)


def _make_differences_table(shown: TensorView) -> Table:
    _check_pair(shown)
    return ("from", "to", "elements"), _list_histogram_rows(shown.charts().errors)


def _list_histogram_rows(bins: Sequence[Bin]) -> Rows:
    return [(one.low, one.high, *one.counts) for one in bins if any(one.counts)]


def _stream_texts(shown: TensorView) -> Response:
    arrays = shown.arrays if shown.pair else shown.arrays[:1]

    def read_part(page: int) -> tuple[Rows, int]:
        found = list_text_rows(arrays, (page - 1) * AT_A_TIME, AT_A_TIME)
        rows = [(str(list(one.index)), *one.texts, one.differ) for one in found]
        return rows, max(1, -(-arrays[0].size // AT_A_TIME))

    return respond_with_pages(
        shown.subject.name, ("index", *_list_side_titles(shown)[: len(arrays)], "differ"), read_part
    )


def _list_side_titles(shown: TensorView) -> list[str]:
    return [side.title for side in shown.subject.sides]


def _check_pair(shown: TensorView) -> None:
    if shown.pair is None:
        raise UsageError(f"{shown.subject.name} has no elements that differ from a reference")


_TABLES: dict[str, Callable[[TensorView], Table]] = {
    "worst": _make_worst_table,
    "statistics": _make_statistics_table,
    "values": _make_values_table,
    "histogram": _make_histogram_table,
    "differences": _make_differences_table,
}


# URL parameters by path.
PARAMETERS = {
    "/tensors.csv": (*list_tensor_parameters(), "table"),
}
