"""What a query gave, as text and as JSON."""

from __future__ import annotations

from typing import Any

from hil.controller.analysis.profile.query import Table, Value
from hil.controller.storage.texts import plain


def table_text(table: Table) -> str:
    """A line for the columns' names and one for each row, in columns; numbers stand to the right. "" for no column."""
    if not table.columns:
        return ""
    lines = [list(table.columns), *([_text(value) for value in row] for row in table.rows)]
    numeric = [
        all(isinstance(row[place], (int, float, type(None))) for row in table.rows)
        for place, _ in enumerate(table.columns)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(one, widths, numeric, strict=True)
        ).rstrip()
        + "\n"
        for one in lines
    )


def table_record(table: Table) -> dict[str, Any]:
    """The same for JSON: blobs as hexadecimal digits."""
    return {"columns": list(table.columns), "rows": [[_plain(value) for value in row] for row in table.rows]}


def _plain(value: Value) -> Value:
    return value.hex() if isinstance(value, bytes) else value


def _text(value: Value) -> str:
    if value is None:
        return "NULL"
    return f"{value:g}" if isinstance(value, float) else " ".join(plain(str(_plain(value))).split("\n"))
