"""Keep the index as the folders are: look at them all the time, and read what is new or was changed."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hil.controller.web.entries import CaseEntry, SessionEntry
from hil.controller.web.folders import Folders, index_stamp
from hil.controller.web.index import Known, Writer
from hil.controller.web.judging import judge_some
from hil.controller.web.names import said
from hil.controller.web.readers import read_lines, read_session
from hil.core.digest import digest_of
from hil.core.files import open_file
from hil.errors import StorageError, UsageError

# How often the folders are looked at: what is new is seen within twice that.
POLL_S = 0.8
# Of many folders a look takes long: then they are looked at less often, so that this is the share of the time.
_SHARE = 0.25
# So many cases of a session are shown at once, so that pages show a long run while it is read.
_BATCH = 20_000
# Of many sessions pages show what was read so far so often.
_SHOWN_S = 0.5
# A record that could be read, and cannot since it was written so lately, may be on its way here: it is not damaged yet.
_SETTLED_S = 2.0
# So many bytes before the place that was read to tell whether a file of lines was only written on since.
_MARK_BYTES = 512
_MARKED = "|"


@dataclass
class Progress:
    """How far the indexer is; read by pages, written by the indexer."""

    sessions: int = 0  # seen at the last look
    to_read: int = 0  # new or changed ones at the last look
    read: int = 0  # of these, those that are read
    cases: int = 0  # read since the start
    generation: int = 0  # grows with each change of the index
    first_done: bool = False  # whether every folder was read once
    changed: threading.Condition = field(default_factory=threading.Condition)

    def tell(self) -> None:
        """Wake who waits for a change."""
        with self.changed:
            self.generation += 1
            self.changed.notify_all()


@dataclass(frozen=True)
class _Job:
    """A session to be read."""

    root: int
    folder: Path
    record: str
    id: str
    stamp: str
    old: Known | None


class Indexer:
    """Reads the folders of runs into the index, in a thread of its own. A context manager.

    Where another process writes the index already, that one reads the folders, and this one only tells that the index
    has changed; when the other ends, this one takes its place.
    """

    def __init__(self, writer: Writer, roots: Sequence[Path]) -> None:
        self.progress = Progress()
        self._writer = writer
        self._roots = roots
        self._folders = [Folders() for _ in roots]
        # Files that are called like records and are none: root and id -> stamp.
        self._foreign: dict[tuple[int, str], str] = {}
        self._quiet: object = None  # what the last look saw, where it found nothing to do
        self._others = ""  # the stamp of an index that somebody else writes
        self._looked_s = 0.0  # how long the last look took, without what was read after it
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hil-indexer", daemon=True)

    def __enter__(self) -> Indexer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.progress.tell()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(self.pause_s)

    @property
    def pause_s(self) -> float:
        """How long until the next look, however long what was found took to be read."""
        return max(POLL_S, self._looked_s * (1 / _SHARE - 1))

    def look(self) -> None:
        """Look at every folder once and read what is new; what is gone is forgotten.

        An index that was deleted or damaged meanwhile is made anew, by this look or the next one.
        """
        try:
            if self._writer.take():
                self._look()
            else:
                self._follow()
        except sqlite3.Error as error:
            self._writer.recover(error)
        except StorageError:
            pass  # there is no room for it now, or no right to write it: what it has stays readable

    def _follow(self) -> None:
        stamp = index_stamp(self._writer.path)
        if stamp != self._others or not self.progress.first_done:
            self._others, self.progress.first_done = stamp, True
            self.progress.tell()

    def _look(self) -> None:
        begun, progress = time.monotonic(), self.progress
        found, jobs, gone = 0, list[_Job](), list[int]()
        there = [folders.look(root) for folders, root in zip(self._folders, self._roots, strict=True)]
        seen = (self._writer.opened, there)
        if seen == self._quiet:
            self._looked_s = time.monotonic() - begun
            self._judge()
            return
        for number, root in enumerate(self._roots):
            known = self._writer.known(number)
            for way, record, stamp in there[number].sessions:
                session_id = said(way)
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
        jobs.sort(key=_changed_ns, reverse=True)  # what people look for first
        progress.sessions, progress.to_read, progress.read = found, len(jobs), 0
        if gone:
            self._writer.forget(gone)
            progress.tell()
        self._read_all(jobs)
        if self._stop.is_set():
            return
        if not progress.first_done:
            progress.first_done = True
            progress.tell()
        self._quiet = None if jobs or gone else seen
        self._judge()

    def _judge(self) -> None:
        if self._writer.work(judge_some):
            self.progress.tell()

    def _read_all(self, jobs: Sequence[_Job]) -> None:
        """Read sessions; what is read is shown now and then, and in the end."""
        with self._writer.gathering():
            shown, changed = time.monotonic(), False
            for job in jobs:
                if self._stop.is_set():
                    break
                changed |= self._read(job)
                self.progress.read += 1
                if changed and time.monotonic() - shown > _SHOWN_S:
                    self._writer.commit()
                    self.progress.tell()
                    shown, changed = time.monotonic(), False
        if changed:
            self.progress.tell()

    def _read(self, job: _Job) -> bool:
        """Read a session into the index; whether that changed it."""
        found = read_session(job.folder, job.record, job.id)
        if found is None:
            self._foreign[job.root, job.id] = job.stamp
            return False
        session, cases = found
        if session.kind == "damaged" and _is_coming(job.folder / job.record, known=job.old is not None):
            return False
        if session.lines:
            self._read_lines(job, session)
        else:
            self._writer.write(job.root, job.folder, session, cases, stamp=job.stamp)
            self.progress.cases += len(cases)
        return True

    def _read_lines(self, job: _Job, session: SessionEntry) -> None:
        """Read the cases of a suite's run: those that were added since, where its file of lines was only written on."""
        path, old = job.folder / session.lines, job.old
        grown = old is not None and bool(old.read_bytes) and _mark(path, old.read_bytes) == _marked(old.stamp)
        start, number, damaged = (old.read_bytes, old.cases, old.damaged) if grown and old else (0, 0, 0)
        batch: list[CaseEntry] = []
        fresh = not grown

        def write() -> None:
            nonlocal fresh
            stamp = f"{job.stamp}{_MARKED}{_mark(path, start)}"
            self._writer.write(
                job.root, job.folder, session, batch, stamp=stamp, read_bytes=start, damaged=damaged, fresh=fresh
            )
            self.progress.cases += len(batch)
            fresh = False
            batch.clear()

        for case, end in read_lines(path, start, number):
            start = end
            if case is None:
                damaged += 1
            else:
                batch.append(case)
            if len(batch) >= _BATCH:
                write()
                self._writer.commit()
                self.progress.tell()
        write()


def _changed_ns(job: _Job) -> int:
    """When a session's record was written, as its stamp says; 0 where nobody knows."""
    parts = job.stamp.split(" ")[0].split(":")
    return int(parts[1]) if len(parts) > 1 else 0


def _is_coming(path: Path, *, known: bool) -> bool:
    """Whether a record that cannot be read is gone, or replaces one that was read and may be on its way here."""
    try:
        changed = path.stat().st_mtime
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return known and 0 <= time.time() - changed < _SETTLED_S


def _mark(path: Path, end: int) -> str:
    """What tells the bytes before a place in a file from others; "" where it is not that long."""
    try:
        with open_file(path) as file:
            file.seek(max(0, end - _MARK_BYTES))
            found = file.read(min(end, _MARK_BYTES))
    except (OSError, UsageError):
        return ""
    return digest_of(found) if found and len(found) == min(end, _MARK_BYTES) else ""


def _marked(stamp: str) -> str:
    return stamp.partition(_MARKED)[2] or "nothing"
