"""Read the console lines in a session's directory. The files of other people are untrusted."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hil.controller.records.console import ConsoleEntry
from hil.controller.web.files.kept import own
from hil.core.console_config import BUILT_IN_PATTERNS
from hil.core.files import read_file
from hil.core.line_pattern import MATCHED_CHARACTERS
from hil.core.text import escape_controls

FOLDER = "consoles"
_MAX_FILES = 100
_MAX_BYTES = 16 << 20
# No clock has larger numbers, and a larger integer may not fit in a float.
_MAX_NS = 1 << 63
_decoder = msgspec.json.Decoder(ConsoleEntry)
_PATTERNS = [(one.name, re.compile(one.pattern)) for one in BUILT_IN_PATTERNS]


@dataclass(frozen=True)
class ShownLine:
    """Line of a console on a page."""

    number: int
    entry: ConsoleEntry
    pattern: str  # name of the built-in pattern that matches, or ""


def list_consoles(folder: Path) -> list[str]:
    """Return the console files of a session, relative to its directory."""
    try:
        paths = sorted((folder / FOLDER).glob("*.jsonl"))[:_MAX_FILES]
    except OSError:
        return []
    return [f"{FOLDER}/{path.name}" for path in paths if own(folder, path)]


def read_console(path: Path, query: str = "") -> list[ShownLine]:
    """Return the lines of a file that contain a text, ignoring case. Invalid lines are left out.

    Raises:
        OSError: the file cannot be read, or is too large.
    """
    wanted = query.casefold()
    found = []
    for number, data in enumerate(read_file(path, _MAX_BYTES).splitlines(), 1):
        with contextlib.suppress(msgspec.DecodeError, UnicodeError):
            entry = _decoder.decode(data)
            if max(abs(entry.host_ns), abs(entry.board_ns or 0)) > _MAX_NS:
                continue
            if wanted in entry.text.casefold():
                found.append(ShownLine(number, entry, _find_pattern(entry)))
    return found


def _find_pattern(entry: ConsoleEntry) -> str:
    text = entry.text[:MATCHED_CHARACTERS]
    return next((name for name, one in _PATTERNS if entry.kind == "output" and one.search(text)), "")


def make_console_rows(lines: Sequence[ShownLine]) -> list[list[object]]:
    """Return the rows of a table with the columns line, time_s, host_ns, board_ns, kind, pattern and text."""
    return [
        [
            *(one.number, one.entry.time_s, one.entry.host_ns, one.entry.board_ns, one.entry.kind, one.pattern),
            escape_controls(one.entry.text),
        ]
        for one in lines
    ]
