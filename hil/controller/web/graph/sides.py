"""Cache recent graphs, so that a click on a node does not read thousands of layers."""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from hil.controller.web.graph.graphs import GraphSide, make_side
from hil.controller.web.graph.records import read_graph_record
from hil.controller.web.index.sessions import IndexedSession
from hil.controller.web.readers import RECORDS
from hil.controller.web.site import WebSite

# Maximum nodes in all cached graphs. A node takes a few hundred bytes.
MAX_NODES = 50_000

_Stamp = tuple[tuple[int, int, int], ...]


class GraphCache:
    """Cache for recent graphs. A graph becomes stale after a source file changes."""

    def __init__(self, most: int = MAX_NODES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[object, ...], tuple[_Stamp, GraphSide]] = OrderedDict()

    def get(self, key: tuple[object, ...], record: Iterable[Path]) -> GraphSide | None:
        """Return a cached graph, or None if it is missing or stale."""
        with self._lock:
            if key not in self._known:
                return None
            stamp, side = self._known[key]
            self._known.move_to_end(key)
        return side if stamp == _stamp_files((*record, *side.files)) else None

    def put(self, key: tuple[object, ...], record: Iterable[Path], side: GraphSide) -> None:
        """Cache a graph, and evict the least recently used graphs."""
        with self._lock:
            self._known[key] = (_stamp_files((*record, *side.files)), side)
            self._known.move_to_end(key)
            while len(self._known) > 1 and sum(len(one.graph.nodes) for _, one in self._known.values()) > self._most:
                self._known.popitem(last=False)


def _stamp_files(files: Iterable[Path]) -> _Stamp:
    found = []
    for file in files:
        try:
            look = file.stat()
            found.append((look.st_size, look.st_mtime_ns, look.st_ino))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


_sides = GraphCache()


def read_side(
    database: sqlite3.Connection,
    site: WebSite,
    session: IndexedSession,
    kind: str,
    way: str,
    *,
    case: str = "",
    model: str = "",
) -> GraphSide:
    """Return a session's graph. ``case`` or ``model`` select the model; the default is the first one.

    Raises:
        UsageError: see :func:`hil.controller.web.graph.records.read_graph_record` and
            :func:`hil.controller.web.graph.graphs.make_side`.
    """
    folder = Path(session.folder)
    files = [folder / name for name in (*RECORDS, session.lines) if name]
    key = (tuple(site.roots), session.folder, session.cases, case, model, kind, way)
    if (known := _sides.get(key, files)) is not None:
        return known
    before = _stamp_files(files)
    side = make_side(site, read_graph_record(database, session, case, site.roots, model), kind, way)
    # Do not cache a graph if its record changed during reading.
    if side.files and before == _stamp_files(files):
        _sides.put(key, files, side)
    return side
