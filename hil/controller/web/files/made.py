"""Cache entries that pages generate from stored files: graphs, and merged traces of two profiles."""

from __future__ import annotations

from hil.controller.storage.cache import Cache
from hil.controller.web.files.quota import has_room
from hil.errors import StorageError

# Cache entry kinds, and maximum bytes for all entries. The least recently used are evicted first.
KINDS = ("graph", "comparison")
MAX_BYTES = 2 << 30


def check_room(cache: Cache) -> None:
    """Evict entries to make room for a new one. Raises StorageError if the disk is full."""
    cache.gc(max_bytes=MAX_BYTES, kinds=KINDS)
    if not has_room(cache.root, 0):
        cache.gc(max_bytes=0, kinds=KINDS)
        if not has_room(cache.root, 0):
            raise StorageError("the server's disk is full", hint="free disk space on the server")
