"""What happened on the device, in order: who had it, and what ran. It proves that no two jobs ever ran at once."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_BYTES = 8 << 20
# Of Linux: it goes on while the machine sleeps, and it is the same for every process.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Journal:
    """Lines of JSON in a file, each with ``at_ns`` (since the machine's boot), ``wall_ns`` and ``what``.

    It is for those who look later: one that cannot be written is no error, and never keeps a run from running.

    Args:
        path: the file; when it has grown large it becomes ``NAME.1``, in place of an older one.
        most_bytes: how large.
    """

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._path = path
        self._most = most_bytes
        self._lock = threading.Lock()
        self._file = -1
        self._size = 0

    def note(self, what: str, **more: Any) -> None:
        """Add a line."""
        with self._lock, contextlib.suppress(OSError):
            stamps = {"at_ns": time.clock_gettime_ns(_CLOCK), "wall_ns": time.time_ns()}
            line = json.dumps({**stamps, "what": what, **more}).encode() + b"\n"
            if self._file < 0:
                self._open()
            elif self._size + len(line) > self._most:
                os.close(self._file)
                self._file = -1
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self._open()
            self._size += os.write(self._file, line)

    @contextlib.contextmanager
    def during(self, what: str, **more: Any) -> Iterator[dict[str, Any]]:
        """Note that something begins and that it has ended; what it gives takes more to say at the end."""
        self.note(f"{what} begins", **more)
        found: dict[str, Any] = {}
        try:
            yield found
        except BaseException as error:
            found["error"] = type(error).__name__
            raise
        finally:
            self.note(f"{what} ended", **more, **found)

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
