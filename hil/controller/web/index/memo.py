"""Cache values that pages compute from the whole index, until the index changes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from hil.controller.web.index.progress import IndexProgress

T = TypeVar("T")
_MAX_VALUES = 16


class IndexMemo:
    """Cache of the most recently used values for the current generation of the index."""

    def __init__(self, progress: IndexProgress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._generation = -1
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached value for a key, or make it. Do not change the value."""
        # Read the generation first: a value that is made during a change counts as old.
        generation = self._progress.generation
        with self._lock:
            if self._generation != generation:
                self._values.clear()
                self._generation = generation
            if key in self._values:
                self._values.move_to_end(key)
                found: T = self._values[key]
                return found
        made = make()
        with self._lock:
            if self._generation == generation:
                self._values[key] = made
                if len(self._values) > _MAX_VALUES:
                    self._values.popitem(last=False)
        return made
