"""Series of the history of `hil history`, and a run chart of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hil.controller.pipeline.records.energy_text import ENERGY_COLUMNS, list_energy
from hil.controller.records.pages.measurements import SeriesDocument, SeriesListDocument, SeriesRun
from hil.controller.web.history.run_series import chart_runs, list_series, read_run_series
from hil.controller.web.index.sessions import link_runs
from hil.controller.web.pages.trends.paging import choose_newest
from hil.controller.web.site import WebSite, get_site
from hil.controller.web.templating import format_time
from hil.controller.web.text.addresses import PageQuery, choose_page
from hil.controller.web.text.csv_answer import respond_with_rows
from hil.controller.web.text.documents import describe, list_numbered
from hil.controller.web.text.requests import count_rows, list_fields, parse_filter
from hil.errors import UsageError

router = APIRouter()
_ROWS = 100
_SERIES = (
    *("series", "kind", "model", "case", "function", "flow", "board", "runtime", "flags", "runs", "p50_ns", "outcome"),
    *("commit", "created"),
)
_RUN = (
    *(
        "created",
        "commit",
        "branch",
        "p50_ns",
        "low_ns",
        "high_ns",
        "spread",
        "score",
        "iterations",
        "outcome",
        "board",
        "run",
    ),
    *("confirmed", "level_begins", "notes", "reason", "instructions", "counter", "grade", "grade_reasons"),
    *ENERGY_COLUMNS,
    "stack",
)


@dataclass(frozen=True)
class SeriesFilter(PageQuery):
    """Query parameters of the series. Without ``id``, the page lists the series."""

    id: str = ""
    q: str = ""  # text in the description of the series; with ``id``, in a run or its stack
    page: int = 1


@router.get("/series")
def series(request: Request) -> Response:
    """Show the run chart of a series. Without an ID, list the series of the history."""
    site, wanted = get_site(request), parse_filter(request, SeriesFilter)
    if wanted.id:
        return _render_series(site, request, wanted)
    known, rows = list_series(site.history, wanted.q), count_rows(request, _ROWS)
    first, pages = choose_page(wanted.page, len(known), rows)
    return site.render_page(
        request,
        "series_list.html",
        asked=wanted,
        history=site.history,
        rows=known[first : first + rows],
        found={"pages": pages, "total": len(known)},
    )


def _render_series(site: WebSite, request: Request, wanted: SeriesFilter) -> Response:
    if site.history is None:
        raise UsageError("no history", hint="select a history: hil web --history DIR|URL")
    found = read_run_series(site.history, wanted.id)
    with site.reader.open_snapshot() as database:
        links = link_runs(database, {one.entry.run for one in found.runs})
    rows, paging = choose_newest(request, wanted.page, found.runs, _ROWS, lambda index: found.has_text(index, wanted.q))
    return site.render_page(
        request,
        "series.html",
        asked=wanted,
        found=found,
        key=found.summary.key,
        changes=dict(found.changes),
        chart=chart_runs(found),
        links=links,
        has_energy=any(one.entry.energy is not None for one in found.runs),
        has_counts=any(one.entry.instructions is not None for one in found.runs),
        stacks=found.stacks,
        has_stack=found.has_stack,
        rows=rows,
        paging=paging,
    )


@router.get("/series.csv")
def series_csv(request: Request) -> Response:
    """Return the series of the history, or the newest runs of a series, newest first."""
    site, wanted = get_site(request), parse_filter(request, SeriesFilter)
    if not wanted.id or site.history is None:
        rows = [
            (
                *(one.id, one.key.kind, one.key.model, one.key.case, one.key.function, one.key.flow, one.key.board),
                *(one.key.runtime, " ".join(one.key.flags), one.entries, one.p50_ns, one.outcome, one.commit),
                format_time(one.created),
            )
            for one in list_series(site.history, wanted.q)
        ]
        return respond_with_rows("series", _SERIES, rows)
    found = read_run_series(site.history, wanted.id)
    starts = {index for index, _ in found.changes}
    return respond_with_rows(
        f"series {found.summary.id}",
        _RUN,
        [
            (
                *(format_time(one.entry.created), one.commit, one.entry.source.branch, one.entry.p50_ns),
                *((one.interval.low, one.interval.high) if one.interval else (None, None)),
                *(
                    one.spread,
                    one.entry.score and one.entry.score.board,
                    one.entry.iterations,
                    one.entry.outcome,
                    one.entry.board.name,
                    one.entry.run,
                ),
                *(one.entry.confirmed, index in starts, "; ".join(note.text for note in one.entry.annotations)),
                one.entry.reason,
                *((counted.median, counted.counter) if (counted := one.entry.instructions) else (None, None)),
                *((grade.grade, "; ".join(grade.reasons)) if (grade := one.entry.grade) else (None, None)),
                *list_energy(one.entry.energy),
                found.stacks[index],
            )
            for index, one in reversed(list(enumerate(found.runs)))
            if found.has_text(index, wanted.q)
        ],
    )


def _list_levels(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"index": index, "ratio": change.ratio, "p_value": change.p_value} for index, change in values["found"].changes
    ]


# URL parameters by path.
PARAMETERS = {
    "/series": list_fields(SeriesFilter),
    "/series.csv": list_fields(SeriesFilter),
}

# JSON documents by path and template.
DOCUMENTS = {
    "/series": {
        "series_list.html": describe(SeriesListDocument, series="rows", total="found.total", pages="found.pages"),
        "series.html": describe(
            SeriesDocument,
            summary="found.summary",
            runs=list_numbered(SeriesRun),
            total="paging.total",
            pages="paging.pages",
            changes=_list_levels,
        ),
    },
}
