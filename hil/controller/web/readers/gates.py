"""Read gates: sessions with a verdict per series of a history, but without cases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.records.base import check_schema, make_record
from hil.controller.records.decisions.gate import GateRecord
from hil.controller.storage.runs import RECORD
from hil.controller.web.readers.fields import choose_exit_outcome, read_common_fields, read_document
from hil.controller.web.text.entries import SessionEntry, read_text, read_texts
from hil.controller.web.text.names import escape_name
from hil.controller.workloads.gate.verdict_texts import COMMIT_DIGITS, describe_total
from hil.errors import UsageError


def parse_gate(document: Any) -> GateRecord:
    """Convert the document of gate.json. Raises UsageError if it is invalid or from a newer hil."""
    check_schema(document, Path("gate.json"))
    return make_record(document, GateRecord)


def read_gate(session_id: str, folder: Path, document: Mapping[str, Any]) -> SessionEntry:
    """Read a gate. A gate has no cases, because cases belong to the judged runs."""
    try:
        run = read_document(folder / RECORD)
    except (OSError, ValueError):
        run = {}
    known = {**read_common_fields(document), "command": read_text(run.get("command"))}
    try:
        record = parse_gate(document)
    except UsageError as error:
        known["finished"] = True
        reason = read_text(f"gate.json cannot be read: {error.message}")
        return SessionEntry(session_id, "gate", escape_name(folder.name), **known, error=reason)
    commit = read_text(record.commit)[:COMMIT_DIGITS] or "newest measurements"
    keys = [one.key for one in record.verdicts]
    return SessionEntry(
        session_id,
        "gate",
        read_text(f"{commit} against {read_text(record.baseline)}: {describe_total(record).partition(';')[0]}"),
        **{**known, "commit": read_text(record.commit)},
        boards=read_texts([one.board for one in keys]),
        runtimes=read_texts([one.runtime for one in keys]),
        models=read_texts([one.model for one in keys]),
        outcome=choose_exit_outcome(record.exit_code) if record.finished else "",
    )
