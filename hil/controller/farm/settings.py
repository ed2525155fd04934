"""Settings of a farm in ``farm.toml``: times and limits in the table ``[terms]``, and the table ``[history]``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hil.controller.pipeline.settings.history_settings import TABLE, HistorySettings, read_history_table
from hil.controller.storage.history.place import HistoryPlace
from hil.core.config_files import parse_toml
from hil.core.files import read_text
from hil.errors import UsageError

_DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class FarmSettings:
    """Farm settings, in seconds unless noted."""

    lease_s: float = 6.0  # a lease expires after this time without a heartbeat of the board's worker
    holder_s: float = 20.0  # a user's lease expires after this time without a heartbeat of the user's client
    # After this time without a heartbeat of the worker, a board goes offline or moves to the standby host.
    owner_s: float = 6.0
    beat_s: float = 1.5  # heartbeat interval of workers and holders
    # A board without results for this long is checked before the next job, or when idle.
    health_every_s: float = 6 * 3600.0
    # Delay before the next check after the first failed health check. Each further failure doubles the delay,
    quarantine_s: float = 30.0
    quarantine_most_s: float = 3600.0  # up to this limit
    aging_s: float = 600.0  # a waiting job moves up one priority class per interval
    share_half_life_s: float = 3600.0  # half-life of a user's past board time in fair sharing
    keep_days: float = 30.0  # `hil farm gc` deletes older results, logs and events (days)


def load_settings(path: Path) -> FarmSettings:
    """Read a farm's settings. Missing values, or a missing file, use the defaults.

    Raises:
        UsageError: the file is unreadable, or it contains an unknown, invalid or inconsistent setting.
    """
    table = _read_tables(path).get("terms", {})
    names = {one.name for one in fields(FarmSettings)}
    for name, value in table.items() if isinstance(table, dict) else [("", table)]:
        if name not in names:
            raise UsageError(
                f"{path}: unknown setting {name!r} in [terms]", hint=f"known settings: {', '.join(sorted(names))}"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 3660 * _DAY_SECONDS:
            raise UsageError(f"{path}: [terms] {name} must be a number above 0")
    settings = FarmSettings(**{name: float(value) for name, value in table.items()})
    shortest = min(("lease_s", "holder_s", "owner_s"), key=lambda name: getattr(settings, name))
    limit = getattr(settings, shortest)
    if settings.beat_s >= limit:
        raise UsageError(
            f"{path}: [terms] beat_s must be below {shortest} ({limit:g}), got {settings.beat_s:g}",
            hint="beat_s must be below lease_s, holder_s and owner_s; a quarter of the smallest is recommended",
        )
    return settings


def load_history(path: Path, db: str) -> HistorySettings | None:
    """Read the settings of a farm's history. Return None if the history is disabled.

    Args:
        path: file ``farm.toml`` in the farm's home. The programs are in the subdirectory ``history`` of the home.
        db: PostgreSQL URL of the farm, which is the default place of the entries.

    Raises:
        UsageError: the file is unreadable, or contains an unknown or invalid setting.
    """
    default = HistoryPlace(path.parent / TABLE, db)
    settings = read_history_table(path, _read_tables(path).get(TABLE, {}), default)
    return settings if settings.auto else None


def _read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a settings file; none for a missing file. Raises UsageError for an invalid file."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return parse_toml(text, path)
