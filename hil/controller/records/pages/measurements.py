"""Documents of the pages of comparisons, histories, regressions and series."""

from __future__ import annotations

from typing import Annotated

from hil.controller.records.base import Interval, Number, Record, note
from hil.controller.records.measurements.history import HistoryEntry, SeriesSummary
from hil.controller.records.pages.common import ChangeList, PageDocument, Pages, Seconds, SessionSummary, Total


class SideSummary(Record, kw_only=True):
    """Side of a comparison."""

    name: str
    sessions: Annotated[list[SessionSummary], note("newest first")]
    only: Annotated[dict[str, str], note("filter of the side")]
    left_out: Annotated[int, note("number of omitted sessions")]


class SideOutcomes(Record, kw_only=True):
    """Outcomes of a case on a side."""

    outcomes: Annotated[dict[str, int], note("number of sessions by outcome, latest first")]
    samples: int
    message: str


class MovedCase(Record, kw_only=True):
    """Case on both sides."""

    name: str
    before: SideOutcomes
    after: SideOutcomes
    move: Annotated[str, note("broke, fixed, still_failing, new, gone or other; empty if unchanged")]


class MovedNumber(Record, kw_only=True):
    """Number of a case on both sides."""

    pair: MovedCase
    what: Annotated[str, note("device_p50_ns, artifact_bytes, joules, max_abs or sqnr_db")]
    before: Number
    after: Number
    count_before: int
    count_after: int
    ratio: Number
    verdict: str
    why: str
    output: str


class MovedTable(Record, kw_only=True):
    """Table of a comparison: pairs of outcomes, or numbers."""

    show: Annotated[str, note("the parameter `show`")]
    title: str
    total: Total
    pages: Pages
    pairs: list[MovedCase]
    movers: list[MovedNumber]


class CompareDocument(PageDocument, kw_only=True):
    """Comparison of side b with the baseline a. Null without a side."""

    a: SideSummary | None
    b: SideSummary | None
    counts: Annotated[dict[str, int], note("number of cases by table")]
    device_ratio: Annotated[Number, note("geometric mean of the ratios of device times")]
    tables: Annotated[list[MovedTable], note("the requested table, or the first rows of each")]
    notes: Annotated[list[str], note("differences of the sides other than results")]


class SuiteChoice(Record, kw_only=True):
    """Suite with a history."""

    suite: str
    flow: str
    boards: list[str]
    count: Annotated[int, note("number of sessions")]
    last: Seconds


class HistoryDocument(PageDocument, kw_only=True):
    """Suites with a history, and the cases that match `q`."""

    suites: list[SuiteChoice]
    names: list[str]


class CasePoint(Record, kw_only=True):
    """Result of a case in a session."""

    index: Annotated[int, note("position in the history, oldest first")]
    id: str
    root: int
    created: Seconds
    title: str
    branch: str
    commit: str
    compilers: str
    stack: Annotated[dict[str, str] | None, note("versions of the board's driver, firmware and other parts")]
    outcome: Annotated[str, note("before expectations")]
    message: str
    value: Number
    iterations: int
    grade: str


class LevelChange(Record, kw_only=True):
    """Change of level of a measured number."""

    index: Annotated[int, note("first result with the new level")]
    before: Number
    after: Number
    worse: bool


class StoredRemark(Record, kw_only=True):
    """Remark on a session or case."""

    session: str
    case: Annotated[str, note("empty for the whole session")]
    text: str
    created: Seconds


class FlakinessScore(Record, kw_only=True):
    """How often the outcome of a case changed."""

    changes: int
    sessions: int
    score: Annotated[float, note("percent of the possible changes")]
    is_flaky: bool


class CaseHistoryDocument(PageDocument, kw_only=True):
    """History of a case."""

    case: str
    identity: Annotated[dict[str, str], note("kind, suite, flow, runtime, board and model")]
    column: Annotated[str, note("measured number")]
    points: Annotated[list[CasePoint], note("newest first")]
    total: Total
    pages: Pages
    steps: list[LevelChange]
    flakiness: FlakinessScore
    remarks: list[StoredRemark]


class SuitePoint(Record, kw_only=True):
    """Session of a suite."""

    index: int
    session: SessionSummary
    rate: Annotated[Number, note("passing cases in percent")]
    device_ns: Annotated[Number, note("sum of the device times; null if not comparable")]


class SuiteHistoryDocument(PageDocument, kw_only=True):
    """History of a suite."""

    suite: str
    points: Annotated[list[SuitePoint], note("newest first")]
    total: Total
    pages: Pages
    remarks: list[StoredRemark]


class RegressionRow(Record, kw_only=True):
    """Case that failed or became slower."""

    case: str
    what: Annotated[str, note("broke or slower")]
    created: Seconds
    over: Annotated[bool, note("true if the case passes, or is fast again")]
    before: Number
    after: Number
    ratio: Number
    title: str
    board: str
    commit: str
    earlier_commit: str
    message: str
    link: Annotated[str, note("query of the session")]
    history: Annotated[str, note("query of the history of the case")]
    compare: Annotated[str, note("query of the comparison of the sessions before and after")]


class RegressionsDocument(PageDocument, kw_only=True):
    """Cases that fail or are slower since a date."""

    regressions: list[RegressionRow]
    total: Total
    pages: Pages
    unjudged: int
    changes: ChangeList


class SeriesListDocument(PageDocument, kw_only=True):
    """Series of the history."""

    series: list[SeriesSummary]
    total: Total
    pages: Pages


class SeriesRun(Record, kw_only=True):
    """Run of a series."""

    index: int
    entry: HistoryEntry
    spread: Annotated[Number, note("interquartile range / median")]
    interval: Annotated[Interval | None, note("of the median, in nanoseconds")]


class SeriesLevel(Record, kw_only=True):
    """Change of level in a series."""

    index: Annotated[int, note("first run with the new level")]
    ratio: float
    p_value: float


class SeriesDocument(PageDocument, kw_only=True):
    """Run chart of a series."""

    summary: SeriesSummary
    runs: Annotated[list[SeriesRun], note("newest first")]
    total: Total
    pages: Pages
    changes: list[SeriesLevel]
