"""Parameters of requests: filters, numbers, and whether the page is saved as a file."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request

from hil.controller.web.text.parameters import InvalidParameter
from hil.controller.web.text.table_views import is_grouped

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

F = TypeVar("F", bound="DataclassInstance")


# URL parameters that identify a session.
SESSION = ("id", "root")
# Maximum table rows in a saved page, and on a page with a grouped table.
SAVED_ROWS = 5000


def is_saved(request: Request) -> bool:
    """Return True for a page to save as a file (`pages/share.py`). A saved page cannot use the server."""
    return getattr(request.state, "saved", False) is True


def count_rows(request: Request, usual: int) -> int:
    """Return the number of table rows: ``usual``, or :data:`SAVED_ROWS` in a saved page or for grouped rows.

    A saved page has no further pages, and groups need all rows.
    """
    return SAVED_ROWS if is_saved(request) or is_grouped(request) else usual


def list_fields(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """Return the URL parameters of a filter."""
    return tuple(one.name for one in fields(kind))


def parse_filter(request: Request, kind: type[F]) -> F:
    """Parse a filter from the query. ``choices`` in the metadata of a field are its valid values.

    Raises:
        InvalidParameter: invalid number, or unknown value of a field with choices.
    """
    values: dict[str, Any] = {}
    for field in fields(kind):
        given = request.query_params.get(field.name, "")
        if field.type in ("int", int):
            if given and not (given.isdecimal() and len(given) < 10):
                raise InvalidParameter(f"{field.name} must be a number, got {given[:40]!r}")
            if given:
                values[field.name] = int(given)
        elif given:
            choices = field.metadata.get("choices", (given,))
            if given not in choices:
                raise InvalidParameter.choose(field.name, given, choices)
            values[field.name] = given
    return kind(**values)


def number_of(request: Request, name: str, default: int = 0) -> int:
    """Parse a non-negative integer from the query. Raises InvalidParameter if the value is invalid."""
    return parse_number(name, request.query_params.get(name, ""), default)


def parse_number(name: str, given: str, default: int = 0) -> int:
    """Parse the text of a parameter as a non-negative integer. Raises InvalidParameter if the value is invalid."""
    if not given:
        return default
    if not (given.isdecimal() and len(given) < 10):
        raise InvalidParameter(f"{name} must be a number, got {given[:40]!r}")
    return int(given)
