"""Store users' remarks on the histories of sessions and cases, as lines of a file in the runs directory.

The file is append-only. A correction or deletion is a new line that refers to the old line. Pages show the current
state, and the file preserves all versions with times.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.web.session.records import own
from hil.controller.web.text.entries import read_real, read_text
from hil.controller.web.text.roots import number_roots
from hil.core.bounded_json import parse_json
from hil.core.digest import digest_of
from hil.core.files import open_file
from hil.errors import UsageError

NAME = "hil-annotations.jsonl"
MAX_CHARS = 500
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class Annotation:
    """Remark on a session in a history."""

    root: int
    session: str  # session id
    case: str  # "" for the whole session
    text: str
    created: float | None
    id: str  # identifier for corrections
    corrected: float | None = None  # time of the last correction


def read_annotations(roots: Sequence[Path]) -> list[Annotation]:
    """Return the current remarks of runs directories, oldest first. Unreadable lines are skipped."""
    return [one for number, root in number_roots(roots).items() for one in _read_remarks(root, number).values()]


def _read_remarks(root: Path, number: int) -> dict[str, Annotation]:
    path = root / NAME
    found: dict[str, Annotation] = {}
    try:
        if not own(root, path):
            return found
        with open_file(path) as file:
            lines = file.read(_MAX_BYTES).split(b"\n")
    except (OSError, UsageError):  # open_file() rejects a named pipe, which would block
        return found
    for line in lines:
        try:
            record = parse_json(line)
            told, corrects = read_text(record.get("text")), read_text(record.get("corrects"))
        except (ValueError, AttributeError, RecursionError):
            continue
        created = read_real(record.get("created"))
        if corrects and told and corrects in found:
            found[corrects] = replace(found[corrects], text=told, corrected=created)
        elif corrects:
            found.pop(corrects, None)
        elif told:
            names = (read_text(record.get("session")), read_text(record.get("case")))
            name = digest_of(line).rpartition(":")[2][:16]
            found[name] = Annotation(number, *names, told, created, name)
    return found


def annotate(root: Path, session: str, case: str, remark: str) -> None:
    """Store a remark. Raises UsageError if the remark is empty or too long, or the file is full or not writable."""
    _append_record(root, {"session": session, "case": read_text(case), "text": _check_remark(remark)})


def correct_remark(root: Path, remark: str, told: str) -> None:
    """Replace or delete a remark.

    Args:
        remark: id of the remark.
        told: the new text; "" deletes the remark.

    Raises:
        UsageError: the remark does not exist, the text is too long, or the file is full or not writable.
    """
    if remark not in _read_remarks(root, 0):
        raise UsageError("remark not found", hint="reload the page")
    _append_record(root, {"corrects": remark, "text": _check_remark(told) if told else ""})


def _check_remark(remark: str) -> str:
    remark = " ".join(remark.split())
    if not remark or len(remark) > MAX_CHARS:
        raise UsageError(f"a remark must have 1 to {MAX_CHARS} characters, got {len(remark)}")
    return remark


def _append_record(root: Path, record: Mapping[str, Any]) -> None:
    path = root / NAME
    line = json.dumps({"schema": 1, "created": time.time(), **record}).encode() + b"\n"
    try:
        if not own(root, path):
            raise UsageError(f"{NAME} is a link outside the runs directory")
        place = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            if os.fstat(place).st_size + len(line) > _MAX_BYTES:
                raise UsageError(f"{NAME} is full", hint="delete unneeded lines from the file")
            os.write(place, line)
        finally:
            os.close(place)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
