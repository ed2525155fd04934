"""Content addresses: ``blake3:HEX`` by default, ``sha256:HEX`` accepted, always with the algorithm in front.

Large data is hashed in a thread, while the next bytes come.
"""

from __future__ import annotations

import collections
import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blake3 import blake3

from hil.core.files import open_file
from hil.errors import UsageError

DEFAULT = "blake3"
ALGORITHMS = ("blake3", "sha256")
_FORM = re.compile(r"(blake3|sha256):[0-9a-f]{64}")
# BLAKE3 splits work over threads only above about 128 KiB a thread; below this size one thread is faster.
_THREADS_FROM = 1 << 20
_PIECE = 4 << 20
# So many pieces may wait: more would only be memory.
_DEPTH = 8
# So large a piece is done before its caller goes on: a thread would cost more, and the caller may use its memory again.
SMALL = 1 << 19


class Hasher:
    """An incremental digest.

    Args:
        threads: most that BLAKE3 may use for one piece.

    Raises:
        UsageError: the algorithm is unknown.
    """

    def __init__(self, algorithm: str = DEFAULT, threads: int = 1) -> None:
        if algorithm not in ALGORITHMS:
            raise UsageError(f"unknown digest algorithm {algorithm!r}", hint=f"one of {', '.join(ALGORITHMS)}")
        self.algorithm = algorithm
        self._hash: Any = blake3(max_threads=threads) if algorithm == "blake3" else hashlib.sha256()

    def update(self, data: Any) -> None:
        """Add bytes (any contiguous buffer)."""
        self._hash.update(data)

    def digest(self) -> str:
        """The digest of all bytes so far, with its algorithm in front."""
        return f"{self.algorithm}:{self._hash.hexdigest()}"


class OrderedExecutor:
    """A thread for work in order. It ends with :meth:`finish`, or when nobody holds this object any more."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")  # its thread starts with the first work
        self._pending: collections.deque[Future[Any]] = collections.deque()

    def do(self, function: Callable[[Any], object], data: Any) -> None:
        """Call this with bytes after what was given before; raises what earlier work raised.

        Bytes above :data:`SMALL` must stay as they are until that is done.
        """
        if len(data) <= SMALL:
            self.wait()
            function(data)
            return
        if len(self._pending) >= _DEPTH:
            self._pending.popleft().result()
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


class StreamHasher(Hasher):
    """A hasher for large pieces, which hashes behind its caller; those above SMALL must stay until the digest."""

    def __init__(self, algorithm: str = DEFAULT) -> None:
        super().__init__(algorithm)
        self._executor = OrderedExecutor()

    def update(self, data: Any) -> None:
        """Add bytes (any contiguous buffer)."""
        self._executor.do(super().update, data)

    def digest(self) -> str:
        """The digest of all bytes, with its algorithm in front. Nothing can be added after."""
        self._executor.finish()
        return super().digest()


def digest_of(data: Any, algorithm: str = DEFAULT) -> str:
    """The digest of a buffer."""
    hasher = Hasher(algorithm, blake3.AUTO if memoryview(data).nbytes >= _THREADS_FROM else 1)
    hasher.update(data)
    return hasher.digest()


def digest_file(path: Path, algorithm: str = DEFAULT) -> str:
    """The digest of a file's content, as long as it is when it is opened.

    Read and not mapped: whoever cut a mapped file would end this process by SIGBUS.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path) as file:
        left = os.fstat(file.fileno()).st_size
        hasher = Hasher(algorithm, blake3.AUTO if left >= _THREADS_FROM else 1)
        while piece := file.read(min(left, _PIECE)):
            hasher.update(piece)
            left -= len(piece)
    return hasher.digest()


def check(digest: str) -> str:
    """The digest itself where it is well formed: nothing else may become part of a path. Raises UsageError."""
    if not _FORM.fullmatch(digest):
        raise UsageError(f"not a digest: {digest[:100]!r}", hint="blake3:HEX or sha256:HEX with 64 hexadecimal digits")
    return digest


def algorithm_of(digest: str) -> str:
    """The algorithm in front of a well-formed digest."""
    return check(digest).split(":", 1)[0]
