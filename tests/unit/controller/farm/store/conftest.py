"""A desk over a fresh database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.farm_desks import Desk, open_desk


@pytest.fixture
def desk(farm_db: str) -> Iterator[Desk]:
    with open_desk(farm_db) as desk:
        yield desk
