"""What every test shares: the markers that the folders give, and hypothesis without its stopwatch."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["agents", "boards", "commands", "fake_farm", "farms", "labgrids"]

# How long one example takes says nothing on a machine that runs other tests beside it.
settings.register_profile("hil", deadline=None)
settings.load_profile("hil")

HARDWARE = Path(__file__).parent / "hardware"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HARDWARE):
            item.add_marker("hardware")
