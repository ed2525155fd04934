"""Marks for tests that run only in ``scripts/test --all``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *places: int) -> list[Any]:
    """Return parameters for ``pytest.mark.parametrize``. All are slow, except those at ``places``."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if number in places else [pytest.mark.slow],
        )
        for number, value in enumerate(values)
    ]
