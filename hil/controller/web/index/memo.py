"""Cache values that pages compute from the whole index, until the index changes."""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from hil.controller.web.index.index import IndexReader
from hil.controller.web.index.progress import IndexProgress

T = TypeVar("T")
_MAX_VALUES = 16


class IndexMemo:
    """Cache of the most recently used values for the current generation of the index."""

    def __init__(self, reader: IndexReader, progress: IndexProgress) -> None:
        self._reader, self._progress = reader, progress
        self._lock = threading.Lock()
        self._generation = -1
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, read: Callable[[sqlite3.Connection], T]) -> T:
        """Return the cached value for a key, or read it. Do not change the value.

        Do not call this function in a snapshot: the snapshot may be older than the current generation.
        """
        # Read the generation first: a value that is read during a change counts as old.
        generation = self._progress.generation
        with self._lock:
            if self._generation != generation:
                self._values.clear()
                self._generation = generation
            if key in self._values:
                self._values.move_to_end(key)
                found: T = self._values[key]
                return found
        with self._reader.open_snapshot() as database:
            made = read(database)
        with self._lock:
            if self._generation == generation:
                self._values[key] = made
                if len(self._values) > _MAX_VALUES:
                    self._values.popitem(last=False)
        return made
