"""Read the table ``[history]`` of the project file: place and size of the history, and automatic additions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.controller.storage.history import DEFAULT_BASELINE, DEFAULT_PATH, DEFAULT_QUOTA
from hil.controller.storage.history.place import HistoryPlace, is_url, parse_url
from hil.errors import UsageError, did_you_mean

TABLE = "history"
SIZE_PATTERN = r"(\d{1,12}) ?(MiB|GiB)"
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class HistorySettings:
    """Settings of the history."""

    place: HistoryPlace = field(default_factory=lambda: HistoryPlace(DEFAULT_PATH))
    quota: int = DEFAULT_QUOTA  # maximum size of the programs, in bytes
    auto: bool = False  # True if commands, pytest or the farm add their results automatically
    baseline: str = DEFAULT_BASELINE  # branch whose last good programs are never deleted


def _read_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a string")
    return value


def _read_size(value: Any) -> int:
    found = re.fullmatch(SIZE_PATTERN, value) if isinstance(value, str) else None
    if found is None:
        raise ValueError('a size such as "500 MiB" or "2 GiB"')
    return int(found[1]) * _UNITS[found[2]]


def _read_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


@dataclass(frozen=True)
class HistoryKey:
    """Key of the table: how to read its value, and the description."""

    read: Callable[[Any], Any]
    default: str
    meaning: str


HISTORY_KEYS: Mapping[str, HistoryKey] = {
    "path": HistoryKey(_read_text, str(DEFAULT_PATH), "Directory or PostgreSQL URL of the history."),
    "quota": HistoryKey(_read_size, f"{DEFAULT_QUOTA >> 30} GiB", "Size of the stored programs, in MiB or GiB."),
    "auto": HistoryKey(_read_switch, "false", "Add each run, bench and suite run. In a farm: enable the history."),
    "baseline": HistoryKey(_read_text, DEFAULT_BASELINE, "Branch whose last good programs are kept."),
}


def read_history_table(file: Path, table: Any, default: HistoryPlace | None = None) -> HistorySettings:
    """Parse the table.

    Args:
        file: file with the table. A relative path starts at its directory.
        default: place of the history without the key ``path``, and directory of the programs of a PostgreSQL history;
            None is the default place of a project.

    Raises:
        UsageError: an unknown key, or an invalid value.
    """
    if not isinstance(table, dict):
        raise UsageError(f"{file}: [{TABLE}] must be a table")
    default = default or HistoryPlace(file.parent / DEFAULT_PATH)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in HISTORY_KEYS:
            hint = f"{did_you_mean(name, HISTORY_KEYS)}known keys: {', '.join(HISTORY_KEYS)}"
            raise UsageError(f"{file}: unknown key {name!r} in [{TABLE}]", hint=hint)
        try:
            values[name] = HISTORY_KEYS[name].read(value)
        except ValueError as error:
            raise UsageError(f"{file}: [{TABLE}] {name} must be {error}, got {value!r:.80}") from error
    path = values.pop("path", "")
    place = parse_url(path, default.folder) if is_url(path) else HistoryPlace(file.parent / path) if path else default
    return HistorySettings(place, **values)


def is_inside(file: Path, settings: HistorySettings) -> bool:
    """Return True if the history is inside the project file's directory, after resolving links.

    A PostgreSQL database is never inside.
    """
    if settings.place.url:
        return False
    try:
        return settings.place.folder.resolve().is_relative_to(file.parent.resolve())
    except (OSError, RuntimeError, ValueError):
        return False
