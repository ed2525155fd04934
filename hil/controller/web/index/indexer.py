"""Keep the index current: scan directories periodically, and read new and changed sessions."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.controller.web.index.folders import Folders, index_stamp
from hil.controller.web.index.index import IndexedState, IndexWriter
from hil.controller.web.index.judging import judge_some
from hil.controller.web.index.progress import IndexProgress
from hil.controller.web.readers import read_lines, read_session
from hil.controller.web.text.entries import CaseEntry, SessionEntry
from hil.controller.web.text.names import escape_name
from hil.controller.web.text.roots import number_roots
from hil.core.digest import digest_of
from hil.core.files import open_file
from hil.errors import StorageError, UsageError

# Seconds between scans. New sessions appear within twice that time.
POLL_SECONDS = 0.8
# Maximum share of the time to spend on scans. Slow scans run less often.
_SHARE = 0.25
# Limits of a batch: lines and bytes. Other sessions are read after each batch of a large session.
_BATCH, _BATCH_BYTES = 2_000, 4 << 20
# A batch contains at least 1/32 of the known cases. Each write counts all cases in the session, so this limits the
# total time for counting.
_BATCH_PART = 32
# Seconds between commits while reading many sessions.
_SHOWN_SECONDS = 0.5
# A known record that becomes unreadable may still be in transfer. It counts as damaged after this time.
_SETTLED_SECONDS = 2.0
# Number of bytes before the last read position to compare. If these bytes are unchanged, lines were only appended to
# the file.
_MARK_BYTES = 512
# Separates the files' stamp from the read position's mark. While lines are unread, the stamp is "".
_MARKED = "|"


@dataclass(frozen=True)
class _Job:
    """Session to read."""

    root: int
    folder: Path
    record: str
    id: str
    stamp: str
    old: IndexedState | None

    @property
    def done_bytes(self) -> int:
        """Bytes already read of a session with unread lines, or 0 for other sessions."""
        return self.old.read_bytes if self.old and self.old.stamp.startswith(_MARKED) else 0


class Indexer:
    """Context manager with a thread that reads runs directories into the index.

    If a different process writes the index, this process only reports changes. This process takes over after the other
    process ends.
    """

    def __init__(self, writer: IndexWriter, roots: Sequence[Path]) -> None:
        self.progress = IndexProgress()
        self._writer = writer
        self._roots = number_roots(roots)
        self._folders = {number: Folders() for number in self._roots}
        # Files of other tools that have a record's name: (root, id) -> stamp.
        self._foreign: dict[tuple[int, str], str] = {}
        self._quiet: object = None  # the last scan's result, if it found no changes
        self._others = ""  # index stamp, if a different process writes
        self._looked_s = 0.0  # last scan's duration, without reading sessions
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._scan_until_stopped, name="hil-indexer", daemon=True)

    def __enter__(self) -> Indexer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.progress.tell()

    def _scan_until_stopped(self) -> None:
        while not self._stop.is_set():
            self.scan()
            self._stop.wait(self.pause_s)

    @property
    def pause_s(self) -> float:
        """Seconds to the next scan. Only scan time counts, not the time for reading sessions."""
        return max(POLL_SECONDS, self._looked_s * (1 / _SHARE - 1))

    def scan(self) -> None:
        """Scan all directories, read new sessions, and delete missing sessions from the index.

        Scans again between the batches of a large session. A deleted or damaged index is rebuilt by this call or the
        next.
        """
        while not self._scan_once() and not self._stop.is_set():
            pass

    def find_unread(self, database: sqlite3.Connection) -> dict[tuple[int, str], str]:
        """Return the stored sessions that the index does not contain in their current state.

        After :meth:`scan`, these are sessions that the other process which writes the index has not read yet, and
        sessions that changed in the meantime.

        Returns:
            Number of the directory and ID -> stamp in the index, or "".
        """
        rows = database.execute("select root, id, stamp from sessions")
        known = {(number, session_id): str(stamp) for number, session_id, stamp in rows}
        unread = {}
        for number, root in self._roots.items():
            for way, record, stamp in self._folders[number].scan(root).sessions:
                place = number, escape_name(way)
                indexed = known.get(place, "")
                if stamp in (indexed.partition(_MARKED)[0], self._foreign.get(place)):
                    continue
                if read_session(root / way, record, place[1]) is None:
                    self._foreign[place] = stamp
                else:
                    unread[place] = indexed
        return unread

    def _scan_once(self) -> bool:
        """Scan all directories once. Return False if sessions have unread lines."""
        try:
            if self._writer.take():
                return self._scan_folders()
            self._follow_writer()
        except sqlite3.Error as error:
            self._writer.recover(error)
        except StorageError:
            pass  # the disk is full or not writable; the existing index remains readable
        return True

    def _follow_writer(self) -> None:
        stamp = index_stamp(self._writer.path)
        if stamp != self._others or not self.progress.first_done:
            self._others, self.progress.first_done = stamp, True
            self.progress.tell()

    def _scan_folders(self) -> bool:
        begun, progress = time.monotonic(), self.progress
        found, jobs, gone = 0, list[_Job](), list[int]()
        there = {number: self._folders[number].scan(root) for number, root in self._roots.items()}
        seen = (self._writer.opened, there)
        if seen == self._quiet:
            self._looked_s = time.monotonic() - begun
            self._judge_batch()
            return True
        for number, root in self._roots.items():
            known = self._writer.list_known(number)
            for way, record, stamp in there[number].sessions:
                session_id = escape_name(way)
                found += 1
                old = known.pop(session_id, None)
                if self._foreign.get((number, session_id)) == stamp:
                    continue
                if old is None or old.stamp.partition(_MARKED)[0] != stamp:
                    jobs.append(_Job(number, root / way, record, session_id, stamp, old))
            gone += [old.key for old in known.values()]
            if self._writer.keep_profiles(number, there[number].profiles):
                progress.tell()
        self._looked_s = time.monotonic() - begun
        jobs.sort(key=lambda job: (job.done_bytes, -_parse_changed_ns(job)))  # new sessions first, newest first
        progress.sessions, progress.to_read, progress.read = found, len(jobs), 0
        if gone:
            self._writer.forget(gone)
            progress.tell()
        if not self._read_all(jobs):
            return False
        if not progress.first_done:
            progress.first_done = True
            progress.tell()
        self._quiet = None if jobs or gone else seen
        self._judge_batch()
        return True

    def _judge_batch(self) -> None:
        if self._writer.run_in_transaction(judge_some):
            self.progress.tell()

    def _read_all(self, jobs: Sequence[_Job]) -> bool:
        """Read sessions; read only one batch of every large session. Commit periodically and at the end.

        Return False if sessions have unread lines, or the indexer stops.
        """
        with self._writer.delay_commits():
            begun = shown = time.monotonic()
            changed, complete = False, True
            for job in jobs:
                if self._stop.is_set() or (not complete and job.done_bytes and time.monotonic() - begun > self.pause_s):
                    complete = False
                    break
                is_changed, is_read = self._read_job(job)
                changed |= is_changed
                complete &= is_read
                self.progress.read += is_read
                if changed and time.monotonic() - shown > _SHOWN_SECONDS:
                    self._writer.commit()
                    self.progress.tell()
                    shown, changed = time.monotonic(), False
        if changed:
            self.progress.tell()
        return complete

    def _read_job(self, job: _Job) -> tuple[bool, bool]:
        """Read a session into the index. Return whether the index changed, and whether all lines were read."""
        found = read_session(job.folder, job.record, job.id)
        if found is None:
            self._foreign[job.root, job.id] = job.stamp
            return False, True
        session, cases = found
        if session.kind == "damaged" and _is_incomplete(job.folder / job.record, known=job.old is not None):
            return False, True
        if session.lines:
            return True, self._read_batch(job, session)
        self._writer.write(job.root, job.folder, session, cases, stamp=job.stamp)
        self.progress.cases += len(cases)
        return True, True

    def _read_batch(self, job: _Job, session: SessionEntry) -> bool:
        """Read a batch of a suite run's cases. Return True if no lines are left.

        If lines were only appended to the file, read only the new lines.
        """
        path, old = job.folder / session.lines, job.old
        mark, number = _parse_mark(old.stamp) if old else ("", 0)
        fresh = not (old and mark and old.read_bytes and _digest_before(path, old.read_bytes) == mark)
        begin, known, damaged = (0, 0, 0) if fresh or not old else (old.read_bytes, old.cases, old.damaged)
        number, end = 0 if fresh else number, begin
        most = number + max(_BATCH, known // _BATCH_PART)
        batch: list[CaseEntry] = []
        is_complete = True
        for case, end in read_lines(path, begin, number):
            number += 1
            if case is None:
                damaged += 1
            else:
                batch.append(case)
            if number >= most or end - begin >= _BATCH_BYTES:
                is_complete = False
                break
        stamp = f"{job.stamp if is_complete else ''}{_MARKED}{_digest_before(path, end)} {number}"
        self._writer.write(
            job.root, job.folder, session, batch, stamp=stamp, read_bytes=end, damaged=damaged, fresh=fresh
        )
        self.progress.cases += len(batch)
        return is_complete


def is_partial(stamp: str) -> bool:
    """Return True for the stamp of a session with unread lines."""
    return stamp.startswith(_MARKED)


def _parse_changed_ns(job: _Job) -> int:
    """Return the record's modification time from the session's stamp, or 0 if unknown."""
    parts = job.stamp.split(" ")[0].split(":")
    return int(parts[1]) if len(parts) > 1 else 0


def _is_incomplete(path: Path, *, known: bool) -> bool:
    """Return True if an unreadable record may become readable or disappear.

    Either the record was deleted, or a known record was replaced recently and may still be in transfer.
    """
    try:
        changed = path.stat().st_mtime
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return known and 0 <= time.time() - changed < _SETTLED_SECONDS


def _digest_before(path: Path, end: int) -> str:
    """Return a digest for the bytes before an offset, or "" if the file is shorter."""
    try:
        with open_file(path) as file:
            file.seek(max(0, end - _MARK_BYTES))
            found = file.read(min(end, _MARK_BYTES))
    except (OSError, UsageError):
        return ""
    return digest_of(found) if found and len(found) == min(end, _MARK_BYTES) else ""


def _parse_mark(stamp: str) -> tuple[str, int]:
    """Return the digest before the read position, and the number of lines before it."""
    digest, _, number = stamp.partition(_MARKED)[2].partition(" ")
    return (digest, int(number)) if number.isdecimal() else ("", 0)
