"""Run the indexer in a separate process, so that pages stay fast during indexing.

The process writes its progress to stdout as lines of JSON. It exits when stdin closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hil.controller.web.index.index import IndexWriter
from hil.controller.web.index.indexer import POLL_SECONDS, Indexer
from hil.controller.web.index.progress import IndexProgress
from hil.core.processes import make_module_command, wait_or_kill
from hil.errors import StorageError

_PROGRESS_FIELDS = ("sessions", "to_read", "read", "cases", "first_done")
# Minimum seconds between progress reports.
_PACE_SECONDS = 0.1
# Seconds before the process exits or is killed. SQLite rolls back an interrupted transaction, and the indexer reads the
# session later.
_END_SECONDS = 0.3
_NICE = 5


class IndexProcess:
    """Context manager that keeps an index current, as :class:`~hil.controller.web.index.indexer.Indexer` does.

    Raises:
        StorageError: the index cannot be created.
    """

    def __init__(self, path: Path, roots: Sequence[Path]) -> None:
        self.progress = IndexProgress()
        self._command = make_module_command("hil.controller.web.index.index_process", str(path), *map(str, roots))
        self._stop = threading.Event()
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._follow_process, name="hil-indexer", daemon=True)

    def __enter__(self) -> IndexProcess:
        self._process = self._start_process()
        first = json.loads(self._read_line() or "{}")
        if error := first.get("error"):
            self._end_process()
            raise StorageError(error, hint=first.get("hint", ""))
        self._thread.start()
        return self

    @property
    def pid(self) -> int:
        """Process ID of the indexer."""
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        with self._starting:
            self._stop.set()
        self._end_process()
        self._thread.join()
        self.progress.tell()

    def _follow_process(self) -> None:
        while True:
            while line := self._read_line():
                self._update_progress(json.loads(line))
            if self._stop.wait(POLL_SECONDS):
                return
            # The process was killed, for example by the OOM killer. The index remains valid.
            self._end_process()
            with self._starting:
                if self._stop.is_set():
                    return
                self._process = self._start_process()

    def _update_progress(self, told: dict[str, Any]) -> None:
        for name in _PROGRESS_FIELDS:
            if name in told:
                setattr(self.progress, name, told[name])
        self.progress.tell()

    def _start_process(self) -> subprocess.Popen[str]:
        # Start a new session, so that Ctrl-C does not reach the child. The child exits with this process.
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def _read_line(self) -> str:
        """Return the next output line, or "" after the process ends."""
        assert self._process.stdout
        with contextlib.suppress(ValueError):  # stdout is closed
            line = self._process.stdout.readline()
            return line if line.endswith("\n") else ""
        return ""

    def _end_process(self) -> None:
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        wait_or_kill(self._process, _END_SECONDS)
        self._process.stdout.close()


def main(path: str, *roots: str) -> None:
    """Run the indexer. Exit when stdin closes."""
    # Requests have priority over indexing.
    os.nice(_NICE)
    closed = threading.Event()
    try:
        writer = IndexWriter(Path(path))
    except StorageError as error:
        _send_progress({"error": error.message, "hint": error.hint})
        return
    with writer, Indexer(writer, [Path(root) for root in roots]) as indexer:
        progress = indexer.progress
        threading.Thread(target=_wait_for_eof, args=(closed, progress), daemon=True).start()
        _send_progress({})
        seen = -1
        while not closed.is_set():
            with progress.changed:
                while progress.generation == seen and not closed.is_set():
                    progress.changed.wait()
                seen = progress.generation
            if not _send_progress({name: getattr(progress, name) for name in _PROGRESS_FIELDS}):
                return
            closed.wait(_PACE_SECONDS)


def _wait_for_eof(closed: threading.Event, progress: IndexProgress) -> None:
    """Stop the indexer when stdin closes. Exit soon, even during a write."""
    sys.stdin.read()
    closed.set()
    with progress.changed:
        progress.changed.notify_all()
    # Exit even if a write takes longer, because the server may be dead.
    time.sleep(_END_SECONDS)
    os._exit(0)


def _send_progress(told: dict[str, Any]) -> bool:
    """Report to the parent process. Return False if it has exited."""
    try:
        print(json.dumps(told), flush=True)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
