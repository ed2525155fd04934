"""Format numbers from records, which may be infinite or missing."""

from __future__ import annotations

import math

from hil.controller.storage.screen.texts import format_seconds


def format_seconds_or_blank(value: float | None) -> str:
    """Format seconds with a readable unit. Missing and non-finite values become ""."""
    return "" if value is None or not math.isfinite(value) else format_seconds(value)
