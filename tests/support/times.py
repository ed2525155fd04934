"""Times of a bench for tests."""

from __future__ import annotations

from typing import Any

from hil.controller.records.base import Interval
from hil.controller.records.measurements.bench import BenchTimes, Drift


def steady_times(p50_ns: float = 1000.0, **values: Any) -> BenchTimes:
    """Return the statistics of 1000 iterations with almost the same time; ``values`` replace some of them."""
    names = ("p10_ns", "p50_ns", "p90_ns", "p99_ns", "min_ns", "max_ns", "mean_ns")
    steady: dict[str, Any] = {
        "iterations": 1000,
        **dict.fromkeys(names, p50_ns),
        "stdev_ns": 1.0,
        "median": Interval(low=0.999 * p50_ns, high=1.001 * p50_ns, level=0.99),
        "drift": Drift(change=0.0, p_value=1.0, marked=False),
        "outliers": 1,
        "outlier_above_ns": 1.1 * p50_ns,
    }
    return BenchTimes(**{**steady, **values})
