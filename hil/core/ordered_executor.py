"""Work that a thread does behind its caller, in order: hashing or writing what came while the next bytes come."""

from __future__ import annotations

import collections
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hil.core import digest

# So many pieces may wait: more would only be memory. A small piece is done at once: a thread would cost more.
_DEPTH = 8
_SMALL = 1 << 18


class Behind:
    """A thread for work in order. It ends with :meth:`finish`, or when nobody holds this object any more."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")  # its thread starts with the first work
        self._pending: collections.deque[Future[Any]] = collections.deque()

    def do(self, function: Callable[[Any], object], data: Any) -> None:
        """Call this with bytes after what was given before; raises what earlier work raised."""
        if len(self._pending) >= _DEPTH:
            self._pending.popleft().result()
        if not self._pending and len(data) <= _SMALL:
            function(data)
        else:
            self._pending.append(self._pool.submit(function, data))

    def wait(self) -> None:
        """Wait until all is done; raises what it raised."""
        while self._pending:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait until all is done, and let the thread go; raises what the work raised."""
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=False)


class StreamHasher(digest.Hasher):
    """A hasher for large pieces, which hashes behind its caller; the pieces must stay as they are until the digest."""

    def __init__(self, algorithm: str = digest.DEFAULT) -> None:
        super().__init__(algorithm)
        self._behind = Behind()

    def update(self, data: Any) -> None:
        """Add bytes (any contiguous buffer)."""
        self._behind.do(super().update, data)

    def digest(self) -> str:
        """The digest of all bytes, with its algorithm in front. Nothing can be added after."""
        self._behind.finish()
        return super().digest()
