"""Graphs that were read lately: a click on a node must not read thousands of layers again."""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from hil.controller.web.graph_records import read_graph_record
from hil.controller.web.graphs import Side, make_side
from hil.controller.web.readers import RECORDS
from hil.controller.web.sessions import Session
from hil.controller.web.site import Site

# So many nodes are kept, of however many graphs: some hundred bytes each.
MOST_NODES = 50_000

_Stamp = tuple[tuple[int, int, int], ...]


class Sides:
    """The graphs that were read last, each as long as no file of its changes."""

    def __init__(self, most: int = MOST_NODES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[object, ...], tuple[_Stamp, Side]] = OrderedDict()

    def get(self, key: tuple[object, ...], record: Iterable[Path]) -> Side | None:
        """A graph by what was asked; None where it is not known, or a file has changed."""
        with self._lock:
            if key not in self._known:
                return None
            stamp, side = self._known[key]
            self._known.move_to_end(key)
        return side if stamp == _stamp((*record, *side.files)) else None

    def put(self, key: tuple[object, ...], record: Iterable[Path], side: Side) -> None:
        """Keep a graph; the ones that were asked for least lately make room."""
        with self._lock:
            self._known[key] = (_stamp((*record, *side.files)), side)
            self._known.move_to_end(key)
            while len(self._known) > 1 and sum(len(one.graph.nodes) for _, one in self._known.values()) > self._most:
                self._known.popitem(last=False)


def _stamp(files: Iterable[Path]) -> _Stamp:
    found = []
    for file in files:
        try:
            look = file.stat()
            found.append((look.st_size, look.st_mtime_ns, look.st_ino))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)


_sides = Sides()


def read_side(
    database: sqlite3.Connection, site: Site, session: Session, kind: str, way: str, *, case: str = "", model: str = ""
) -> Side:
    """A graph of a session: of a case's model, of one by its name, or of its first.

    Raises:
        UsageError: as :func:`hil.controller.web.graph_records.read_graph_record` and
            :func:`hil.controller.web.graphs.make_side` say.
    """
    folder = Path(session.folder)
    files = [folder / name for name in (*RECORDS, session.lines) if name]
    key = (tuple(site.roots), session.folder, session.cases, case, model, kind, way)
    if (known := _sides.get(key, files)) is not None:
        return known
    before = _stamp(files)
    side = make_side(site, read_graph_record(database, session, case, site.roots, model), kind, way)
    # What was written while it was read is another record.
    if side.files and before == _stamp(files):
        _sides.put(key, files, side)
    return side
