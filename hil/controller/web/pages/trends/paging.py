"""Pages of tables whose newest rows are first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fastapi import Request

from hil.controller.web.text.addresses import choose_page
from hil.controller.web.text.requests import count_rows

T = TypeVar("T")


def choose_newest(
    request: Request, page: int, items: Sequence[T], usual: int, is_shown: Callable[[int], bool] = lambda index: True
) -> tuple[Sequence[tuple[int, T]], Mapping[str, int]]:
    """Return a page of (index, item) pairs, newest first, and the page count and total for the template.

    Args:
        items: oldest first.
        usual: number of rows of a page that is not saved.
        is_shown: returns False for the index of an item to leave out.
    """
    rows = count_rows(request, usual)
    newest = [(index, item) for index, item in reversed(list(enumerate(items))) if is_shown(index)]
    first, pages = choose_page(page, len(newest), rows)
    return newest[first : first + rows], {"pages": pages, "total": len(newest)}
