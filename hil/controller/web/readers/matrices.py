"""Read matrices: sessions with one session per target, each in a subdirectory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.storage.runs import RECORD, safe_name
from hil.controller.web.readers.fields import common, mapping, mappings, outcome_of_exit, read_document
from hil.controller.web.text.entries import SessionEntry, text, texts, whole
from hil.controller.web.text.names import said
from hil.controller.workloads.suites.store import HEAD
from hil.core.results import gravest


def targets_of(document: Mapping[str, Any]) -> list[str]:
    """Return the target names of a matrix, which are also the names of their directories."""
    names = (text(one.get("name")) for one in mappings(document.get("targets")))
    return [name for name in dict.fromkeys(names) if name and safe_name(name) == name]


def read_matrix(session_id: str, folder: Path, document: Mapping[str, Any]) -> SessionEntry:
    """Read a matrix. A matrix has no cases, because cases belong to the targets."""
    targets = targets_of(document)
    known = {**common(document), "command": text(document.get("again"))}
    outcome = text(document.get("outcome"))
    if "outcome" not in document:  # the user combined existing sessions into a matrix
        codes = [code for name in targets if (code := _exit_code(folder / name)) is not None]
        known["exit_code"] = gravest(codes) if codes else None
        outcome = outcome_of_exit(known["exit_code"] or 0) if codes else ""
    errors = [mapping(one.get("error")) for one in mappings(document.get("targets"))]
    worse = next((text(one.get("outcome")) for one in errors if one.get("outcome")), "")
    title = text(document.get("title")) or said(folder.name)
    return SessionEntry(
        session_id,
        "matrix",
        text(f"{title} on {', '.join(targets)}" if targets else title),
        **known,
        boards=texts(targets),
        outcome=worse or outcome,
    )


def _exit_code(folder: Path) -> int | None:
    for name in (HEAD, RECORD):
        try:
            return whole(read_document(folder / name).get("exit_code"))
        except (OSError, ValueError):
            continue
    return None
