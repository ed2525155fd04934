"""What addresses of pages say: what a view asks for, and which session is meant."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlencode

# Between a folder of runs' number and an id, which never has two slashes.
ROOT_MARK = "//"


@dataclass(frozen=True)
class Asked:
    """What a page is asked: its fields are those of the address's query, one of them the ``page`` of its table."""

    def query(self, **other: Any) -> str:
        """The query, of the first page, with some values replaced; what is as it would be anyway is left out."""
        usual = {one.name: one.default for one in fields(self)}
        values = {one.name: getattr(self, one.name) for one in fields(self)} | {"page": 1} | other
        return urlencode({name: value for name, value in values.items() if value != usual[name]})


def link_of(session: str, root: int) -> str:
    """The query that names a session by its id and the number of its folder of runs."""
    return urlencode({"id": session, **({"root": root} if root else {})})


def reference_of(session: str, root: int) -> str:
    """What names a session in one word of an address."""
    return f"{root}{ROOT_MARK}{session}" if root else session


def page_at(page: int, total: int, rows: int) -> tuple[int, int]:
    """Where a page of a table begins, or the nearest that there is, and how many pages there are."""
    pages = max(1, -(-total // rows))
    return (min(max(1, page), pages) - 1) * rows, pages
