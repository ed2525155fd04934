"""Stored sessions that no board created, and a `hil web` in this process that shows them."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
from starlette.responses import FileResponse
from starlette.testclient import TestClient

from hil.controller.storage.history.place import HistoryPlace
from hil.controller.web.access.security import AccessRules
from hil.controller.web.farm.link import FarmLink
from hil.controller.web.index.index import IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.index.judging import judge_some
from hil.controller.web.server.app import create_app
from support.waiting import eventually

# Host name in requests of a TestClient. Without a token, hil web replies only to names of loopback.
ADDRESS = "http://127.0.0.1:8790"


def write_run(root: Path, name: str, cases: Sequence[Mapping[str, Any]] = (), **record: Any) -> Path:
    """Write a stored run of `hil run` with these cases, given as fields of each case. Return its directory."""
    folder = root / name
    whole = {
        **{"schema": 1, "id": name, "created": 1.7e9, "request": {"models": []}, "board": {"name": "sim"}},
        **{"cases": [{"name": "model", "outcome": "PASS", **one} for one in cases]},
        **{"outcome": "PASS", "exit_code": 0, "finished": True},
        **record,
    }
    write_record(folder / "run.json", whole)
    return folder


def write_suite(root: Path, name: str, cases: Sequence[Mapping[str, Any]] = (), **head: Any) -> Path:
    """Write a stored suite run with these cases, given as fields of each case. Return its directory."""
    folder = root / name
    whole = {
        **{"schema": 1, "id": name, "suite": "models", "flow": "iree", "runtime": "iree", "boards": ["sim"]},
        **{"versions": {"iree-base-compiler": "3.13.0"}, "started": 1.7e9, "finished": 1.7e9 + 60, "exit_code": 0},
        **{"ids": [one.get("id", "case") for one in cases]},
        **head,
    }
    write_record(folder / "suite.json", whole)
    lines = [
        {"id": "case", "model": "model", "flow": "iree", "runtime": "iree", "outcome": "PASS", "board": "sim", **one}
        for one in cases
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder


def write_record(path: Path, document: Any) -> None:
    """Write the record of a session in its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


@contextmanager
def asking(
    *roots: Path,
    token: str = "",
    host: str = "127.0.0.1",
    farm: FarmLink | None = None,
    history: HistoryPlace | None = None,
) -> Iterator[TestClient]:
    """Return a client of the application for directories of runs, which are indexed. Errors of routes are raised."""
    with tempfile.TemporaryDirectory() as folder, IndexWriter(Path(folder) / "index.sqlite") as writer:
        folders = [root.resolve() for root in roots]
        indexer = Indexer(writer, folders)
        indexer.scan()
        # A scan judges histories for a limited time, which is too short for all on a busy machine.
        while writer.run_in_transaction(judge_some):
            pass
        access = AccessRules(host, token, farm.make_visitors() if farm else None)
        path = Path(folder) / "index.sqlite"
        app = create_app(folders, path, indexer.progress, access, farm, history_place=history)
        with TestClient(app, base_url=ADDRESS) as client:
            yield client


@asynccontextmanager
async def _opened(response: FileResponse) -> AsyncIterator[anyio.AsyncFile[bytes]]:
    """Close the file of a response. Starlette leaves it open, with a warning, if the browser closes the connection
    early.
    """
    with anyio.CancelScope(shield=True):
        file = await anyio.open_file(response.path, mode="rb")
    try:
        yield file
    finally:
        with anyio.CancelScope(shield=True):
            await file.aclose()


@contextmanager
def serving(
    *roots: Path, token: str = "", farm: FarmLink | None = None, port: int = 0, history: Path | None = None
) -> Iterator[str]:
    """Run a server with its indexer in threads of this process, on a port of loopback (0 selects a free port). Return
    its address.
    """
    from hil.controller.web.server.server import make_server, open_listener

    with tempfile.TemporaryDirectory() as folder, IndexWriter(Path(folder) / "index.sqlite") as writer:
        folders = [root.resolve() for root in roots]
        whole = mock.patch.object(FileResponse, "_open_file", _opened)
        with Indexer(writer, folders) as indexer, open_listener("127.0.0.1", port) as bound, whole:
            access = AccessRules("127.0.0.1", token, farm.make_visitors() if farm else None)
            path = Path(folder) / "index.sqlite"
            server = make_server(create_app(folders, path, indexer.progress, access, farm, history_place=history))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
            thread.start()
            try:
                eventually(lambda: server.started and indexer.progress.first_done)
                yield f"http://127.0.0.1:{bound.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join()
