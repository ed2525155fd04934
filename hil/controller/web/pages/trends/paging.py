"""Pages of tables whose newest rows are first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from fastapi import Request

from hil.controller.web.text.addresses import choose_page
from hil.controller.web.text.requests import count_rows

T = TypeVar("T")


def choose_newest(
    request: Request, page: int, items: Sequence[T], usual: int
) -> tuple[Sequence[tuple[int, T]], Mapping[str, int]]:
    """Return a page of (index, item) pairs, newest first, and the page count and total for the template.

    Args:
        items: oldest first.
        usual: number of rows of a page that is not saved.
    """
    rows = count_rows(request, usual)
    first, pages = choose_page(page, len(items), rows)
    newest = list(reversed(list(enumerate(items))))
    return newest[first : first + rows], {"pages": pages, "total": len(items)}
