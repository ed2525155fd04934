"""What people wrote beside a session's or a case's history: lines of a file in the folder of runs.

A line is never changed: who corrects a remark, or takes it back, writes a line that says so. Pages show what holds now,
and the file keeps what was said and when.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.web.entries import real, text
from hil.controller.web.records import own
from hil.core.digest import digest_of
from hil.core.files import open_file
from hil.errors import UsageError

NAME = "hil-annotations.jsonl"
MOST_CHARS = 500
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Annotation:
    """A remark on a session's place in a history."""

    root: int
    session: str  # its id
    case: str  # "" is the whole session
    text: str
    created: float | None
    id: str  # what a correction names it by
    corrected: float | None = None  # when its text was changed last


def read_annotations(roots: Sequence[Path]) -> list[Annotation]:
    """All that hold of some folders of runs, the oldest first; a line that cannot be read is passed over."""
    return [one for number, root in enumerate(roots) for one in _read(root, number).values()]


def _read(root: Path, number: int) -> dict[str, Annotation]:
    path = root / NAME
    found: dict[str, Annotation] = {}
    try:
        if not own(root, path):
            return found
        with open_file(path) as file:
            lines = file.read(_MOST_BYTES).split(b"\n")
    except (OSError, UsageError):  # a pipe in its place would be waited for
        return found
    for line in lines:
        try:
            record = json.loads(line)
            told, corrects = text(record.get("text")), text(record.get("corrects"))
        except (ValueError, AttributeError, RecursionError):
            continue
        created = real(record.get("created"))
        if corrects and told and corrects in found:
            found[corrects] = replace(found[corrects], text=told, corrected=created)
        elif corrects:
            found.pop(corrects, None)
        elif told:
            names = (text(record.get("session")), text(record.get("case")))
            name = digest_of(line).rpartition(":")[2][:16]
            found[name] = Annotation(number, *names, told, created, name)
    return found


def annotate(root: Path, session: str, case: str, remark: str) -> None:
    """Write a remark down. Raises UsageError: it is empty or too long, or the folder takes no more."""
    _write(root, {"session": session, "case": text(case), "text": _checked(remark)})


def correct(root: Path, remark: str, told: str) -> None:
    """Give a remark another text, or take it back.

    Args:
        remark: its id.
        told: the new text; "" takes it back.

    Raises:
        UsageError: it is not there any more, the text is too long, or the folder takes no more.
    """
    if remark not in _read(root, 0):
        raise UsageError("that remark is not there any more", hint="reload the page")
    _write(root, {"corrects": remark, "text": _checked(told) if told else ""})


def _checked(remark: str) -> str:
    remark = " ".join(remark.split())
    if not remark or len(remark) > MOST_CHARS:
        raise UsageError(f"a remark has 1 to {MOST_CHARS} characters, not {len(remark)}")
    return remark


def _write(root: Path, record: Mapping[str, Any]) -> None:
    path = root / NAME
    line = json.dumps({"schema": 1, "created": time.time(), **record}).encode() + b"\n"
    try:
        if not own(root, path):
            raise UsageError(f"{NAME} is a link to elsewhere")
        place = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            if os.fstat(place).st_size + len(line) > _MOST_BYTES:
                raise UsageError(f"{NAME} is full", hint="take out lines that nobody needs")
            os.write(place, line)
        finally:
            os.close(place)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
