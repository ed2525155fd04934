"""Number of profiled iterations."""

from __future__ import annotations

import pytest

from hil.controller.pipeline.capture import limit_iterations
from hil.controller.pipeline.settings.options import PROFILED_COUNTS

MS = 1e6


@pytest.mark.parametrize(
    ("asked", "typical_ns", "profiled"),
    [
        (0, MS, 0),
        (100, MS, 100),
        (100, 0.0, 100),
        (100_000, 0.0, 1000),
        (100_000, 1000.0, 1000),
        (100_000, 4 * MS, 250),
        (3, 60_000 * MS, 3),
        (100, 60_000 * MS, PROFILED_COUNTS["iterations"]),
    ],
)
def test_bounded_limits_profiled_iterations(asked, typical_ns, profiled):
    assert limit_iterations(asked, typical_ns) == profiled
