"""Read values of JSON documents that may have any form: a value of another type becomes empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_string(value: Any) -> str:
    """Return the value if it is a text, else ""."""
    return value if isinstance(value, str) else ""


def read_list(value: Any) -> list[Any]:
    """Return the items of a list, else an empty list."""
    return list(value) if isinstance(value, (list, tuple)) else []


def read_mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a JSON object, else an empty mapping."""
    return value if isinstance(value, dict) else {}


def read_mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the JSON objects in a list."""
    return [one for one in read_list(value) if isinstance(one, dict)]
