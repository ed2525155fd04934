"""Jinja2 environment with autoescape and the number formats of hil's reports."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined

from hil.compare.stats import STATISTICS
from hil.controller.analysis.profile.show import format_si
from hil.controller.farm.client.turns import turn_text
from hil.controller.farm.client.wording import format_duration, format_labels
from hil.controller.farm.timeline import parse_moment
from hil.controller.storage.screen.texts import ROUNDS_UP, format_count, format_joules
from hil.controller.web.text.entries import find_worst_kind, read_real
from hil.controller.web.text.names import escape_name
from hil.controller.web.text.numbers import format_number, format_percent, format_seconds_or_blank
from hil.core.text import escape_controls

# Name for other modules of pages.
number = format_number
# Number of digits per statistic, so that 0.9998 does not become 1.
_DIGITS = {one.key: one.digits for one in STATISTICS}


class _Environment(Environment):
    """Environment that returns None for missing keys of a record.

    Records may come from older versions and from any user.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        found = super().getattr(obj, attribute)
        return None if isinstance(obj, dict) and isinstance(found, Undefined) else found

    def getitem(self, obj: Any, argument: Any) -> Any:
        found = super().getitem(obj, argument)
        return None if isinstance(obj, dict) and isinstance(found, Undefined) else found


def make_environment() -> Environment:
    """Create the environment for ``templates/``. Undefined values are errors.

    Templates are not reloaded. After an update of hil, new templates could need values that the running code does not
    provide.
    """
    made = _Environment(
        loader=PackageLoader("hil.controller.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        auto_reload=False,
    )
    made.filters |= {
        "visible": _escape_value,
        "said": lambda name: escape_name(str(name)),
        "kind": lambda outcome: find_worst_kind([outcome], finished=True),
        "when": format_time,
        "joules": format_joules,
        "nanoseconds": lambda value, digits=3: format_seconds_or_blank(None if value is None else value / 1e9, digits),
        "moment": lambda text: format_time(parse_moment(text)),
        "elapsed": format_elapsed,
        "labels": format_labels,
        "turn": turn_text,
        "seconds": format_seconds_or_blank,
        "number": format_number,
        "percent": format_percent,
        "ratio": format_ratio,
        "statistic": lambda value, key="": format_number(read_real(value), _DIGITS.get(key, 3)),
        "bytes": format_size,
        "si": lambda value, unit: "" if value is None else format_si(value, unit),
        "query": lambda values: urlencode(
            {key: value for key, value in values.items() if value not in ("", None)}, doseq=True
        ),
    }
    # Digits of times next to their ratio, so that the ratio matches the shown times.
    made.globals["RATIO_DIGITS"] = 4
    made.globals |= {"counted": format_count, "saved": False, "duration": format_duration}
    made.globals["parts"] = made.get_template("parts.html").module
    made.globals["shown"] = made.get_template("farm_parts.html").module
    return made


def _escape_value(value: Any) -> str:
    """Escape control characters and bidirectional overrides."""
    return escape_controls(str(value))


def format_time(value: float | None) -> str:
    """Format a time in UTC, to the second. Missing and out-of-range values become ""."""
    try:
        return "" if value is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(value))
    except (OverflowError, ValueError, OSError):
        return ""


def format_elapsed(begun: str | None, ended: str | None = None) -> str:
    """Format the duration of a farm event, up to now if it has not ended. Return "" if it has not begun."""
    since, until = parse_moment(begun), parse_moment(ended)
    return "" if since is None else format_duration((time.time() if until is None else until) - since)


def format_ratio(value: float | None) -> str:
    """Format a ratio with three decimals near 1, otherwise with three digits. None becomes ""."""
    if value is None:
        return ""
    return f"{value:.3f}x" if 0.1 <= value < 100 else f"{value:.3g}x"


def format_size(value: int | None) -> str:
    """Format bytes with a decimal unit. None becomes ""."""
    if value is None:
        return ""
    amount, unit = float(value), "B"
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 * ROUNDS_UP or unit == "GB":
            break
        amount /= 1000
    return f"{amount:.3g} {unit}"
