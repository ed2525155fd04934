"""Keep the console lines of a run in a file of limited size: the first and the last part."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.devices.console.spool import encode_entry, make_entry
from hil.controller.records.console import ConsoleQuoteRecord, StoredConsole
from hil.controller.storage.runs import convert_write_errors
from hil.core.clock import ClockFit
from hil.core.console_config import BUILT_IN_PATTERNS, ConsolePattern
from hil.core.files import write_atomic
from hil.core.line_pattern import MATCHED_CHARACTERS, LinePattern
from hil.errors import ConsoleQuote

# Maximum bytes of text in the first and the last part.
PART_BYTES = 1 << 20
# A line needs about this number of bytes in addition to the text.
_ENTRY_BYTES = 100
MAX_QUOTES = 50


class ConsoleRecording:
    """Console lines of a board during a run. Thread-safe.

    Args:
        patterns: patterns of the board's config, which take precedence over the built-in patterns.
    """

    def __init__(self, patterns: Sequence[ConsolePattern] = ()) -> None:
        self._patterns = [
            *((one, LinePattern(one.pattern)) for one in patterns),
            *((one, LinePattern(one.pattern, is_fast=True)) for one in BUILT_IN_PATTERNS),
        ]
        self._mutex = threading.Lock()
        self._first: list[ConsoleLine] = []
        self._last: deque[ConsoleLine] = deque()
        self._first_bytes = self._last_bytes = 0
        self._omitted = self._count = 0
        self._quotes: deque[ConsoleQuote] = deque(maxlen=MAX_QUOTES)
        self._fits: list[ClockFit] = []

    def add(self, lines: Sequence[ConsoleLine]) -> None:
        """Add lines in order."""
        with self._mutex:
            for line in lines:
                self._add_line(line)

    def _add_line(self, line: ConsoleLine) -> None:
        self._count += 1
        if (quote := self._match_line(line)) is not None:
            self._quotes.append(quote)
        size = len(line.text) + _ENTRY_BYTES
        if not self._last and self._first_bytes + size <= PART_BYTES:
            self._first.append(line)
            self._first_bytes += size
            return
        self._last.append(line)
        self._last_bytes += size
        while self._last_bytes > PART_BYTES:
            self._last_bytes -= len(self._last.popleft().text) + _ENTRY_BYTES
            self._omitted += 1

    def _match_line(self, line: ConsoleLine) -> ConsoleQuote | None:
        text = line.text[:MATCHED_CHARACTERS]
        if line.kind != "output":
            return None
        for pattern, expression in self._patterns:
            if expression.matches(text):
                return ConsoleQuote(pattern.name, pattern.meaning, text, line.host_ns)
        return None

    def set_clock(self, fit: ClockFit | None) -> None:
        """Set the board's clock from now on. A rebooted board has a new clock."""
        if fit is not None:
            with self._mutex:
                self._fits = [*self._fits[-7:], fit]

    def find_quotes(self, since_ns: int = 0) -> list[ConsoleQuote]:
        """Return the lines since a host time that match a pattern: the latest :data:`MAX_QUOTES`."""
        with self._mutex:
            return [
                replace(one, board_ns=self._convert_to_board(one.host_ns))
                for one in self._quotes
                if one.host_ns >= since_ns
            ]

    def get_lines(self) -> list[ConsoleLine]:
        """Return the lines that are still known."""
        with self._mutex:
            return [*self._first, *self._last]

    def _convert_to_board(self, host_ns: int) -> int | None:
        """Convert to the board's clock; None if no known clock was running. A board's clock starts at 0."""
        for fit in reversed(self._fits):
            if (board_ns := fit.to_board(host_ns)) >= 0:
                return board_ns
        return None

    def save(self, folder: Path, file: str, board: str, boot_s: float | None = None) -> StoredConsole:
        """Write the lines to ``folder/file``, if there are any. Return the console's entry for a record.

        Raises StorageError.
        """
        quotes = [ConsoleQuoteRecord(**vars(quote)) for quote in self.find_quotes()]
        with self._mutex:
            entries = [make_entry(line, self._convert_to_board(line.host_ns)) for line in (*self._first, *self._last)]
            if self._omitted:
                at = len(self._first)
                note = ConsoleLine(entries[at].host_ns, entries[at].time_s, f"{self._omitted} lines omitted", "note")
                entries.insert(at, make_entry(note))
            count, omitted = self._count, self._omitted
        if count:
            path = folder / file
            with convert_write_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, b"".join(map(encode_entry, entries)))
        return StoredConsole(
            board=board, file=file if count else "", lines=count, omitted=omitted, boot_s=boot_s, quotes=quotes
        )
