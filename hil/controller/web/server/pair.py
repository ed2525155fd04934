"""Serve the tensor page for two files, without stored sessions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hil.controller.web.access.security import AccessRules
from hil.controller.web.index.index import IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.server.app import create_app
from hil.controller.web.server.server import listener, server_of
from hil.controller.web.tensors.subjects import check_pair

HOST = "127.0.0.1"


def serve_pair(a: Path, b: Path, port: int, *, listening: Callable[[str], None]) -> None:
    """Serve the page for two .npy files on loopback until Ctrl-C.

    Args:
        b: the reference.
        port: port to listen on; 0 selects a free port.
        listening: called with the page's URL after the socket is bound.

    Raises:
        UsageError: a file is not a tensor, or the port is in use.
    """
    check_pair(a, b)
    with (
        tempfile.TemporaryDirectory(prefix="hil-web-") as folder,
        listener(HOST, port) as bound,
        IndexWriter(Path(folder) / "index.sqlite") as writer,
    ):
        nothing = Path(folder) / "runs"
        nothing.mkdir()
        indexer = Indexer(writer, [nothing])
        indexer.look()
        app = create_app([nothing], Path(folder) / "index.sqlite", indexer.progress, AccessRules(HOST))
        app.state.pair = (a.absolute(), b.absolute())
        listening(f"http://{HOST}:{bound.getsockname()[1]}/tensors")
        server_of(app, owns_process=True).run(sockets=[bound])
