"""URL parameters of the view of a page's tables: visible columns, groups, and the name of the view.

The script ``tables.js`` applies the view. The server checks the form of the parameters, and keeps no state.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable
from urllib.parse import urlencode

from fastapi import Request

from hil.controller.web.text.names import escape_name
from hil.controller.web.text.parameters import InvalidParameter

# Parameter of the visible columns. Pages with an own parameter of this name use the second name.
COLUMNS, OTHER_COLUMNS = "columns", "table.columns"
# Names of a table and of its columns, made from their labels.
_NAMES = re.compile(r"[a-z0-9-]{1,80}(~[a-z0-9-]{1,80}){1,200}")
_MAX_CHARS, _MAX_TABLES = 60, 50
# Paths of responses without tables of their own.
_NO_TABLES = re.compile(
    r"/(api|perfetto|publish|static|farm)(/.*)?|/(events|file|log|share|job/log|board/console)|.*\.[a-z]+"
)


def has_tables(path: str) -> bool:
    """Return True if the path may be a page with tables."""
    return _NO_TABLES.fullmatch(path) is None


def list_view_parameters(own: Container[str]) -> tuple[str, str, str]:
    """Return the parameters of a view: the columns, the groups and the name.

    Args:
        own: other parameters of the page.
    """
    return (OTHER_COLUMNS if COLUMNS in own else COLUMNS, "group", "view")


def check_table_view(given: Iterable[tuple[str, str]], names: Iterable[str]) -> None:
    """Check the parameters of a view. Raises InvalidParameter if one is invalid.

    Args:
        given: names and values of all URL parameters.
        names: parameters of the view.
    """
    counts = dict.fromkeys(names, 0)
    for name, value in given:
        if name not in counts:
            continue
        counts[name] += 1
        shown = escape_name(value[:80])
        if name == "view":
            if len(value) > _MAX_CHARS or not value.isprintable():
                raise InvalidParameter(f"invalid view '{shown}'", hint=f"a name of at most {_MAX_CHARS} characters")
        elif not _NAMES.fullmatch(value):
            hint = f"expected TABLE~COLUMN, such as {name}=table-of-cases~outcome"
            raise InvalidParameter(f"invalid {name} '{shown}'", hint=hint)
        elif name == "group" and value.count("~") > 1:
            raise InvalidParameter(f"invalid group '{shown}'", hint="a table is grouped by one column")
    if counts["view"] > 1 or max(counts.values()) > _MAX_TABLES:
        raise InvalidParameter(
            "too many views of tables", hint="pass one view, and one columns and one group per table"
        )


def format_table_view(request: Request, names: Collection[str]) -> str:
    """Return the query with only the parameters of the view."""
    return urlencode([pair for pair in request.query_params.multi_items() if pair[0] in names])


def is_grouped(request: Request) -> bool:
    """Return True if a table of the page is grouped. A grouped table needs all its rows."""
    return "group" in request.query_params
