"""Describe the keys of config files in the dataclasses that store their values.

The parser reads names and types from the dataclass. The reference pages, the JSON schemas and `hil config show` also
read the meaning from it, so that each key has one description.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

_KEY = "key"
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclasses.dataclass(frozen=True)
class KeyInfo:
    """Description of a key."""

    meaning: str
    values: Sequence[str] = ()  # allowed values; empty allows all values of the type
    bounds: tuple[int, int] | None = None  # smallest and largest value
    unset: str = ""  # text for the default, if the default value does not explain itself


def make_key(default: Any, meaning: str, **more: Any) -> Any:
    """Return a dataclass field for a key.

    Args:
        default: default value, or a function that returns a new default value.
        meaning: description of the key, for people.
        more: other fields of :class:`KeyInfo`.
    """
    metadata = {_KEY: KeyInfo(meaning, **more)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def list_keys(kind: type) -> Mapping[str, KeyInfo]:
    """Return the described keys of a dataclass by name."""
    found = {one.name: one.metadata.get(_KEY) for one in dataclasses.fields(kind)}
    return {name: info for name, info in found.items() if info is not None}


def remove_links(text: str) -> str:
    """Return a meaning without its Markdown links."""
    return _LINK.sub(r"\1", text)
