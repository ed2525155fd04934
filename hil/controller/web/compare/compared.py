"""Tables for a comparison page: a single sorted table, or an overview."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hil.controller.storage.outcomes import classify_outcome
from hil.controller.web.compare.comparing import MOVES, NUMBERS, CasePair, ComparisonResult, Mover
from hil.controller.web.compare.movers import Movers
from hil.controller.web.compare.moves import UNCHANGED
from hil.controller.web.compare.side_cases import Floats, Places, find_failing_words
from hil.controller.web.index.sessions import IndexedSession
from hil.controller.web.readers import BENCH
from hil.controller.web.readers.fields import read_document
from hil.controller.web.text.addresses import PageQuery, choose_page
from hil.controller.web.text.entries import KINDS
from hil.controller.web.text.parameters import InvalidParameter

ROWS = 100
OVERVIEW_ROWS = 15
TITLES: Mapping[str, str] = {
    "broke": "Newly failing",
    "fixed": "Fixed",
    "still_failing": "Still failing",
    "new": "Only in compared",
    "gone": "Only in baseline",
    "other": "Other outcome changes",
    UNCHANGED: "Same outcome",
    "device_p50_ns": "Device time",
    "artifact_bytes": "Program size",
    "joules": "Energy",
    "max_abs": "Largest error",
    "sqnr_db": "SQNR",
}
_PAIR_ORDERS = ("name", "before", "after")
_MOVER_ORDERS = (*_PAIR_ORDERS, "change", "ratio", "verdict")


@dataclass(frozen=True)
class ComparisonQuery(PageQuery):
    """Query parameters that select a table of a comparison. The sides are separate parameters."""

    show: str = ""  # table to show: from MOVES, or a key of NUMBERS; "" shows the overview
    q: str = ""  # filter for the case name
    all: str = ""  # if not empty, include unchanged numbers
    order: str = ""
    page: int = 1


@dataclass(frozen=True)
class ComparisonTable:
    """Table of a comparison, with either pairs or movers.

    Numbers that did not change are folded: the table has their number, and the largest differences among them.
    """

    show: str
    title: str
    total: int
    pairs: Sequence[CasePair] = ()
    movers: Sequence[Mover] = ()
    pages: int = 1
    folded: Sequence[Mover] = ()
    folded_total: int = 0


def list_tables(found: ComparisonResult, asked: ComparisonQuery, rows: int = ROWS) -> list[ComparisonTable]:
    """Return the requested table, or an overview of all non-empty tables.

    Raises:
        UsageError: unknown table or sort order.
    """
    if asked.show:
        if asked.show not in TITLES:
            raise InvalidParameter.choose("comparison table", asked.show, TITLES)
        return [_make_table(found, asked, asked.show, rows)]
    shows = [*(show for show in MOVES if found.counts[show]), *NUMBERS]
    shown = [_make_table(found, asked, show, OVERVIEW_ROWS) for show in shows]
    return [one for one in shown if one.total or one.folded_total]


def _make_table(found: ComparisonResult, asked: ComparisonQuery, show: str, rows: int) -> ComparisonTable:
    if show in (*MOVES, UNCHANGED):
        places = _filter_by_name(found, found.columns.select_kind(show), asked.q, lambda places: places)
        places = places[_sort_pairs(found, places, asked.order)]
        part, pages = _cut_page(places, asked.page, rows)
        return ComparisonTable(show, TITLES[show], places.size, pairs=found.list_pairs(part), pages=pages)
    movers = found.numbers[show]
    every = _filter_by_name(found, np.arange(movers.pair.size), asked.q, lambda places: movers.pair[places])
    decided = movers.decided[every]
    places, folded = (every, every[:0]) if asked.all else (every[decided], every[~decided])
    places = places[_sort_movers(found, movers, places, asked.order)]
    part, pages = _cut_page(places, asked.page, rows)
    shown = found.list_movers(show, part)
    largest = folded[_sort_movers(found, movers, folded, "")][:OVERVIEW_ROWS]
    return ComparisonTable(
        show, TITLES[show], places.size, (), shown, pages, found.list_movers(show, largest), folded.size
    )


def _filter_by_name(found: ComparisonResult, places: Places, q: str, pairs: Callable[[Places], Places]) -> Places:
    """Return the places with a case name that contains every word of ``q``."""
    words = q.lower().split()
    if not words:
        return places
    names = found.list_names(pairs(places))
    return places[[all(word in name.lower() for word in words) for name in names]]


def _sort_pairs(found: ComparisonResult, places: Places, order: str) -> Places:
    columns = found.columns
    if not order:
        became = columns.became[places]
        return np.argsort(~np.isin(became, find_failing_words(np.unique(became), found.words)), kind="stable")
    by = _check_order(order, _PAIR_ORDERS)
    if by == "name":
        keys = _rank_texts(found.list_names(places))
    else:
        keys = _rank_outcomes(found.words.get_texts((columns.was if by == "before" else columns.became)[places]))
    return _sort_keys(keys, order)


def _sort_movers(found: ComparisonResult, movers: Movers, places: Places, order: str) -> Places:
    if not order:
        return np.lexsort((-movers.size[places], ~movers.worse[places], ~movers.decided[places]))
    by = _check_order(order, _MOVER_ORDERS)
    if by == "name":
        keys = _rank_texts(found.list_names(movers.pair[places]))
    elif by == "verdict":
        keys = movers.state[places].astype(np.float64)  # regressions are last
    elif by == "change":
        keys = movers.size[places]
    elif by == "ratio":
        keys = np.nan_to_num(movers.ratio[places], nan=0.0, posinf=np.inf)
    else:
        keys = (movers.before if by == "before" else movers.after)[places]
    return _sort_keys(keys, order)


def _check_order(order: str, orders: Sequence[str]) -> str:
    by = order.removeprefix("-")
    if by not in orders:
        raise InvalidParameter.choose("order", order, orders)
    return by


def _rank_texts(texts: Sequence[str]) -> Floats:
    """Return every text's rank in sorted order."""
    rank = {text: place for place, text in enumerate(sorted(set(texts)))}
    return np.fromiter((rank[text] for text in texts), np.float64, len(texts))


def _rank_outcomes(outcomes: Sequence[str]) -> Floats:
    """Return every outcome's rank by severity. Failures are last, and equal severities are in text order."""
    order = sorted(set(outcomes), key=lambda one: (-KINDS.index(classify_outcome(one)), one))
    rank = {outcome: place for place, outcome in enumerate(order)}
    return np.fromiter((rank[outcome] for outcome in outcomes), np.float64, len(outcomes))


def _sort_keys(keys: Floats, order: str) -> Places:
    """Return the indices that sort the keys. The sort is stable. NaN counts as infinity."""
    keys = np.where(np.isnan(keys), np.inf, keys)
    return np.argsort(-keys if order.startswith("-") else keys, kind="stable")


def _cut_page(found: Places, page: int, rows: int) -> tuple[Places, int]:
    start, pages = choose_page(page, found.size, rows)
    return found[start : start + rows], pages


@dataclass(frozen=True)
class BenchVerdict:
    """Stored verdict from a two-sided bench."""

    session: IndexedSession
    ratio: float
    low: float
    high: float
    level: float
    verdict: str


def list_bench_verdicts(sessions: Sequence[IndexedSession]) -> list[BenchVerdict]:
    """Return the stored verdicts from all two-sided benches among the sessions."""
    found = []
    for session in sessions:
        if session.kind != "bench":
            continue
        try:
            told = read_document(Path(session.folder) / BENCH)["comparison"]
            interval = told["interval"]
            numbers = (float(told["ratio"]), float(interval["low"]), float(interval["high"]), float(interval["level"]))
            found.append(BenchVerdict(session, *numbers, str(told["verdict"])))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            continue  # single-sided or unreadable; the session's page shows this
    return found
