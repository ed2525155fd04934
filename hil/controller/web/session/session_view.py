"""Data for a session's page other than cases: special tables, missing cases, related sessions, logs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.records.base import make_record
from hil.controller.records.decisions.evaluation import EvaluationRecord
from hil.controller.storage.runs import MATRIX, RECORD
from hil.controller.web.files.consoles import list_consoles
from hil.controller.web.files.kept import KeptFile, list_logs, own_files
from hil.controller.web.index.sessions import IndexedSession, find_session, link_runs
from hil.controller.web.readers import BENCH, BISECT, EVALUATION, GATE, STUDY, TRACE
from hil.controller.web.readers.fields import read_document, read_list, read_mapping, read_mappings
from hil.controller.web.readers.gates import parse_gate
from hil.controller.web.readers.matrices import list_targets
from hil.controller.web.readers.runs import name_sides
from hil.controller.web.readers.traces import read_comparison
from hil.controller.web.tables import (
    ROWS,
    SessionTable,
    bisect_table,
    evaluation_table,
    gate_table,
    make_bench_table,
    make_matrix_table,
    make_study_table,
)
from hil.controller.web.text.entries import read_real, read_text
from hil.controller.web.text.names import quote_command
from hil.controller.workloads.evaluation.score_texts import list_scores
from hil.controller.workloads.suites.store import HEAD
from hil.errors import UsageError

# Maximum missing cases to list, and maximum planned cases to check.
_NAMED, _ASKED = 50, 20_000
_RECORDS = {
    "suite": HEAD,
    "run": RECORD,
    "bench": BENCH,
    "eval": EVALUATION,
    "bisect": BISECT,
    "study": STUDY,
    "gate": GATE,
    "matrix": MATRIX,
    "trace": TRACE,
}


@dataclass(frozen=True)
class SessionView:
    """Data for a session's page other than cases."""

    table: SessionTable | None = None  # cases with columns specific to the kind of session
    missing: Sequence[str] = ()  # first planned cases without a result
    missing_count: int = 0
    go_on: str = ""  # command that resumes an unfinished session
    parent: IndexedSession | None = None  # the matrix, if this session is a target of a matrix
    children: Sequence[IndexedSession] = ()  # targets of a matrix
    notes: Sequence[str] = ()
    logs: Sequence[Path] = ()
    consoles: Sequence[str] = ()  # files with console lines
    files: Sequence[KeptFile] = ()  # record, reports, tables


def view_session(database: sqlite3.Connection, session: IndexedSession, most: int = ROWS) -> SessionView:
    """Collect the data for a session's page. An unreadable record counts as empty, not as an error.

    Args:
        most: maximum rows of the special table.
    """
    name = _RECORDS.get(session.kind, "")
    # For a complete session without special columns, the index is sufficient.
    is_whole = session.finished and session.cases >= session.planned
    document: Mapping[str, Any] = {}
    if name and not (is_whole and session.kind in ("suite", "run")):
        try:
            document = read_document(Path(session.folder) / name)
        except (OSError, ValueError):
            document = {}
    children = _find_children(database, session, document)
    missing = [] if is_whole and not document else _list_missing(database, session, document)
    return SessionView(
        table=_make_table(database, session, document, children, most),
        missing=missing[:_NAMED],
        # At most _ASKED planned cases were checked, so the list may be incomplete.
        missing_count=max(len(missing), session.planned - session.cases if missing else 0),
        go_on="" if session.finished else _resume_command(session, document),
        parent=_find_parent(database, session),
        children=children,
        notes=_collect_notes(session, document),
        logs=list_logs(Path(session.folder)),
        consoles=list_consoles(Path(session.folder)),
        files=own_files(Path(session.folder)),
    )


def _make_table(
    database: sqlite3.Connection,
    session: IndexedSession,
    document: Mapping[str, Any],
    children: Sequence[IndexedSession],
    most: int,
) -> SessionTable | None:
    if session.kind == "matrix":
        return make_matrix_table(database, document, children, most)
    if session.kind == "gate":
        return _make_gate_table(database, document, most)
    tables = {"bisect": bisect_table, "study": make_study_table, "bench": make_bench_table, "eval": evaluation_table}
    return tables[session.kind](document, most) if document and session.kind in tables else None


def _make_gate_table(database: sqlite3.Connection, document: Mapping[str, Any], most: int) -> SessionTable | None:
    try:
        record = parse_gate(document)
    except UsageError:
        return None
    sides = [side for one in record.verdicts for side in (one.old, one.new) if side is not None]
    return gate_table(record, link_runs(database, {side.run for side in sides}), most)


def _find_children(
    database: sqlite3.Connection, session: IndexedSession, document: Mapping[str, Any]
) -> list[IndexedSession]:
    """Return the targets of a matrix that are sessions, in order."""
    found = []
    for name in list_targets(document) if session.kind == "matrix" else ():
        try:
            found.append(find_session(database, (PurePosixPath(session.id) / name).as_posix(), session.root))
        except UsageError:
            continue
    return found


def _find_parent(database: sqlite3.Connection, session: IndexedSession) -> IndexedSession | None:
    try:
        found = find_session(database, PurePosixPath(session.id).parent.as_posix(), session.root)
    except UsageError:
        return None
    return found if found.kind == "matrix" and found.id != session.id else None


def _list_missing(database: sqlite3.Connection, session: IndexedSession, document: Mapping[str, Any]) -> list[str]:
    """Return the planned cases without a result."""
    if session.kind == "suite":
        asked = [read_text(one) for one in read_list(document.get("ids"))[:_ASKED]]
        rows = database.execute(
            # Force this join order. SQLite has no statistics for the list and would scan it for each case.
            "select n.word from json_each(?) cross join words n on n.word = value"
            " cross join cases on session = ? and cases.name = n.key"
            " where outcome is not (select key from words where word = '')",
            (json.dumps(asked), session.key),
        ).fetchall()
        ended = {row[0] for row in rows}
        return [name for name in asked if name not in ended]
    rows = database.execute(
        "select n.word, o.word from cases join words n on n.key = cases.name join words o on o.key = cases.outcome"
        " where session = ? limit ?",
        (session.key, _ASKED),
    ).fetchall()
    if session.kind == "run":
        started = {read_text(one.get("path")) for one in read_mappings(document.get("cases"))}
        models = [read_text(one) for one in read_list(read_mapping(document.get("request")).get("models"))[:_ASKED]]
        waiting = [one for one in models if one not in started] if len(models) > 1 or not started else []
        return [row[0] for row in rows if not row[1]] + waiting
    return [] if session.kind == "trace" else [row[0] for row in rows if not row[1]]


def _resume_command(session: IndexedSession, document: Mapping[str, Any]) -> str:
    if session.kind in ("suite", "matrix") and not read_text(document.get("command")).startswith("pytest "):
        return read_text(document.get("command"))
    if session.kind == "run" and not read_text(document.get("command")):
        return quote_command(["hil", "run", "--resume", session.folder])
    if session.kind == "gate":
        search = [(name, read_text(document.get(name))) for name in ("bisect", "over")]
        boards = {read_text(one.get("second_board")) for one in read_mappings(document.get("verdicts"))}
        search += [("second-board", board) for board in sorted(boards)]
        options = [word for name, value in search if value not in ("", "commit") for word in (f"--{name}", value)]
        return quote_command(["hil", "gate", "--resume", session.folder, *options])
    if session.kind == "study" and session.command:
        return f"{session.command} --resume"
    return ""


def _collect_notes(session: IndexedSession, document: Mapping[str, Any]) -> list[str]:
    notes = []
    if session.kind == "bisect":
        notes += [read_text(document.get("verdict")), *map(read_text, read_list(document.get("notes"))[:_NAMED])]
    if session.kind == "suite":
        notes += [f"Left out: {read_text(one)}" for one in read_list(document.get("left_out"))[:_NAMED]]
    if session.kind == "gate":
        missing = (read_mapping(one) for one in read_list(document.get("unmeasured"))[:_NAMED])
        notes += [
            f"Not measured at this commit: {read_text(one.get('model'))} {read_text(one.get('case'))}"
            for one in missing
        ]
        if any(read_mapping(one).get("ratio") is not None for one in read_list(document.get("verdicts"))[:_NAMED]):
            notes.append(_GATE_RATIO)
    if session.kind == "matrix":
        errors = ((one.get("name"), read_mapping(one.get("error"))) for one in read_mappings(document.get("targets")))
        notes += [f"{read_text(name)}: {read_text(error.get('message'))}" for name, error in errors if error]
    if session.kind == "eval":
        notes += _describe_scores(document)
    if session.kind == "bench" and (compared := read_mapping(document.get("comparison"))):
        notes += filter(None, (format_comparison(compared), _explain_estimate(compared, document)))
    if session.kind == "bench":
        for one in read_mappings(document.get("prompts")):
            times = {name: read_mapping(one.get(name)) for name in ("prefill", "ttft", "tpot")}
            prompt = read_text(one.get("prompt"))
            notes += [f"{prompt}, {name}: {format_comparison(found)}" for name, found in times.items() if found]
    if session.kind == "trace" and (found := read_comparison(Path(session.folder), document)):
        told = (read_text(found.get(name)) for name in ("name", "outcome", "reason"))
        notes.append(": ".join(filter(None, told)))
    return [note for note in notes if note]


# Times of a round are compared at this percentile, as in `hil.controller.analysis.bench.stats`.
_ESTIMATE = (
    "it compares the fastest iterations of each round (5th percentile), and takes the mean of the rounds without the "
    "lowest and highest fifth, so that other load on the board changes it less than the medians"
)
_GATE_RATIO = (
    "Ratio is measured again in alternating rounds, new divided by baseline; the medians are from the stored runs, so "
    f"their quotient can differ. {_ESTIMATE[0].upper()}{_ESTIMATE[1:]}."
)


def _explain_estimate(compared: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """Explain a bench's ratio if it differs from the quotient of the medians in the table. Otherwise return ""."""
    ratio = read_real(compared.get("ratio"))
    sides = [read_real(read_mapping(side.get("times")).get("p50_ns")) for _, side in name_sides(document)]
    if ratio is None or len(sides) != 2 or not sides[0] or not sides[1]:
        return ""
    quotient = sides[1] / sides[0]
    if f"{quotient:.4g}" == f"{ratio:.4g}":
        return ""
    return f"The quotient of the medians in the table is {quotient:.4g}. The ratio above is an estimate: {_ESTIMATE}."


def _describe_scores(document: Mapping[str, Any]) -> list[str]:
    try:
        return list_scores(make_record(document, EvaluationRecord))
    except UsageError:
        return []


def format_comparison(compared: Mapping[str, Any]) -> str:
    """Format a bench's comparison: ``B takes 1.08 times as long as A (99 % interval 1.05 to 1.11): slower``."""
    interval = read_mapping(compared.get("interval"))
    try:
        ratio, low, high = (float(one) for one in (compared["ratio"], interval["low"], interval["high"]))
        level = f"{float(interval['level']):.0%}"
    except (KeyError, TypeError, ValueError, OverflowError):
        return read_text(compared.get("verdict"))
    sure = f"{level} interval {low:.4g} to {high:.4g}"
    return f"B takes {ratio:.4g} times as long as A ({sure}): {read_text(compared.get('verdict'))}"
