"""Tables as HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any


def make_html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table with escaped texts. Floats have four digits, and None is an empty cell."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_make_cell, row))}</tr>" for row in rows)
    return f"<table><caption>{html.escape(title)}</caption><tr>{head}</tr>{body}</table>"


def _make_cell(value: Any) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        text = f"{value:.4g}" if isinstance(value, float) else f"{value:,}"
        return f'<td style="text-align: right">{text}</td>'
    return f'<td style="text-align: left">{html.escape(str(value))}</td>'
