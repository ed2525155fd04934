"""SQLite index for stored sessions. The index only caches data and can be deleted at any time.

Repeated texts are keys into ``words``. A single process writes (:class:`IndexWriter`). Multiple threads read
(:class:`IndexReader`).
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from hil.controller.storage.runs import convert_write_errors
from hil.controller.web.text.entries import CaseEntry, SessionEntry, find_worst_kind, is_failure
from hil.controller.web.text.names import escape_name
from hil.controller.workloads.suites.reports.changes import ITERATIONS
from hil.core.cancellation import is_cancelled
from hil.core.text import replace_surrogates

T = TypeVar("T")
# Increase this when a table changes. An index with a different version is rebuilt.
VERSION = 18
_TABLES = """
-- tells this index from one that is made anew
create table made (seed integer);
insert into made values (random());
create table sessions (
    key integer primary key, root integer, id text, folder text, kind text, title text, created real, finished integer,
    exit_code integer, suite text, flow text, boards text, runtimes text, compilers text, models text, labels text,
    branch text, commit_id text, command text, versions text, stack text, digests text, place text,
    planned integer, error text, lines text,
    -- of its cases: the gravest kind, outcome -> how many as JSON, and how many of each kind
    verdict text, outcomes text, cases integer, failing integer,
    -- the sum of its cases' device times that were measured well enough to be compared, and how many these are
    device_ns real, device_cases integer,
    -- what tells whether the folder's files are as they were read, and how far into its lines that was
    stamp text, read_bytes integer, damaged integer,
    unique (root, id));
create index sessions_by_created on sessions (created);
create index sessions_by_kind on sessions (kind);
create table words (key integer primary key, word text unique);
create table cases (
    session integer, name integer, number integer, model integer, op integer, flow integer, runtime integer,
    board integer, outcome integer, ended integer, stage integer, message integer, output integer,
    device_p50_ns real, device_p90_ns real, iterations integer, program integer, cold integer,
    -- comparable: iterations of a time that can be compared, 0 for grade F
    grade integer, comparable integer,
    host_s real, compile_s real, program_bytes integer, joules real, max_abs real, max_ulp real, sqnr_db real,
    started real, place integer, length integer,
    primary key (session, name)) without rowid;
create index cases_by_name on cases (name, board);
-- of those cases alone that have several outputs; number: the case's, which tells of what it had before
create table outputs (
    session integer, name integer, output integer, number integer, max_abs real, sqnr_db real,
    primary key (session, name, output)) without rowid;
-- of cases' histories (`judging.py`): the sessions since which one is broken or slower, each with the session
-- before; over: whether it is no more; compared: the sessions before and since that tell it, as JSON
create table changes (
    name integer, board integer, session integer, what text, earlier integer, before real, after real, created real,
    over integer, compared text,
    primary key (name, session, what)) without rowid;
create index changes_by_created on changes (created);
-- names and boards of cases whose histories have changed since they were looked at
create table unjudged (name integer, board integer, primary key (name, board)) without rowid;
-- profiles that lie outside of sessions' folders
create table profiles (root integer, way text, kind text, changed real, primary key (root, way)) without rowid;
create virtual table session_texts using fts5 (text, tokenize = 'trigram');
-- the texts of ``words``, which are never deleted
create virtual table word_texts using fts5 (word, content = 'words', content_rowid = 'key', tokenize = 'trigram');
"""
# Columns in ``cases`` with word keys, and columns with numbers.
WORDS = ("name", "model", "op", "flow", "runtime", "board", "outcome", "ended", "stage", "message", "output", "grade")
NUMBERS = (
    *(
        "number",
        "device_p50_ns",
        "device_p90_ns",
        "iterations",
        "program",
        "cold",
        "comparable",
        "host_s",
        "compile_s",
        "program_bytes",
        "joules",
    ),
    *("max_abs", "max_ulp", "sqnr_db", "started", "place", "length"),
)
_CASE = f"insert or replace into cases (session, {', '.join((*WORDS, *NUMBERS))}) values " + (
    f"({', '.join('?' * (1 + len(WORDS) + len(NUMBERS)))})"
)
_OUTPUT = "insert or replace into outputs (session, name, output, number, max_abs, sqnr_db) values (?, ?, ?, ?, ?, ?)"
_words_of, _numbers_of = attrgetter(*WORDS), attrgetter(*NUMBERS)
# Tables with rows for a session, and the column with the session's key.
_OF_SESSIONS = (("sessions", "key"), ("cases", "session"), ("outputs", "session"), ("session_texts", "rowid"))
# Separator around each name in a column with several names, so that queries can match a single name.
SEPARATOR = "\n"


@dataclass(frozen=True)
class IndexedState:
    """A session directory's indexed state."""

    key: int
    stamp: str
    read_bytes: int
    cases: int
    damaged: int


class IndexWriter:
    """Index writer, unless a different process has the lock. A context manager.

    Raises:
        StorageError: the index is not writable.
    """

    def __init__(self, path: Path) -> None:
        import filelock

        self.path = path
        self._lock = filelock.FileLock(f"{path}.lock", timeout=0, thread_local=False)
        self._opened: sqlite3.Connection | None = None
        self._file = 0  # the open file's inode
        self.opened = 0  # increments when an index is opened, which may be a new index
        self._gathers = False
        self._words: dict[str, int] = {}
        self.take()

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._lock.release()

    @property
    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            raise sqlite3.OperationalError("the index is not open")
        return self._opened

    def take(self) -> bool:
        """Acquire the lock and open the index, or rebuild it. Return False if a different process has the lock."""
        import filelock

        if self._opened is not None and _read_file_number(self.path) == self._file:
            return True
        self._close()
        with convert_write_errors(self.path.parent, ""):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                self._lock.acquire()
            except filelock.Timeout:
                return False
        self._opened = _open_index(self.path)
        self._file = _read_file_number(self.path)
        self.opened += 1
        return True

    def recover(self, error: sqlite3.Error) -> None:
        """After an SQLite error, delete the index if it is damaged. The next :meth:`take` then rebuilds the index."""
        with contextlib.suppress(sqlite3.Error):
            self._close()
        # An OperationalError may mean a missing table. Other causes (a lock, permissions or the disk) do not show a
        # damaged index.
        if not isinstance(error, sqlite3.OperationalError) or _is_missing_tables(self.path):
            remove(self.path)

    def _close(self) -> None:
        if self._opened is not None:
            database, self._opened = self._opened, None
            database.close()
        self._words.clear()

    def list_known(self, root: int) -> dict[str, IndexedState]:
        """Return a runs directory's indexed sessions by id."""
        rows = self._database.execute(
            "select id, key, stamp, read_bytes, cases, damaged from sessions where root = ?", (root,)
        )
        return {row[0]: IndexedState(*row[1:]) for row in rows}

    def keep_profiles(self, root: int, found: Sequence[tuple[str, str, float]]) -> bool:
        """Store a runs directory's profiles as path, kind and modification time. Return True if they changed."""
        known = self._database.execute("select way, kind, changed from profiles where root = ?", (root,)).fetchall()
        if known == sorted(found):
            return False
        with self._run_transaction():
            self._database.execute("delete from profiles where root = ?", (root,))
            self._database.executemany(
                "insert or replace into profiles values (?, ?, ?, ?)", [(root, *one) for one in found]
            )
        return True

    def forget(self, keys: Iterable[int]) -> None:
        """Delete sessions from the index."""
        with self._run_transaction():
            for key in keys:
                self._mark_unjudged(key)
                for table, column in _OF_SESSIONS:
                    self._database.execute(f"delete from {table} where {column} = ?", (key,))

    @contextlib.contextmanager
    def delay_commits(self) -> Iterator[None]:
        """Delay commits to :meth:`commit` or to the block's end.

        A large transaction is cheaper than many small transactions.
        """
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
            self.commit()

    def commit(self) -> None:
        """Make written data visible to readers."""
        if self._opened is not None:
            self._opened.commit()

    @contextlib.contextmanager
    def _run_transaction(self) -> Iterator[None]:
        database = self._database
        try:
            yield
        except BaseException:
            database.rollback()
            self._words.clear()  # the rollback may have removed cached keys
            raise
        if not self._gathers:
            database.commit()

    def write(
        self,
        root: int,
        folder: Path,
        session: SessionEntry,
        cases: Iterable[CaseEntry],
        *,
        stamp: str,
        read_bytes: int = 0,
        damaged: int = 0,
        fresh: bool = True,
    ) -> int:
        """Write a session and cases in one transaction. Return the session's key.

        Args:
            read_bytes: offset after the last case in the session's lines file.
            damaged: unreadable lines in that file.
            fresh: delete the session's previous cases.
        """
        with self._run_transaction():
            row = self._database.execute(
                "select key from sessions where root = ? and id = ?", (root, session.id)
            ).fetchone()
            if row is None:
                cursor = self._database.execute("insert into sessions (root, id) values (?, ?)", (root, session.id))
                key = int(cursor.lastrowid or 0)
            else:
                key = int(row[0])
                if fresh:
                    self._mark_unjudged(key)
                    for table in ("cases", "outputs"):
                        self._database.execute(f"delete from {table} where session = ?", (key,))
            outputs: list[tuple[object, ...]] = []
            self._database.executemany(_CASE, (self._make_case_row(key, case, outputs) for case in cases))
            self._database.executemany(_OUTPUT, outputs)
            self._update_session(key, folder, session, stamp, read_bytes, damaged)
            self._mark_unjudged(key)
        return key

    def run_in_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on the database in one transaction."""
        with self._run_transaction():
            return work(self._database)

    def _mark_unjudged(self, key: int) -> None:
        self._database.execute("insert or ignore into unjudged select name, board from cases where session = ?", (key,))
        # A case that failed before it reached a board is a result for every board of the session.
        boards = self._database.execute("select boards from sessions where key = ?", (key,)).fetchone()[0] or ""
        for board in filter(None, boards.split(SEPARATOR)):
            self._database.execute(
                "insert or ignore into unjudged select name, ? from cases"
                " where session = ? and board = (select key from words where word = '')",
                (self._get_word_key(board), key),
            )

    def _update_session(
        self, key: int, folder: Path, session: SessionEntry, stamp: str, read_bytes: int, damaged: int
    ) -> None:
        counted = self._database.execute(
            "select word, count(*) from cases join words on words.key = outcome where session = ? group by outcome",
            (key,),
        ).fetchall()
        outcomes = Counter({word: count for word, count in counted if word})
        total = sum(count for _, count in counted)
        models = session.models or tuple(
            row[0]
            for row in self._database.execute(
                "select distinct word from cases join words on words.key = model where session = ?", (key,)
            )
        )
        boards = session.boards or tuple(
            row[0]
            for row in self._database.execute(
                "select distinct word from cases join words on words.key = board where session = ? and word != ''",
                (key,),
            )
        )
        values = {
            "folder": escape_name(str(folder)),
            **{name: getattr(session, name) for name in ("kind", "title", "created", "finished", "exit_code")},
            **{
                name: getattr(session, name)
                for name in ("suite", "place", "flow", "branch", "command", "error", "lines")
            },
            **{name: join_names(getattr(session, name)) for name in ("runtimes", "compilers", "labels")},
            "models": join_names(models),
            "boards": join_names(boards),
            "commit_id": session.commit,
            "versions": json.dumps(dict(session.versions)),
            "stack": "" if session.stack is None else json.dumps(dict(session.stack)),
            "digests": json.dumps(dict(session.digests)),
            "planned": session.planned,
            "verdict": "error"
            if session.error
            else find_worst_kind([*outcomes, session.outcome], finished=session.finished),
            "outcomes": json.dumps(dict(outcomes.most_common())),
            "cases": total,
            "failing": sum(count for word, count in outcomes.items() if is_failure(word)),
            **self._sum_device_times(key),
            "stamp": stamp,
            "read_bytes": read_bytes,
            "damaged": damaged,
        }
        names = ", ".join(f"{name} = ?" for name in values)
        held = (replace_surrogates(value) if isinstance(value, str) else value for value in values.values())
        self._database.execute(f"update sessions set {names} where key = ?", (*held, key))
        shown = (session.id, session.title, session.flow, session.branch, session.commit, session.command)
        lists = (*models, *boards, *session.runtimes, *session.compilers, *session.labels)
        self._database.execute(
            "insert or replace into session_texts (rowid, text) values (?, ?)",
            (key, replace_surrogates("\n".join((*shown, *lists)))),
        )

    def _sum_device_times(self, key: int) -> dict[str, object]:
        row = self._database.execute(
            "select sum(device_p50_ns), count(*) from cases"
            " where session = ? and device_p50_ns > 0 and comparable >= ?",
            (key, ITERATIONS),
        ).fetchone()
        return {"device_ns": row[0], "device_cases": row[1]}

    def _make_case_row(self, key: int, case: CaseEntry, outputs: list[tuple[object, ...]]) -> tuple[object, ...]:
        """Return a row of ``cases``. Append output rows to ``outputs`` if the case has multiple outputs."""
        for one in case.outputs:
            names = self._get_word_key(case.name), self._get_word_key(one.name)
            outputs.append((key, *names, case.number, one.max_abs, one.sqnr_db))
        return (key, *map(self._get_word_key, _words_of(case)), *_numbers_of(case))

    def _get_word_key(self, word: str) -> int:
        if (key := self._words.get(word)) is None:
            added = self._database.execute("insert or ignore into words (word) values (?)", (word,)).rowcount == 1
            key = int(self._database.execute("select key from words where word = ?", (word,)).fetchone()[0])
            if added:
                self._database.execute("insert into word_texts (rowid, word) values (?, ?)", (key, word))
            if len(self._words) > _WORDS_HELD:
                self._words.clear()
            self._words[word] = key
        return key


_TABLE_NAMES = re.compile(r"^create (?:virtual )?table (\w+)", re.MULTILINE)
# SQLite steps between checks for cancellation.
_STEPS = 100_000
# Maximum texts to cache in the writer. Every failure reason may be different, so the number of texts is not limited
# otherwise.
_WORDS_HELD = 200_000


def join_names(names: Iterable[str]) -> str:
    """Join names for a single column; see :data:`SEPARATOR`."""
    found = [name.replace(SEPARATOR, " ") for name in names]
    return SEPARATOR.join(("", *found, "")) if found else ""


def _open_index(path: Path) -> sqlite3.Connection:
    """Open the index. Create it if it is missing, damaged or from a different version."""
    try:
        return _connect_index(path)
    except sqlite3.DatabaseError:
        remove(path)
        return _connect_index(path)


def _connect_index(path: Path, wait_s: float = 30.0) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=wait_s, check_same_thread=False)
    try:
        found = database.execute("pragma user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise sqlite3.DatabaseError("another version's")
        database.execute("pragma journal_mode = wal")
        database.execute("pragma synchronous = normal")
        # Use a large page cache and rare checkpoints, because many sessions change the same pages, such as the index by
        # case name.
        database.execute("pragma cache_size = -32000")
        database.execute("pragma wal_autocheckpoint = 4000")
        if not found:
            database.executescript(f"begin; {_TABLES} pragma user_version = {VERSION}; commit;")
        return database
    except BaseException:
        database.close()
        raise


def _is_missing_tables(path: Path) -> bool:
    """Return True if an index lacks tables, or SQLite cannot read it."""
    try:
        with contextlib.closing(_connect_index(path, wait_s=0.0)) as database:
            tables = {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.OperationalError:
        return False
    except sqlite3.DatabaseError:
        return True
    return not tables >= set(_TABLE_NAMES.findall(_TABLES))


def _read_file_number(path: Path) -> int:
    """Return the inode, which detects a replaced index, or 0 if the file is missing."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def remove(path: Path) -> None:
    """Delete an index and the related SQLite files."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


class NamedRow(sqlite3.Row):
    """Row whose columns are also attributes, so that rows convert to records."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except IndexError:
            raise AttributeError(name) from None


class IndexReader:
    """Read-only access to the index, with a connection per thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()

    @contextmanager
    def open_snapshot(self) -> Iterator[sqlite3.Connection]:
        """Open a snapshot on this thread's connection. Raises sqlite3.Error if the index is missing or damaged."""
        database = self._get_connection()
        try:
            database.execute("begin")
            yield database
        except sqlite3.Error:
            self._close()
            raise
        finally:
            if database is getattr(self._local, "database", None):
                database.rollback()

    def has_kind(self, kind: str) -> bool:
        """Return True if the index has a session of a kind. Return False if the index is missing or damaged."""
        try:
            query = "select exists (select 1 from sessions where kind = ?)"
            return bool(self._get_connection().execute(query, (kind,)).fetchone()[0])
        except sqlite3.Error:
            return False

    def _get_connection(self) -> sqlite3.Connection:
        """Return this thread's connection. Reconnect if the index was replaced."""
        number = _read_file_number(self._path)
        database: sqlite3.Connection | None = getattr(self._local, "database", None)
        if database is not None and number == self._local.file:
            return database
        self._close()
        database = sqlite3.connect(f"{self._path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)
        database.row_factory = NamedRow
        database.set_progress_handler(is_cancelled, _STEPS)
        self._local.database, self._local.file = database, number
        return database

    def _close(self) -> None:
        database: sqlite3.Connection | None = getattr(self._local, "database", None)
        self._local.database = None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()
