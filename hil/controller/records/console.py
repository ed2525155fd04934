"""Records of a board's console."""

from __future__ import annotations

from typing import Annotated, Literal

from hil.controller.records.base import Count, Record, note

HostTime = Annotated[int, note("monotonic clock of the machine that reads the console, in nanoseconds")]


class ConsoleEntry(Record, kw_only=True):
    """Line of a console: a line of a file in `consoles`, and the output of `hil board console --json`."""

    host_ns: HostTime
    board_ns: Annotated[int | None, note("the board's monotonic clock; null if not known")] = None
    time_s: Annotated[float, note("seconds since the epoch")]
    kind: Annotated[Literal["output", "note"], note("`note`: hil's note about the link")] = "output"
    text: Annotated[str, note("without control sequences; other bytes than UTF-8 as \\xff")]


class ConsoleQuoteRecord(Record, kw_only=True):
    """Line of the console that explains a failure."""

    pattern: Annotated[str, note("name of the pattern")]
    meaning: str
    text: str
    host_ns: HostTime
    board_ns: int | None = None


class StoredConsole(Record, kw_only=True):
    """Console of a board during a run."""

    board: str
    file: Annotated[str, note("JSON lines, relative to the record's directory; empty if the console printed nothing")]
    lines: Count
    omitted: Annotated[Count, note("lines that are missing between the first and the last part of the file")] = 0
    boot_s: Annotated[float | None, note("seconds from the power action to the boot pattern; null without one")] = None
    quotes: Annotated[list[ConsoleQuoteRecord], note("lines that match a pattern, at most 50")] = []
