"""What a farm is run by: times and limits. ``farm.toml`` in its home sets them, in a table ``[terms]``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from hil.core.config_files import parse_toml
from hil.core.files import read_text
from hil.errors import UsageError

_DAY_S = 86400.0


@dataclass(frozen=True)
class FarmSettings:
    """Seconds, unless it says otherwise."""

    lease_s: float = 6.0  # a lease ends when its board's worker is not heard of for so long
    holder_s: float = 20.0  # a lease that somebody holds ends when the holder is not heard of for so long
    # a board is offline, or goes to the host that stands by, when its worker is not heard of for so long.
    owner_s: float = 6.0
    beat_s: float = 1.5  # how often workers and holders are to be heard of
    # a board that nothing is known of for so long is checked before its next job, or when idle.
    health_every_s: float = 6 * 3600.0
    # after its first failed check a board is checked again after so long, then twice as long, ...
    quarantine_s: float = 30.0
    quarantine_most_s: float = 3600.0  # ... and at most so long.
    aging_s: float = 600.0  # a job that waits so long counts as one of the next higher class, again and again
    share_half_life_s: float = 3600.0  # what a user had of the boards counts half after so long
    keep_days: float = 30.0  # results, logs and events older than this are deleted by `hil farm gc` (days)


def load_settings(path: Path) -> FarmSettings:
    """The terms of a farm's file; those that it does not name, or all where it is not there, are as usual.

    Raises:
        UsageError: it cannot be read, names what there is not, or what cannot go together.
    """
    try:
        text = read_text(path)
    except FileNotFoundError:
        return FarmSettings()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    table = parse_toml(text, path).get("terms", {})
    names = {one.name for one in fields(FarmSettings)}
    for name, value in table.items() if isinstance(table, dict) else [("", table)]:
        if name not in names:
            raise UsageError(f"{path}: [terms] has no {name!r}", hint=f"it takes {', '.join(sorted(names))}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 3660 * _DAY_S:
            raise UsageError(f"{path}: [terms] {name} must be a number above 0")
    settings = FarmSettings(**{name: float(value) for name, value in table.items()})
    shortest = min(settings.lease_s, settings.holder_s, settings.owner_s)
    if settings.beat_s >= shortest:
        raise UsageError(
            f"{path}: [terms] beat_s is {settings.beat_s:g}: whoever beats so rarely is lost after {shortest:g}",
            hint="it must be below lease_s, holder_s and owner_s, better a quarter of them",
        )
    return settings
