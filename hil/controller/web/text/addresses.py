"""Build and parse URL queries: page filters and references to sessions."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlencode

# Separates a runs directory's number from a session id. Ids never contain two slashes.
ROOT_MARK = "//"
_HTTP_URL = re.compile(r"https?://[^\s<>\"']+", re.IGNORECASE)


@dataclass(frozen=True)
class PageQuery:
    """Query parameters of a page. Subclasses define the fields. ``page`` is the page number of the table."""

    def query(self, **other: Any) -> str:
        """Return the query for the first page with some values replaced. Default values are omitted."""
        usual = {one.name: one.default for one in fields(self)}
        values = {one.name: getattr(self, one.name) for one in fields(self)} | {"page": 1} | other
        return urlencode({name: value for name, value in values.items() if value != usual[name]})


def link_of(session: str, root: int) -> str:
    """Return the query that identifies a session by id and runs directory number."""
    return urlencode({"id": session, **({"root": root} if root else {})})


def format_reference(session: str, root: int) -> str:
    """Return a session reference that fits in a single URL parameter."""
    return f"{root}{ROOT_MARK}{session}" if root else session


def find_issue_link(issue: str) -> str:
    """Return the URL of an issue, or "" if the text is not an http URL. Other schemes could run scripts."""
    return issue if _HTTP_URL.fullmatch(issue) else ""


def choose_page(page: int, total: int, rows: int) -> tuple[int, int]:
    """Return the first row of a table's page, and the page count. The page number is clamped to the valid range."""
    pages = max(1, -(-total // rows))
    return (min(max(1, page), pages) - 1) * rows, pages
