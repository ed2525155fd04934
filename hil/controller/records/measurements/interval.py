"""Record of a confidence interval."""

from __future__ import annotations

from typing import Annotated

from hil.controller.records.base import Record, note


class Interval(Record, kw_only=True):
    """A confidence interval."""

    low: float
    high: float
    level: Annotated[float, note("probability that the interval contains the true value")]
