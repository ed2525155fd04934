"""Read matrices: sessions with one session per target, each in a subdirectory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.controller.storage.runs import RECORD, make_safe_name
from hil.controller.web.readers.fields import (
    choose_exit_outcome,
    read_common_fields,
    read_document,
    read_mapping,
    read_mappings,
)
from hil.controller.web.text.entries import SessionEntry, read_int, read_text, read_texts
from hil.controller.web.text.names import escape_name
from hil.controller.workloads.suites.store import HEAD
from hil.core.results import choose_exit_code


def list_targets(document: Mapping[str, Any]) -> list[str]:
    """Return the target names of a matrix, which are also the names of their directories."""
    names = (read_text(one.get("name")) for one in read_mappings(document.get("targets")))
    return [name for name in dict.fromkeys(names) if name and make_safe_name(name) == name]


def read_matrix(session_id: str, folder: Path, document: Mapping[str, Any]) -> SessionEntry:
    """Read a matrix. A matrix has no cases, because cases belong to the targets."""
    targets = list_targets(document)
    known = {**read_common_fields(document), "command": read_text(document.get("again"))}
    outcome = read_text(document.get("outcome"))
    if "outcome" not in document:  # the user combined existing sessions into a matrix
        codes = [code for name in targets if (code := _exit_code(folder / name)) is not None]
        known["exit_code"] = choose_exit_code(codes) if codes else None
        outcome = choose_exit_outcome(known["exit_code"] or 0) if codes else ""
    errors = [read_mapping(one.get("error")) for one in read_mappings(document.get("targets"))]
    worse = next((read_text(one.get("outcome")) for one in errors if one.get("outcome")), "")
    title = read_text(document.get("title")) or escape_name(folder.name)
    return SessionEntry(
        session_id,
        "matrix",
        read_text(f"{title} on {', '.join(targets)}" if targets else title),
        **known,
        boards=read_texts(targets),
        outcome=worse or outcome,
    )


def _exit_code(folder: Path) -> int | None:
    for name in (HEAD, RECORD):
        try:
            return read_int(read_document(folder / name).get("exit_code"))
        except (OSError, ValueError):
            continue
    return None
