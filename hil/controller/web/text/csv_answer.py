"""Stream the rows of a table as CSV. Cells are escaped, so that spreadsheets do not run cells as formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastapi.responses import Response, StreamingResponse

from hil.controller.storage.runs import make_safe_name
from hil.controller.workloads.suites.reports.tables import format_csv

# Number of rows per chunk, and maximum rows per table.
AT_A_TIME = 2_000
MAX_ROWS = 200_000
Rows = Sequence[Sequence[Any]]


def respond_with_rows(name: str, columns: Sequence[str], rows: Rows) -> Response:
    """Return a response with rows from memory."""
    parts = [rows[at : at + AT_A_TIME] for at in range(0, len(rows), AT_A_TIME)] or [()]
    return respond_with_pages(name, columns, lambda page: (parts[page - 1], len(parts)))


def respond_with_pages(name: str, columns: Sequence[str], part: Callable[[int], tuple[Rows, int]]) -> Response:
    """Return a streaming response.

    Computes the first page before the response starts, so that errors still set the status.

    Args:
        part: returns the rows of a page, counted from 1, and the page count.
    """
    first, pages = part(1)

    def iter_pieces() -> Iterator[bytes]:
        yield format_csv(columns, first).encode(errors="replace")
        most = MAX_ROWS // AT_A_TIME
        for page in range(2, min(pages, most) + 1):
            text = format_csv((), part(page)[0])
            yield text.partition("\n")[2].encode(errors="replace")
        if pages > most:
            yield f"truncated after {MAX_ROWS} rows: filter the table\n".encode()

    file = make_safe_name(name).encode("ascii", "replace").decode().replace("?", "_")
    headers = {"content-disposition": f'attachment; filename="{file}.csv"'}
    return StreamingResponse(iter_pieces(), media_type="text/csv; charset=utf-8", headers=headers)
