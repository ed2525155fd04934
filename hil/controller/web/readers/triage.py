"""Read the triage of failures for pages. An invalid file is reported on pages, and does not hide results."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.controller.records.decisions.triage import TriageEntry
from hil.controller.workloads.triage.entries import TriagedCase, TriageList, is_expired
from hil.controller.workloads.triage.triage_file import read_triage
from hil.errors import UsageError


@dataclass(frozen=True)
class TriageView:
    """Triage entries for a page."""

    triage: TriageList
    error: str = ""  # reason why the file is unreadable

    @property
    def entries(self) -> Sequence[TriageEntry]:
        """All entries."""
        return self.triage.entries

    def find(self, case: str, suite: str, flow: str, board: str, runtime: str, outcome: str = "") -> TriageEntry | None:
        """Return the entry of a case, or None.

        Args:
            outcome: outcome that the entry must cover; "" accepts every entry.
        """
        entry = self.triage.find(TriagedCase(case, suite, flow, board, runtime))
        if entry is not None and outcome and entry.outcomes and outcome not in entry.outcomes:
            return None
        return entry

    def is_expired(self, entry: TriageEntry) -> bool:
        """Return True if the last day of a `wontfix` has passed."""
        return is_expired(entry, self.triage.today)


class TriageReader:
    """Reader of a triage file that reads the file again after a change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._stamp: object = None
        self._triage, self._error = TriageList(), ""

    def read(self) -> TriageView:
        """Return the current entries. The date decides which entries have expired."""
        try:
            found = self.path.stat()
            stamp: object = (found.st_ino, found.st_mtime_ns, found.st_size)
        except OSError:
            stamp = None
        with self._lock:
            if stamp != self._stamp:
                try:
                    self._triage, self._error = read_triage(self.path), ""
                except UsageError as error:
                    self._triage, self._error = TriageList(), error.message
                self._stamp = stamp
            elif self._triage.today != (today := TriageList().today):
                self._triage = TriageList(self._triage.entries, today)
            return TriageView(self._triage, self._error)
