"""Parse moments in time: durations, dates, times of day and weekdays, in local time."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from hil.controller.farm.client.wording import UNITS
from hil.errors import UsageError

_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")
_TIME = re.compile(r"(\d{1,2}):(\d{2})")
_MAX_DAYS = 3660
_LAST_YEAR = 9000


def read_duration(text: str) -> float | None:
    """Return the seconds of a duration such as ``30d``, ``1h30m`` or ``90``; None for another text."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * UNITS[unit or "s"] for number, unit in parts)


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of a duration. Raises UsageError unless the duration is above 0 and at most ten years."""
    seconds = read_duration(text)
    if not seconds or seconds > timedelta(days=_MAX_DAYS).total_seconds():
        raise UsageError(f"invalid {option} {text!r}: expected a duration", hint="for example 90s, 30m, 1h30m")
    return seconds


def parse_past(text: str, option: str, now: datetime | None = None) -> datetime:
    """Return a moment in the past: ``2h`` or ``3d`` ago, ``9:00``, ``mon 9:00``, ``today``, or an ISO 8601 date.

    Raises UsageError for an invalid moment, or one in the future.
    """
    now = now or datetime.now().astimezone()
    found = _parse(text, option, now, back=True)
    if found > now:
        raise UsageError(f"invalid {option} {text!r}: the time is in the future", hint=_HINT)
    return found


def parse_future(text: str, option: str, now: datetime | None = None) -> datetime:
    """Return a moment in the future: ``9:00``, ``mon 9:00``, ``tomorrow 9:00``, in ``2h``, or an ISO 8601 time.

    Raises UsageError for an invalid moment, or one in the past.
    """
    now = now or datetime.now().astimezone()
    found = _parse(text, option, now, back=False)
    if found < now:
        raise UsageError(f"invalid {option} {text!r}: the time is in the past", hint=_HINT)
    return found


_HINT = "for example 2h, 9:00, 'mon 9:00', 2026-11-30, '2026-11-30 9:00'"


def _parse(text: str, option: str, now: datetime, *, back: bool) -> datetime:
    words = text.strip().lower().split()
    try:
        # A number without a unit is not a duration here: 20261130 is a date.
        seconds = read_duration(words[0]) if len(words) == 1 and not words[0].isdecimal() else None
        if seconds is not None:
            span = timedelta(seconds=seconds)
            if span > timedelta(days=_MAX_DAYS):
                raise ValueError
            return now - span if back else now + span
        if not 1 <= len(words) <= 2:
            raise ValueError
        has_time = _TIME.fullmatch(words[-1])
        hour, minute = (int(has_time[1]), int(has_time[2])) if has_time else (0, 0)
        day = words[0] if len(words) == 2 or not has_time else ""
        if len(words) == 2 and not has_time:
            raise ValueError
        return _find_day(day, now, back=back, hour=hour, minute=minute)
    except (ValueError, OverflowError):
        raise UsageError(f"invalid {option} {text!r}: expected a time", hint=_HINT) from None


def _find_day(day: str, now: datetime, *, back: bool, hour: int, minute: int) -> datetime:
    """Return a time of a day. A time of day or a weekday without a date is the nearest one in the given direction."""

    def at(days: int) -> datetime:
        # Compute with local dates: a day with a change of the clock has 23 or 25 hours.
        plain = now.replace(tzinfo=None) + timedelta(days=days)
        return plain.replace(hour=hour, minute=minute, second=0, microsecond=0).astimezone()

    named = {"today": 0, "yesterday": -1, "tomorrow": 1}
    if day in named:
        return at(named[day])
    if not day:
        return next(one for one in map(at, (0, -1) if back else (0, 1)) if (one <= now if back else one >= now))
    weekday = next((number for number, name in enumerate(_WEEKDAYS) if day in (name, name[:3])), None)
    if weekday is not None:
        distance = (weekday - now.weekday()) % 7
        days = (distance - 7, distance, distance - 14) if back else (distance, distance + 7)
        fitting = [one for one in map(at, days) if (one <= now if back else one >= now)]
        return max(fitting) if back else min(fitting)
    date = datetime.fromisoformat(day.upper().replace("Z", "+00:00"))  # Python 3.10 does not parse Z
    if date.tzinfo is None and not date.hour and not date.minute:
        date = date.replace(hour=hour, minute=minute)
    if date.year > _LAST_YEAR:
        raise ValueError
    return date.astimezone()
