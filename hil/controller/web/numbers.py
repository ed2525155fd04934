"""Numbers of records as pages write them: they may be infinite, or none at all."""

from __future__ import annotations

import math

from hil.controller.storage.texts import seconds


def spent(value: float | None) -> str:
    """Seconds in a unit that people read; "" for none, and for what no clock tells."""
    return "" if value is None or not math.isfinite(value) else seconds(value)
