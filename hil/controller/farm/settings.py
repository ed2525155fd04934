"""Settings of a farm in ``farm.toml``: the tables ``[terms]`` (times), ``[limits]`` (of users) and ``[history]``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hil.controller.pipeline.settings.history_settings import TABLE, HistorySettings, read_history_table
from hil.controller.storage.history.place import HistoryPlace
from hil.core.config_files import parse_toml
from hil.core.config_keys import list_keys, make_key
from hil.core.files import read_text
from hil.errors import UsageError, did_you_mean

_DAY_SECONDS = 86400.0
# TOML integers have any length, but floats cannot represent all of them.
_MAX_LIMIT = 10**15
_NO_LIMIT = "no limit"
_LIMITS, _USERS = "limits", "users"
WEBHOOKS_TABLE, OIDC_TABLE = "webhooks", "oidc"  # other modules read these tables
TABLES = ("terms", _LIMITS, TABLE, WEBHOOKS_TABLE, OIDC_TABLE)


@dataclass(frozen=True)
class UserLimits:
    """Limits of a user; infinity for no limit."""

    boards: float = make_key(math.inf, "Boards that the user's jobs and leases use at once.", unset=_NO_LIMIT)
    queued: float = make_key(math.inf, "Waiting jobs.", unset=_NO_LIMIT)
    lease_hours: float = make_key(math.inf, "Longest lease or reservation, in hours.", unset=_NO_LIMIT)


@dataclass(frozen=True)
class FarmLimits:
    """Limits of all users."""

    usual: UserLimits = UserLimits()
    users: Mapping[str, UserLimits] = field(default_factory=dict)  # users with other limits

    def get_limits(self, user: str) -> UserLimits:
        """Return the limits of a user."""
        return self.users.get(user, self.usual)


@dataclass(frozen=True)
class FarmSettings:
    """Farm settings, in seconds unless noted."""

    lease_s: float = make_key(6.0, "A lease expires after this time without a heartbeat of the board's worker.")
    holder_s: float = make_key(20.0, "A user's lease expires after this time without a heartbeat of the user's client.")
    owner_s: float = make_key(
        6.0,
        "After this time without a heartbeat of the worker, a board goes offline or moves to the standby host.",
    )
    beat_s: float = make_key(1.5, "Heartbeat interval of workers and clients; must be below the three times above.")
    health_every_s: float = make_key(
        6 * 3600.0, "A board without results for this time is checked before the next job, or when idle."
    )
    quarantine_s: float = make_key(
        30.0, "Delay before the next check after a failed health check. Each further failure doubles the delay."
    )
    quarantine_most_s: float = make_key(3600.0, "Longest delay before the next check.")
    aging_s: float = make_key(600.0, "A waiting job moves up one priority class per interval.")
    share_half_life_s: float = make_key(3600.0, "Half-life of a user's past board time in fair sharing.")
    keep_days: float = make_key(30.0, "`hil farm gc` deletes older results, logs and events, in days.")
    reserve_lead_s: float = make_key(900.0, "This long before a reservation, the board starts no jobs of other users.")
    gather_s: float = make_key(
        60.0,
        "A job with several boards that has waited this long keeps matching boards free until all of them are free.",
    )
    limits: FarmLimits = FarmLimits()  # the table ``[limits]``


def load_settings(path: Path) -> FarmSettings:
    """Read a farm's settings. Missing values, or a missing file, use the defaults.

    Raises:
        UsageError: the file is unreadable, or it contains an unknown, invalid or inconsistent setting.
    """
    tables = read_settings_tables(path)
    table = tables.get("terms", {})
    names = list_keys(FarmSettings)
    for name, value in table.items() if isinstance(table, dict) else [("", table)]:
        if name not in names:
            hint = f"{did_you_mean(name, names)}known settings: {', '.join(sorted(names))}"
            raise UsageError(f"{path}: unknown setting {name!r} in [terms]", hint=hint)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 3660 * _DAY_SECONDS:
            raise UsageError(f"{path}: [terms] {name} must be a number above 0")
    limits = _parse_limits(path, tables.get(_LIMITS, {}))
    settings = FarmSettings(**{name: float(value) for name, value in table.items()}, limits=limits)
    shortest = min(("lease_s", "holder_s", "owner_s"), key=lambda name: getattr(settings, name))
    limit = getattr(settings, shortest)
    if settings.beat_s >= limit:
        raise UsageError(
            f"{path}: [terms] beat_s must be below {shortest} ({limit:g}), got {settings.beat_s:g}",
            hint="beat_s must be below lease_s, holder_s and owner_s; a quarter of the smallest is recommended",
        )
    return settings


def _parse_limits(path: Path, table: Any) -> FarmLimits:
    """Return the limits of users. Raises UsageError for an unknown or invalid limit."""
    if not isinstance(table, dict) or not isinstance(table.get(_USERS, {}), dict):
        raise UsageError(f"{path}: [limits] and [limits.users] must be tables")
    usual = _parse_user_limits(path, "limits", {key: value for key, value in table.items() if key != _USERS})
    users = {}
    for name, own in table.get(_USERS, {}).items():
        users[name] = _parse_user_limits(path, f"limits.users.{name}", own, usual)
    return FarmLimits(usual, users)


def _parse_user_limits(path: Path, place: str, table: Any, usual: UserLimits | None = None) -> UserLimits:
    names = list_keys(UserLimits)
    for name, value in table.items() if isinstance(table, dict) else [("", table)]:
        if name not in names:
            hint = f"{did_you_mean(name, names)}known limits: {', '.join(names)}"
            raise UsageError(f"{path}: unknown limit {name!r} in [{place}]", hint=hint)
        whole = isinstance(value, int) or name == "lease_hours"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0 or not whole:
            kind = "number" if name == "lease_hours" else "whole number"
            raise UsageError(f"{path}: [{place}] {name} must be a {kind} above 0")
        if isinstance(value, int) and value > _MAX_LIMIT:
            raise UsageError(
                f"{path}: [{place}] {name} must be at most {_MAX_LIMIT}", hint=f"remove {name}: no limit is the default"
            )
    return replace(usual or UserLimits(), **{name: float(value) for name, value in table.items()})


def load_history(path: Path, db: str) -> HistorySettings | None:
    """Read the settings of a farm's history. Return None if the history is disabled.

    Args:
        path: file ``farm.toml`` in the farm's home. The programs are in the subdirectory ``history`` of the home.
        db: PostgreSQL URL of the farm, which is the default place of the entries.

    Raises:
        UsageError: the file is unreadable, or contains an unknown or invalid setting.
    """
    default = HistoryPlace(path.parent / TABLE, db)
    settings = read_history_table(path, read_settings_tables(path).get(TABLE, {}), default)
    return settings if settings.auto else None


def read_settings_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a settings file; none for a missing file. Raises UsageError for an invalid file."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    tables = parse_toml(text, path)
    for name in tables:
        if name not in TABLES:
            hint = f"{did_you_mean(name, TABLES)}known tables: {', '.join(TABLES)}"
            raise UsageError(f"{path}: unknown table [{name}]", hint=hint)
    return tables
