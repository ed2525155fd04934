"""A gateway over a fresh database, its clients, and a board that attends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gateways import BareBoard, Running, running_gateway, token_of

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.messages import Role

Client = Callable[..., FarmClient]


@pytest.fixture
def gateway(farm_db: str, tmp_path: Path) -> Iterator[Running]:
    with running_gateway(farm_db, tmp_path) as running:
        yield running


@pytest.fixture
def client(gateway: Running, farm_db: str) -> Iterator[Client]:
    """Clients of users by name and role."""
    with contextlib.ExitStack() as stack:

        def make(user: str = "anna", role: Role = Role.ADMIN, **token: Any) -> FarmClient:
            return stack.enter_context(gateway.client(token_of(farm_db, user, role, **token), patience_s=0.0))

        yield make


@pytest.fixture
def board(client: Client) -> Iterator[BareBoard]:
    one = BareBoard(client("lab", Role.HOST), "rpi", labels={"chip": "a53"}).online()
    yield one
    one.leave()
