"""Split a console's bytes into lines that are safe to print.

A console sends bytes from an untrusted board: without line ends, in any encoding, and with control sequences that would
change the user's terminal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hil.core.text import escape_controls

# Maximum bytes of a line. A longer line is split.
MAX_LINE_BYTES = 4096
# ECMA-48: control sequences (CSI), strings (OSC, DCS, SOS, PM, APC) with their end or to the end of the line, and other
# escape sequences.
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)"
    r"|\x1b[ -/]*[0-~]"
    r"|\x9b[0-?]*[ -/]*[@-~]"
)
# A carriage return without a line feed starts the line again, such as in a progress bar. A match begins at the first of
# several carriage returns, so that the search takes linear time.
_LINE_END = re.compile(rb"(?<!\r)\r*\n|(?<!\r)\r+(?=[^\r\n])")

LineKind = Literal["output", "note"]


@dataclass(frozen=True)
class ConsoleLine:
    """Line of a console.

    Attributes:
        host_ns: arrival of the first byte by :func:`hil.core.clock.get_time_ns` of this machine.
        time_s: arrival in seconds since the epoch.
        kind: ``output`` of the board, or a ``note`` of hil about the link.
    """

    host_ns: int
    time_s: float
    text: str
    kind: LineKind = "output"


class LineSplitter:
    """Splits chunks of bytes into lines. Keeps at most :data:`MAX_LINE_BYTES` bytes of an unfinished line."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def has_rest(self) -> bool:
        """True if a line has begun but not ended."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """Add bytes. Return the lines that they complete, without empty lines."""
        found = []
        rest, start = self._rest + data, 0
        for end in _LINE_END.finditer(rest):
            found += _split_long_line(rest[start : end.start()])
            start = end.end()
        pieces = _split_long_line(rest[start:])
        found += pieces[:-1]
        self._rest = pieces[-1] if pieces else b""
        return [text for text in map(clean_line, found) if text]

    def flush(self) -> list[str]:
        """Return the unfinished line, such as a prompt, and start a new line."""
        rest, self._rest = self._rest, b""
        text = clean_line(rest)
        return [text] if text else []


def _split_long_line(line: bytes) -> list[bytes]:
    return [line[at : at + MAX_LINE_BYTES] for at in range(0, len(line), MAX_LINE_BYTES)]


def clean_line(line: bytes) -> str:
    """Return a line without control sequences. Escape other control characters and bytes that are not UTF-8."""
    text = line.decode("utf-8", errors="backslashreplace")
    return escape_controls(_SEQUENCE.sub("", text).replace("\r", "")).rstrip()
