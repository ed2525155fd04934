"""Stored runs: ``hil-runs/<id>/`` with run.json, tensors as .npy files and logs, indexed in SQLite.

hil writes the files atomically during the run, so a killed run keeps the results so far.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET

from hil.controller.records.base import check_schema, read_record
from hil.controller.records.commands.stored import RunSummary
from hil.controller.records.outputs import StoredTensor
from hil.controller.records.run import RunHead, RunRecord, make_run
from hil.controller.storage.paths import is_file, is_folder
from hil.controller.storage.session_folders import DEFAULT_ROOT
from hil.controller.storage.sources.origin import find_request_origin, format_origin
from hil.controller.storage.tensor_files import save_files
from hil.core.bounded_json import read_json
from hil.core.config_files import get_user_folder
from hil.core.files import read_file, read_text, resolve_within, write_atomic
from hil.core.npy import load_npy
from hil.core.storage_errors import convert_os_errors
from hil.core.tensors import Array
from hil.core.text import convert_to_json
from hil.errors import UsageError, did_you_mean

RECORD = "run.json"
# A directory with this file contains a run for each target: hil.controller.workloads.matrix.
MATRIX = "matrix.json"
# Kind of profile -> directory in a case's directory. For a run with --profile, it is a link.
PROFILE_FOLDERS = {"run": "profile", "compile": "compile-profile"}
# Directory in a case's logs with files that reproduce a compiler failure.
COMPILE_FAILURE = "compile-failure"
_LOCK = ".lock"
# File name of the index. Increase the number when columns change.
_INDEX = "index-3.sqlite"
# File names are limited to 255 bytes. This leaves room for prefixes and suffixes.
_NAME_BYTES = 80
_TABLE = """create table if not exists runs (
    id text primary key, created real, models text, board text, outcome text, exit_code integer, finished integer,
    origin text, labels text, stamp integer)"""


class Run:
    """Directory of a run. ``record`` is the content of run.json; :meth:`save` writes it."""

    def __init__(self, folder: Path, record: RunRecord, *, made_root: bool = False) -> None:
        self.folder = folder
        self.record = record
        self._made_root = made_root

    @property
    def id(self) -> str:
        """The run's id."""
        return self.record.id

    @property
    def resume_command(self) -> str:
        """The command that resumes an interrupted `hil run`."""
        root = self.folder.parent
        return shlex.join(["hil", "run", "--resume", self.id, *(() if root == DEFAULT_ROOT else ("--out", str(root)))])

    def save(self, cases: Sequence[str] | None = None) -> None:
        """Write run.json atomically.

        Args:
            cases: The record's cases as JSON, if already encoded.
        """
        # Indent only the final file. During the run, the file is written often, and indenting is slow.
        layout = 1 if self.record.finished else None
        if cases is None:
            text = json.dumps(self.record.to_json(), indent=layout, allow_nan=False)
        else:
            head = self.record.replace(cases=[]).to_json()
            del head["cases"]
            text = f'{json.dumps(head, indent=layout, allow_nan=False)[:-1]}, "cases": [{", ".join(cases)}]}}'
        write_file(self.folder / "run.json", text + "\n")

    def discard(self) -> None:
        """Delete the run's directory: see :func:`discard_folder`."""
        discard_folder(self.folder, made_root=self._made_root)

    def make_case_folder(self, name: str) -> Path:
        """Return the directory of a case, created if necessary."""
        folder = self.folder / name
        with convert_write_errors(folder):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        return folder

    def load_tensors(self, entries: Sequence[StoredTensor]) -> dict[str, Array]:
        """Return the tensors of a record's entries as memory maps. Raises UsageError if a file is outside the run."""
        return {entry.name: load_npy(self.own(entry.file), entry.dtype, mmap=True) for entry in entries}

    def own(self, name: str) -> Path:
        """Return the path of a file in the run. Raises UsageError for a path outside the run: records are untrusted."""
        try:
            return resolve_within(self.folder, self.folder / name)
        except (UsageError, TypeError) as error:
            raise UsageError(f"{self.folder}/run.json: {name!r} is not a file of the run") from error


def discard_folder(folder: Path, *, made_root: bool) -> None:
    """Delete a run's directory, and the parent directory if it was created for this run."""
    shutil.rmtree(folder, ignore_errors=True)
    if made_root:
        with contextlib.suppress(OSError):  # it contains other runs
            folder.parent.rmdir()


def store_tensors(folder: Path, case: str, kind: str, tensors: Mapping[str, Array]) -> list[StoredTensor]:
    """Write a case's tensors as .npy files in ``folder/case/kind``. Return their entries for a record."""
    numbered = enumerate(tensors.items())
    files = {f"{number}-{make_safe_name(name)}.npy": (name, array) for number, (name, array) in numbered}
    with convert_write_errors(folder / case / kind):
        entries = save_files(folder / case / kind, files)
    return [StoredTensor(**{**entry, "file": f"{case}/{kind}/{entry['file']}"}) for entry in entries]


def make_id(title: str) -> str:
    """Return an id for a stored object: time, title, and a random suffix."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{stamp}-{make_safe_name(title)}-{secrets.token_hex(2)}"


class RunStore:
    """Runs in a directory."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or DEFAULT_ROOT

    def create(self, title: str, request: dict[str, Any], name: str = "", *, command: str = "") -> Run:
        """Create a run's directory and record.

        Args:
            name: The run's id; "" generates one.
            command: Command that repeats the run, if the request does not define it; otherwise "".

        Raises:
            StorageError: the directory is not writable.
        """
        name = name or make_id(title)
        record = RunRecord(
            schema=1,
            id=name,
            created=time.time(),
            origin=find_request_origin(request),
            request=request,
            command=command or UNSET,
            board=None,
            cases=[],
            outcome=None,
            exit_code=None,
            finished=False,
        )
        with convert_write_errors(self.root):
            run = Run(self.root / name, record, made_root=not self.root.exists())
            run.folder.mkdir(parents=True)
            seal(run.folder, request)
        run.save()
        return run

    def open(self, name: str) -> Run:
        """Open a stored run: see :meth:`find_folder`.

        Raises:
            UsageError: the run does not exist, the name is ambiguous or names a matrix, or the record is unreadable.
        """
        folder = self.find_folder(name)
        if not (folder / RECORD).is_file():
            raise UsageError(f"{name} is a matrix of runs", hint=f"specify one run: {folder}/TARGET")
        return _read(folder, RECORD)

    def find_folder(self, name: str) -> Path:
        """Return the directory of a stored run or matrix.

        Args:
            name: A path, an id, an unambiguous prefix of an id, or ``latest``.

        Raises:
            UsageError: no run or several runs match.
        """
        for folder in (Path(name), self.root / name):
            if any(is_file(folder / file) for file in (RECORD, MATRIX)):
                return folder
        ids = self.list_ids()
        found = ids[-1:] if name == "latest" else [one for one in ids if one.startswith(name)]
        if len(found) != 1:
            what = f"ambiguous run {name!r}: {', '.join(found)}" if found else f"run {name!r} not found"
            hint = f"{'' if found else did_you_mean(name, ids)}list them with hil runs list"
            raise UsageError(f"{what} in {self.root}", hint=hint)
        return self.root / found[0]

    def list_ids(self, *records: str) -> list[str]:
        """Return the names of the directories with these records (default: runs and matrices), oldest first."""
        files = records or (RECORD, MATRIX)
        return sorted({path.parent.name for file in files for path in self.root.glob(f"*/{file}")})

    def list_summaries(self) -> list[RunSummary]:
        """Return the stored runs, oldest first."""
        import sqlite3  # imported here because most commands do not list runs

        if not is_folder(self.root):
            return []
        index = self.root / _INDEX
        try:
            # Do not write to a database outside of this directory through a symlink. A pipe is not a database.
            is_ours = not index.is_symlink() and (is_file(index) or not index.exists())
            return self._list_indexed(index if is_ours else ":memory:")
        except sqlite3.DatabaseError:
            # The directory is not writable, or the index is corrupt. It can be rebuilt.
            return self._list_indexed(":memory:")

    def _list_indexed(self, index: Path | str) -> list[RunSummary]:
        import sqlite3

        with contextlib.closing(sqlite3.connect(index, timeout=10)) as database, database:
            database.row_factory = sqlite3.Row
            database.execute(_TABLE)
            # Check the schema: an index from an untrusted user may have a view in place of the table, which can return
            # arbitrary rows.
            held = [row["sql"] for row in database.execute("select sql from sqlite_master where sql is not null")]
            if held != [f"CREATE TABLE {_TABLE.partition(' exists ')[2]}"]:
                raise sqlite3.DatabaseError("not an index of hil")
            known = {row["id"]: row["stamp"] for row in database.execute("select id, stamp from runs")}
            for path in (one for file in (RECORD, MATRIX) for one in self.root.glob(f"*/{file}")):
                stamp = path.stat().st_mtime_ns
                if known.pop(path.parent.name, None) == stamp:
                    continue
                with contextlib.suppress(UsageError, OverflowError):
                    head = read_record(path, RunHead)
                    row = (
                        path.parent.name,
                        head.created,
                        ", ".join(case.name for case in head.cases),
                        head.board.name if head.board else "",
                        head.outcome,
                        head.exit_code,
                        head.finished,
                        format_origin(head.origin),
                        json.dumps(head.origin.labels if head.origin else []),
                        stamp,
                    )
                    database.execute("insert or replace into runs values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            database.executemany("delete from runs where id = ?", [(gone,) for gone in known])
            rows = database.execute(f"select {', '.join(RunSummary.__struct_fields__)} from runs order by created")
            try:
                return [
                    RunSummary(
                        **{**dict(row), "finished": bool(row["finished"]), "labels": _parse_labels(row["labels"])}
                    )
                    for row in rows
                ]
            except ValueError as error:
                raise sqlite3.DatabaseError(f"not an index of hil: {error}") from error

    def list_old(self, keep: int = 0, older_than_s: float = 0.0) -> list[str]:
        """Return the ids of finished runs that are older than ``older_than_s``, except the newest ``keep`` runs."""
        runs = self.list_summaries()
        return [
            run.id
            for run in runs[: max(len(runs) - keep, 0)]
            if self._is_deletable(run) and time.time() - run.created >= older_than_s
        ]

    def find_deletable(self, name: str) -> str:
        """Return the id of a finished run in this store.

        Args:
            name: An id, an unambiguous prefix of an id, or ``latest``.

        Raises:
            UsageError: no run or several runs match, or the run is not finished or not in this store.
        """
        folder = self.find_folder(name)
        found = next((run for run in self.list_summaries() if self.root / run.id == folder), None)
        if found is None:
            raise UsageError(f"{folder} is not a run in {self.root}", hint="specify the ID of a run: hil runs list")
        if not self._is_deletable(found):
            why = "is a link" if folder.is_symlink() else "is not finished"
            raise UsageError(
                f"run {found.id} {why}", hint="hil deletes only finished runs; delete the directory to discard the run"
            )
        return found.id

    def delete(self, ids: Iterable[str]) -> None:
        """Delete the directories of runs. Raises StorageError."""
        for one in ids:
            with convert_write_errors(self.root):
                shutil.rmtree(self.root / one)

    def _is_deletable(self, run: RunSummary) -> bool:
        # Do not delete the target of a symlink.
        return run.finished and not (self.root / run.id).is_symlink()


def _parse_labels(text: str) -> list[str]:
    labels = json.loads(text)
    if not isinstance(labels, list) or not all(isinstance(one, str) for one in labels):
        raise ValueError("invalid labels")
    return labels


def _read(folder: Path, file: str) -> Run:
    try:
        record = read_json(folder / file)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {folder}/{file}: {error}") from error
    check_schema(record, folder)
    try:
        return Run(folder, make_run(record))
    except UsageError as error:
        raise UsageError(f"{folder}/{file} is not a run record: {error.message}") from error


def convert_write_errors(folder: Path, option: str = "--out") -> contextlib.AbstractContextManager[None]:
    """Convert write errors to StorageError.

    The hint suggests the option ``option``, which selects a different directory.
    """
    hint = "free disk space or check permissions" + (f"; {option} selects another directory" if option else "")
    return convert_os_errors(f"cannot write to {folder}", hint, stage="report")


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a directory of results for writing. Raises UsageError if a different process has the lock."""
    import filelock

    lock = filelock.FileLock(folder / _LOCK, timeout=0)
    with convert_write_errors(folder):
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise UsageError(
                f"{folder} is in use by a different hil process", hint="wait for that process to end"
            ) from error
    try:
        yield
    finally:
        lock.release()


def write_file(path: Path, data: str | bytes, *, option: str = "--out", make_folder: bool = False) -> None:
    """Write a file atomically. Raises StorageError."""
    with convert_write_errors(path.parent, option):
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)


def write_json(path: Path, document: Mapping[str, Any], *, option: str = "--out") -> None:
    """Write a document as indented JSON: see :func:`write_file`."""
    write_file(path, json.dumps(convert_to_json(document), indent=1, allow_nan=False) + "\n", option=option)


def make_safe_name(text: str) -> str:
    """Convert a text to a part of a file name with at most :data:`_NAME_BYTES` bytes."""
    plain = "".join(char if char.isalnum() or char in "-_." else "_" for char in text)
    return plain.encode()[:_NAME_BYTES].decode(errors="ignore").strip(".") or "_"


_SEAL = ".begun"
_KEY = "begun.key"


def seal(folder: Path, request: Mapping[str, Any]) -> None:
    """Mark a run's directory as created by the user.

    Without a home directory for the key, the run cannot be resumed.
    """
    if key := _read_key(make=True):
        (folder / _SEAL).write_text(_mark(key, folder, request) + "\n")


def check_seal(folder: Path, request: Mapping[str, Any]) -> None:
    """Raise UsageError if the run was not created by the user, or was changed or moved."""
    if not is_sealed(folder, request):
        raise UsageError(
            f"cannot trust the stored command of {folder}: the run was not started by this user in this directory",
            hint="start a new run; runs from other users or machines, and moved runs, cannot resume",
        )


def is_sealed(folder: Path, request: Mapping[str, Any]) -> bool:
    """Return True if the user created the run in this directory with this request."""
    key, found = _read_key(make=False), ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = read_text(folder / _SEAL).strip()
    return bool(key) and hmac.compare_digest(found.encode(), _mark(key, folder, request).encode())


def _mark(key: bytes, folder: Path, request: Mapping[str, Any]) -> str:
    text = json.dumps([str(folder.resolve()), convert_to_json(request)], sort_keys=True)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _read_key(*, make: bool) -> bytes:
    """Return the user's key, or b"" if there is no key."""
    home = get_user_folder()
    if home is None:
        return b""
    path = home / _KEY
    with contextlib.suppress(OSError):
        if make and not path.exists():
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = home / f"{_KEY}.{secrets.token_hex(4)}"
            number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(number, "wb") as file:
                file.write(secrets.token_bytes(32))
            # If two processes create a key concurrently, the first key is used.
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(temporary)
            temporary.unlink()
        return read_file(path)
    return b""
