"""Write options as command line arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def format_option_words(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Return options as command line arguments. The value True stands for an option without a value."""
    words: list[str] = []
    for flag, value in named:
        # Use the form FLAG=VALUE for a value that starts with a dash, which would be parsed as an option.
        words += [flag] if value is True else [f"{flag}={value}"] if str(value)[:1] == "-" else [flag, str(value)]
    return words


def format_option_values(name: str, value: Any, *, repeats: bool) -> list[Any]:
    """Return a field's value in the command line's form, as a list of occurrences."""
    if name == "dims":
        return [f"{key}={size}" for key, size in value.items()]
    if name == "input_range":
        return [":".join(f"{end:g}" for end in value)]
    return list(value) if repeats else [value]
