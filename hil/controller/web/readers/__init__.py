"""Read a stored session of any kind and any schema version for the index.

Records may come from any user and from any hil version. Readers ignore missing values and values of a wrong type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.controller.storage.runs import MATRIX, RECORD
from hil.controller.web.readers.analyses import read_bisect, read_study
from hil.controller.web.readers.fields import read_document
from hil.controller.web.readers.gates import read_gate
from hil.controller.web.readers.matrices import read_matrix
from hil.controller.web.readers.runs import read_bench, read_evaluation, read_run
from hil.controller.web.readers.suites import read_lines, read_suite
from hil.controller.web.readers.traces import is_trace, read_trace
from hil.controller.web.text.entries import CaseEntry, SessionEntry, read_text
from hil.controller.web.text.names import escape_name
from hil.controller.workloads.suites.store import HEAD
from hil.controller.workloads.traces.trace import FILE as TRACE

__all__ = ["BENCH", "BISECT", "EVALUATION", "GATE", "RECORDS", "STUDY", "TRACE", "read_lines", "read_session"]

BENCH, BISECT, GATE, STUDY = "bench.json", "bisect.json", "gate.json", "study.json"
EVALUATION = "eval.json"
# A directory with one of these files is a session. The first match determines the kind.
RECORDS = {
    MATRIX: "matrix",
    HEAD: "suite",
    BENCH: "bench",
    BISECT: "bisect",
    STUDY: "study",
    GATE: "gate",
    EVALUATION: "eval",
    RECORD: "run",
    TRACE: "trace",
}


def read_session(folder: Path, record: str, session_id: str) -> tuple[SessionEntry, list[CaseEntry]] | None:
    """Read the session of a directory and the cases in its record. Cases of a suite are in a separate lines file.

    An unreadable record becomes a session of kind "damaged" with the reason. Return None if another tool wrote a file
    of the same name.
    """
    path = folder / record
    try:
        document = read_document(path)
    except (OSError, ValueError) as error:
        reason = read_text(f"{record} cannot be read: {error}")
        return SessionEntry(
            session_id, "damaged", escape_name(folder.name), _read_modified_time(path), error=reason
        ), []
    if record == TRACE and not is_trace(document):
        return None
    session, cases = _read_record(session_id, folder, record, document)
    return (session if session.created is not None else replace(session, created=_read_modified_time(path))), cases


def _read_record(
    session_id: str, folder: Path, record: str, document: Mapping[str, Any]
) -> tuple[SessionEntry, list[CaseEntry]]:
    kind = RECORDS[record]
    if kind == "matrix":
        return read_matrix(session_id, folder, document), []
    if kind == "gate":
        return read_gate(session_id, folder, document), []
    if kind == "suite":
        return read_suite(session_id, document), []
    if kind == "bisect":
        return read_bisect(session_id, document)
    readers = {"bench": read_bench, "eval": read_evaluation, "study": read_study, "trace": read_trace, "run": read_run}
    return readers[kind](session_id, folder, document)


def _read_modified_time(path: Path) -> float | None:
    """Return the modification time of a file, which replaces a missing time in the record."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
