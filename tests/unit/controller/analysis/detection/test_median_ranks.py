"""Interval of a median from order statistics."""

from __future__ import annotations

import numpy as np
import pytest

from hil.controller.analysis.detection.median_ranks import rank_interval


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 0.98), (0.5, 0.96)])
def test_rank_interval_covers_median(correlation: float, least: float) -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(500):
        noise = rng.normal(0, 1, 100)
        for at in range(1, noise.size):
            noise[at] += correlation * noise[at - 1]
        found = rank_interval(noise)
        covered += found is not None and found.low <= 0 <= found.high
    assert covered / 500 >= least


def test_rank_interval_has_known_ranks() -> None:
    values = np.array([1.0, 100.0] * 50)
    values[::2] += np.arange(50)
    found = rank_interval(values)
    # Signs alternate, so that no correlation reduces the samples: ranks 37 and 64 of 100.
    assert found is not None and (found.low, found.high, found.level) == (37.0, 100.0, 0.99)


@pytest.mark.parametrize("count", [0, 1, 8])
def test_rank_interval_needs_samples(count: int) -> None:
    assert rank_interval(np.arange(count, dtype=np.float64)) is None
