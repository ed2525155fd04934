"""Format numbers from records, which may be infinite or missing."""

from __future__ import annotations

import math

from hil.controller.storage.screen.texts import format_seconds

# Whole numbers below this limit are shown with all digits.
_MAX_WHOLE = 1e10


def format_number(value: float | None, digits: int = 3) -> str:
    """Format a number with the given number of digits, and whole numbers with all digits. None becomes ""."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) < _MAX_WHOLE and float(value).is_integer() else f"{value:.{digits}g}"


def format_percent(value: float | None, decimals: int = 1) -> str:
    """Format a percentage. Only 0 is shown as 0, and only 100 as 100: 99.99 becomes "> 99.9 %". None becomes ""."""
    if value is None or not math.isfinite(value):
        return ""
    text, least = f"{value:.{decimals}f}", 10.0**-decimals
    if value and float(text) == 0:
        return f"< {least:.{decimals}f} %" if value > 0 else "0 %"
    if value < 100 <= float(text):
        return f"> {100 - least:.{decimals}f} %"
    return f"{text} %"


def format_seconds_or_blank(value: float | None, digits: int = 3) -> str:
    """Format seconds with a readable unit. Missing and non-finite values become ""."""
    return "" if value is None or not math.isfinite(value) else format_seconds(value, digits)
