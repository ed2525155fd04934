"""Parts of multiple documents of `hil web`: sessions, cases, causes, charts."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Number, Record, note

Seconds = Annotated[float | None, note("seconds since the epoch; null if unknown")]
Total = Annotated[int, note("number of rows on all pages", ge=0)]
Pages = Annotated[int, note("number of pages; the parameter `page` selects one", ge=1)]


class PageDocument(Record, kw_only=True):
    """JSON form of a page."""

    schema: Literal[1] = 1


class SessionSummary(Record, kw_only=True):
    """Stored run, suite, bench, bisection, study, gate, trace or matrix."""

    id: str
    root: Annotated[int, note("number of the directory in addresses; 0 may be omitted")]
    kind: str
    title: str
    verdict: Annotated[str, note("board, error, fail, unfinished, pass or quiet: the most severe kind of outcome")]
    created: Seconds
    finished: bool
    exit_code: int | None
    cases: Count
    planned: Annotated[int, note("planned cases; 0 if unknown")]
    failing: Count
    suite: str
    flow: str
    boards: list[str]
    runtimes: list[str]
    compilers: list[str]
    models: list[str]
    labels: list[str]
    branch: str
    commit: str
    command: Annotated[str, note("command that repeats the session; empty if unknown")]
    error: Annotated[str, note("reason why the record is unreadable, or empty")]
    outcomes: Annotated[dict[str, int], note("number of cases by outcome")]
    versions: dict[str, str]


class CaseSummary(Record, kw_only=True):
    """Case of a session, without the statistics of its outputs."""

    name: str
    number: Annotated[int, note("position in the session, from 0")]
    outcome: str
    ended: Annotated[str, note("outcome without expectations, if different")]
    stage: str
    message: str
    model: str
    op: str
    flow: str
    runtime: str
    board: str
    device_p50_ns: Number
    device_p90_ns: Number
    iterations: int
    cold: bool
    grade: Annotated[str, note("A, B or F; empty without a grade")]
    host_s: Number
    compile_s: Number
    program_bytes: int | None
    joules: Annotated[float | None, note("energy of an inference above idle; null if not measured, or refused")]
    max_abs: Annotated[Number, note("worst value in all outputs, as max_ulp and sqnr_db")]
    max_ulp: Number
    sqnr_db: Number
    started: Seconds


class BaselineName(Record, kw_only=True):
    """Night, branch or label after which changes are new."""

    kind: Annotated[str, note("night, branch or label; empty without sessions")]
    value: str


class CauseSummary(Record, kw_only=True):
    """Cause of multiple changed cases."""

    key: Annotated[str, note("the parameter `key` of /cause")]
    title: str
    explanation: Annotated[str, note("why hil groups the cases")]
    kind: Annotated[str, note("layer, tools, board, commit, operator or model")]
    subject: str
    what: Annotated[str, note("broke or slower")]
    date: Annotated[str, note("first night with the change, as YYYY-MM-DD in UTC")]
    boards: list[str]
    names: Annotated[list[str], note("names of the cases")]
    ratio: Annotated[Number, note("median of time after / time before; null for failures")]


class ChangeList(Record, kw_only=True):
    """Causes of the changed cases since a baseline."""

    baseline: BaselineName
    causes: list[CauseSummary]
    is_cut: Annotated[bool, note("true if there are more changes than hil reads")]
    unjudged: Annotated[int, note("histories that hil has not analysed yet")]


class ChangedCaseDetails(Record, kw_only=True):
    """Case that fails or is slower."""

    case: str
    what: Annotated[str, note("broke or slower")]
    board: str
    suite: str
    flow: str
    runtime: str
    model: str
    op: str
    layer: Annotated[str, note("first wrong layer by bisection; empty if unknown")]
    outcome: str
    tools: Annotated[list[str], note("changed versions")]
    ratio: Number


class ChangedCaseRow(Record, kw_only=True):
    """Changed case with the first session that has the change."""

    change: ChangedCaseDetails
    created: Seconds
    before: Annotated[Number, note("median time in nanoseconds of a slower case")]
    after: Number
    title: str
    commit: str
    earlier_commit: str
    message: str
    link: Annotated[str, note("query of the session")]
    history: Annotated[str, note("query of the history of the case")]


class PageErrorDocument(PageDocument, kw_only=True):
    """Error of a page."""

    status: Annotated[int, note("HTTP status", ge=400, le=599)]
    kind: Annotated[str, note("a class of hil/errors.py, or HTTPError")]
    error: str
    hint: Annotated[str, note("suggested next step, or empty")]
