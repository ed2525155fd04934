"""Content digests: ``blake3:HEX`` by default, or ``sha256:HEX``. The algorithm is always included.

Large data is hashed in a thread while the next data is read.
"""

from __future__ import annotations

import collections
import hashlib
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from blake3 import blake3

from hil.errors import UsageError

DEFAULT = "blake3"
ALGORITHMS = ("blake3", "sha256")
_FORM = re.compile(r"(blake3|sha256):[0-9a-f]{64}")
# BLAKE3 uses threads efficiently only above about 128 KiB per thread; below this size a single thread is faster.
_THREADS_FROM = 1 << 20
# Maximum queue length. A longer queue would only use more memory.
_DEPTH = 8
# Data up to this size is processed without a thread, which would take longer. The caller may then reuse the buffer.
SMALL = 1 << 19


class Hasher:
    """Incremental digest.

    Args:
        threads: maximum BLAKE3 threads per update.

    Raises:
        UsageError: the algorithm is unknown.
    """

    def __init__(self, algorithm: str = DEFAULT, threads: int = 1) -> None:
        if algorithm not in ALGORITHMS:
            raise UsageError(f"unknown digest algorithm {algorithm!r}", hint=f"expected one of {', '.join(ALGORITHMS)}")
        self.algorithm = algorithm
        self._hash: Any = blake3(max_threads=threads) if algorithm == "blake3" else hashlib.sha256()

    def update(self, data: Any) -> None:
        """Add bytes from any contiguous buffer."""
        self._hash.update(data)

    def digest(self) -> str:
        """Return the digest of all bytes so far, prefixed with the algorithm."""
        return f"{self.algorithm}:{self._hash.hexdigest()}"


class OrderedExecutor:
    """Thread that runs tasks in order.

    The thread ends with :meth:`finish`, or when this object is garbage-collected.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")  # the thread starts with the first task
        self._pending: collections.deque[Future[Any]] = collections.deque()

    def do(self, function: Callable[[Any], object], data: Any) -> None:
        """Run the function on bytes after all earlier tasks. Re-raises exceptions from earlier tasks.

        Buffers above :data:`SMALL` must not change until the task is done.
        """
        if len(data) <= SMALL:
            self.wait()
            function(data)
            return
        if len(self._pending) >= _DEPTH:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(function, data))

    def wait(self) -> None:
        """Wait for all tasks. Re-raises their exceptions."""
        while self._pending:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait for all tasks and stop the thread. Re-raises task exceptions."""
        try:
            self.wait()
        finally:
            self._pool.shutdown(wait=False)


class StreamHasher(Hasher):
    """Hasher that processes large buffers in a thread. Buffers above SMALL must not change until :meth:`digest`."""

    def __init__(self, algorithm: str = DEFAULT) -> None:
        super().__init__(algorithm)
        self._executor = OrderedExecutor()

    def update(self, data: Any) -> None:
        """Add bytes from any contiguous buffer."""
        self._executor.do(super().update, data)

    def digest(self) -> str:
        """Return the digest of all bytes, prefixed with the algorithm. Ends the hasher: no update may follow."""
        self._executor.finish()
        return super().digest()


def make_hasher(size: int, algorithm: str = DEFAULT) -> Hasher:
    """Return a hasher for data of this size in bytes."""
    return Hasher(algorithm, blake3.AUTO if size >= _THREADS_FROM else 1)


def digest_of(data: Any, algorithm: str = DEFAULT) -> str:
    """Return a buffer's digest."""
    hasher = make_hasher(memoryview(data).nbytes, algorithm)
    hasher.update(data)
    return hasher.digest()


def check(digest: str) -> str:
    """Return the digest if it is well formed, so that it is safe in a path. Raises UsageError otherwise."""
    if not _FORM.fullmatch(digest):
        raise UsageError(
            f"not a digest: {digest[:100]!r}", hint="expected blake3:HEX or sha256:HEX with 64 hexadecimal digits"
        )
    return digest


def get_algorithm(digest: str) -> str:
    """Return the algorithm prefix of a well-formed digest."""
    return check(digest).split(":", 1)[0]
