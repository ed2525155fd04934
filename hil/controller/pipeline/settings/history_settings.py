"""Read the table ``[history]`` of the project file: place and size of the history, and automatic additions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.storage.history import DEFAULT_BASELINE, DEFAULT_PATH, DEFAULT_QUOTA
from hil.errors import UsageError, did_you_mean

TABLE = "history"
_SIZE = re.compile(r"(\d{1,12}) ?(MiB|GiB)")
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class HistorySettings:
    """Settings of the history."""

    path: Path = DEFAULT_PATH
    quota: int = DEFAULT_QUOTA  # maximum size of the programs, in bytes
    auto: bool = False  # True if commands and pytest add their results automatically
    baseline: str = DEFAULT_BASELINE  # branch whose last good programs are never deleted


def _read_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a string")
    return value


def _read_size(value: Any) -> int:
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError('a size such as "500 MiB" or "2 GiB"')
    return int(found[1]) * _UNITS[found[2]]


def _read_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "path": _read_text,
    "quota": _read_size,
    "auto": _read_switch,
    "baseline": _read_text,
}


def read_history_table(file: Path, table: Any) -> HistorySettings:
    """Parse the table. A relative path starts at the project file's directory.

    Raises:
        UsageError: an unknown key, or an invalid value.
    """
    if not isinstance(table, dict):
        raise UsageError(f"{file}: [{TABLE}] must be a table")
    values: dict[str, Any] = {"path": DEFAULT_PATH}
    for name, value in table.items():
        if name not in _KEYS:
            hint = f"{did_you_mean(name, _KEYS)}known keys: {', '.join(_KEYS)}"
            raise UsageError(f"{file}: unknown key {name!r} in [{TABLE}]", hint=hint)
        try:
            values[name] = _KEYS[name](value)
        except ValueError as error:
            raise UsageError(f"{file}: [{TABLE}] {name} must be {error}, got {value!r:.80}") from error
    return HistorySettings(**{**values, "path": file.parent / values["path"]})


def is_inside(file: Path, settings: HistorySettings) -> bool:
    """Return True if the history is inside the project file's directory, after resolving links."""
    try:
        return settings.path.resolve().is_relative_to(file.parent.resolve())
    except (OSError, RuntimeError, ValueError):
        return False
