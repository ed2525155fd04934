"""What every test shares: the markers that the folders give."""

from __future__ import annotations

from pathlib import Path

import pytest

HARDWARE = Path(__file__).parent / "hardware"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HARDWARE):
            item.add_marker("hardware")
