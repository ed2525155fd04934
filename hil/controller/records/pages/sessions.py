"""Documents of the pages of sessions, cases, causes, gates and triage."""

from __future__ import annotations

from typing import Annotated, Any

from hil.controller.records.base import Number, Record, note
from hil.controller.records.decisions.triage import TriageEntry
from hil.controller.records.pages.common import (
    CaseSummary,
    CauseSummary,
    ChangedCaseRow,
    ChangeList,
    PageDocument,
    Pages,
    Seconds,
    SessionSummary,
    Total,
)


class NightCellSummary(Record, kw_only=True):
    """Newest session of a suite on a board in a night."""

    link: Annotated[str, note("query of the session")]
    title: str
    created: Seconds
    verdict: str
    counts: Annotated[list[tuple[str, int]], note("kind of outcome and number of cases, most severe first")]
    sessions: Annotated[int, note("sessions in this night")]


class NightSummary(Record, kw_only=True):
    """Suite with a flow on a board."""

    suite: str
    flow: str
    board: str
    cells: Annotated[list[NightCellSummary | None], note("a cell per night; null without a session")]


class NightTable(Record, kw_only=True):
    """Table of the last nights."""

    nights: Annotated[list[str], note("dates in UTC, newest first")]
    rows: list[NightSummary]
    left_out: Annotated[int, note("number of omitted rows")]


class HomeDocument(PageDocument, kw_only=True):
    """Home page. With a filter of sessions, nights and changes are null."""

    sessions: Annotated[list[SessionSummary], note("newest first, unless `order` is set")]
    total: Total
    pages: Pages
    nights: NightTable | None = None
    changes: ChangeList | None = None


class CauseDocument(PageDocument, kw_only=True):
    """Cases of a cause."""

    cause: CauseSummary
    cases: list[ChangedCaseRow]


class SpecialCell(Record, kw_only=True):
    """Cell of a special table."""

    text: str
    outcome: str
    case: Annotated[str, note("name of the linked case, or empty")]
    series: Annotated[str, note("ID of the linked series, or empty")]
    value: Annotated[Number, note("number before rounding")]
    unit: str


class SpecialTable(Record, kw_only=True):
    """Table with columns specific to the kind of session."""

    label: str
    columns: Annotated[list[tuple[str, bool]], note("name, and true for numbers")]
    rows: list[list[SpecialCell]]
    left_out: Annotated[int, note("number of omitted rows")]


class StoredFileName(Record, kw_only=True):
    """Stored file of a session."""

    what: str
    name: str
    file: Annotated[str, note("parameter `file` of /file; empty for a file outside the session")]
    bytes: int


class SessionDocument(PageDocument, kw_only=True):
    """Session with its cases."""

    session: SessionSummary
    cases: Annotated[list[CaseSummary], note("failing cases first, unless `order` is set")]
    total: Total
    pages: Pages
    table: Annotated[SpecialTable | None, note("of a bisection, study, bench, gate, matrix or evaluation")]
    missing: Annotated[list[str], note("first planned cases without a result")]
    missing_count: int
    resume: Annotated[str, note("command that resumes an unfinished session, or empty")]
    notes: list[str]
    parent: Annotated[SessionSummary | None, note("matrix that contains the session")]
    children: Annotated[list[SessionSummary], note("targets of a matrix")]
    files: list[StoredFileName]
    previous: Annotated[SessionSummary | None, note("previous session to compare with")]


class ReferenceComparison(Record, kw_only=True):
    """Comparison with a reference that does not decide the verdict."""

    against: str
    outcome: str
    outputs: list[dict[str, Any]]
    reason: str


class StoredTensorName(Record, kw_only=True):
    """Stored tensor of a case: parameters of /tensors."""

    kind: str
    name: str
    beside: str


class CaseDocument(PageDocument, kw_only=True):
    """Case with its stored record."""

    session: SessionSummary
    case: CaseSummary
    against: Annotated[str, note("reference that decides the verdict")]
    outputs: Annotated[list[dict[str, Any]], note("comparison of each output with this reference")]
    others: list[ReferenceComparison]
    disagreement: Annotated[str, note("how references disagree, or empty")]
    hint: str
    detail: str
    facts: Annotated[list[tuple[str, str]], note("provenance as names and values")]
    evidence: Annotated[list[tuple[str, str]], note("basis of the verdict as names and values")]
    attempts: Annotated[list[dict[str, str]], note("earlier attempts and confirmation runs")]
    repeat: Annotated[str, note("command that repeats the case, or empty")]
    tensors: list[StoredTensorName]
    triage: TriageEntry | None
    record: Annotated[dict[str, Any] | None, note("stored record; null if it exceeds the size limit of a page")]


class SearchHit(Record, kw_only=True):
    """Newest result of a case that matches a search."""

    case: CaseSummary
    session: SessionSummary
    layer: Annotated[str, note("first wrong layer by bisection that explains the failure; empty if unknown")]
    results: Annotated[int, note("number of matching results of the case")]


class SearchDocument(PageDocument, kw_only=True):
    """Cases and sessions that match a search, best match first."""

    cases: list[SearchHit]
    total: Total
    pages: Pages
    is_cut: Annotated[bool, note("true if more results match than hil reads")]
    sessions: Annotated[list[SessionSummary], note("newest first, at most 10")]
    total_sessions: int


class ConsolePageLine(Record, kw_only=True):
    """Line of a board's console."""

    number: Annotated[int, note("line in the file, from 1")]
    time_s: Seconds
    host_ns: Annotated[int, note("monotonic clock of the machine that read the console, in nanoseconds")]
    board_ns: Annotated[int | None, note("the board's monotonic clock; null if not known")]
    kind: Annotated[str, note("output, or note for hil's note about the link")]
    pattern: Annotated[str, note("name of the pattern that matches, or empty")]
    text: str


class ConsolePageDocument(PageDocument, kw_only=True):
    """Console lines of a session that contain a text, the last ones if there are more than a page shows."""

    session: SessionSummary
    file: Annotated[str, note("the parameter `file` of /console")]
    files: Annotated[list[str], note("all console files of the session")]
    lines: list[ConsolePageLine]
    total: Total


class TriagePageDocument(PageDocument, kw_only=True):
    """Triage entries, last changed first."""

    entries: list[TriageEntry]
    total: Total
    pages: Pages
    error: Annotated[str, note("reason why the triage file is unreadable, or empty")]


class GatePageDocument(PageDocument, kw_only=True):
    """Stored gates, newest first."""

    gates: list[SessionSummary]
    total: Total
    pages: Pages
