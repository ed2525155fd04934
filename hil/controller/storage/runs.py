"""Stored runs: ``hil-runs/<id>/`` with run.json, tensors as .npy and logs, indexed in SQLite.

Everything is written as it comes and each file atomically, so a killed run keeps what it had.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.controller.storage.origin import origin_of_request, origin_text
from hil.controller.storage.tensor_files import save_files
from hil.core.config_files import user_folder
from hil.core.files import read_file, write_atomic
from hil.core.npy import load_npy
from hil.core.tensors import Array
from hil.core.text import jsonable
from hil.errors import StorageError, UsageError

SCHEMA = 1
RECORD = "run.json"
# A folder with this has a run below it for each target: hil.controller.workloads.matrix.
MATRIX = "matrix.json"
# The folder, among a case's logs, of what shows again how its compiler failed.
COMPILE_FAILURE = "compile-failure"
GO_ON = "interrupted; go on with: "
DEFAULT_ROOT = Path("hil-runs")
# Its number grows with its columns.
_INDEX = "index-2.sqlite"
# What every record has, however its run ended.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "created": (int, float),
    "board": dict,
    "cases": list,
    "outcome": (str, type(None)),
    "exit_code": (int, type(None)),
    "finished": bool,
}
# A file name has at most 255: there is room for what is put around it.
_NAME_BYTES = 80
_TABLE = """create table if not exists runs (
    id text primary key, created real, models text, board text, outcome text, exit_code integer, finished integer,
    origin text, stamp integer)"""


class Run:
    """One run's folder. ``record`` is what run.json holds; :meth:`save` writes it."""

    def __init__(self, folder: Path, record: dict[str, Any], *, made_root: bool = False) -> None:
        self.folder = folder
        self.record = record
        self._made_root = made_root

    @property
    def id(self) -> str:
        """The run's name."""
        return str(self.record["id"])

    @property
    def resume_command(self) -> str:
        """What goes on with a run of `hil run` that was interrupted."""
        root = self.folder.parent
        return shlex.join(["hil", "run", "--resume", self.id, *(() if root == DEFAULT_ROOT else ("--out", str(root)))])

    def save(self, cases: Sequence[str] | None = None) -> None:
        """Write run.json, atomically, with the record's cases as JSON where they are at hand."""
        # Laid out for people once it is whole: until then it is written often, and that is slow.
        layout = 1 if self.record["finished"] else None
        head = self.record if cases is None else {key: self.record[key] for key in self.record if key != "cases"}
        text = json.dumps(jsonable(head), indent=layout, allow_nan=False)
        if cases is not None:
            text = f'{text[:-1]}, "cases": [{", ".join(cases)}]}}'
        write_file(self.folder / "run.json", text + "\n")

    def discard(self) -> None:
        """Leave nothing behind, nor the folder of all runs where that was made for this one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._made_root:
            with contextlib.suppress(OSError):  # somebody else's run is there by now
                self.folder.parent.rmdir()

    def case_folder(self, name: str) -> Path:
        """The folder of a case, made if needed."""
        folder = self.folder / name
        with storing(folder):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        return folder

    def save_tensors(self, case: str, kind: str, tensors: Mapping[str, Array]) -> list[dict[str, Any]]:
        """Write a case's tensors as .npy; returns name, dtype, shape and file of each, for the record."""
        numbered = enumerate(tensors.items())
        files = {f"{number}-{safe_name(name)}.npy": (name, array) for number, (name, array) in numbered}
        with storing(self.folder / case / kind):
            entries = save_files(self.folder / case / kind, files)
        return [{**entry, "file": f"{case}/{kind}/{entry['file']}"} for entry in entries]

    def load_tensors(self, entries: list[dict[str, Any]]) -> dict[str, Array]:
        """The tensors of a record's entries, memory-mapped. Raises UsageError: a file is none of the run's own."""
        return {entry["name"]: load_npy(self.own(entry["file"]), entry["dtype"], mmap=True) for entry in entries}

    def own(self, name: str) -> Path:
        """A file of the run: its record may be anybody's, and leads nowhere else. Raises UsageError: it is none."""
        path = self.folder / name
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise UsageError(f"{self.folder}/run.json names {name!r}, which is no file of the run")
        return path


def new_id(title: str) -> str:
    """A name for something that is stored: when, what, and what tells it from others."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{stamp}-{safe_name(title)}-{secrets.token_hex(2)}"


class RunStore:
    """The runs below one folder."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or DEFAULT_ROOT

    def create(self, title: str, request: dict[str, Any], name: str = "", *, command: str = "") -> Run:
        """A new run's folder and record.

        Args:
            name: "" makes one of its own.
            command: does it again, where the request does not tell; "" where it does, or nobody knows.

        Raises:
            StorageError: it cannot be written.
        """
        name = name or new_id(title)
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "id": name,
            "created": time.time(),
            "origin": origin_of_request(request),
            "request": request,
            **({"command": command} if command else {}),
            "board": {},
            "cases": [],
            "outcome": None,
            "exit_code": None,
            "finished": False,
        }
        run = Run(self.root / name, record, made_root=not self.root.exists())
        with storing(self.root):
            run.folder.mkdir(parents=True)
            seal(run.folder, request)
        run.save()
        return run

    def open(self, name: str) -> Run:
        """A stored run: see :meth:`folder_of`.

        Raises:
            UsageError: there is none, several, it is a matrix of runs, or its record cannot be read.
        """
        folder = self.folder_of(name)
        if not (folder / RECORD).is_file():
            raise UsageError(f"{name} is a matrix of runs", hint=f"name one of them: {folder}/TARGET")
        return _read(folder, RECORD)

    def folder_of(self, name: str) -> Path:
        """The folder of a stored run or matrix, by its id, an unambiguous beginning of it, ``latest``, or as it is.

        Raises:
            UsageError: there is none, or several.
        """
        for folder in (Path(name), self.root / name):
            if any((folder / file).is_file() for file in (RECORD, MATRIX)):
                return folder
        ids = sorted(path.parent.name for file in (RECORD, MATRIX) for path in self.root.glob(f"*/{file}"))
        found = ids[-1:] if name == "latest" else [one for one in ids if one.startswith(name)]
        if len(found) != 1:
            what = f"several runs begin with {name!r}: {', '.join(found)}" if found else f"no run {name!r}"
            raise UsageError(f"{what} in {self.root}", hint="hil runs list shows them")
        return self.root / found[0]

    def summaries(self) -> list[dict[str, Any]]:
        """The stored runs, oldest first: id, created, models, board, outcome, exit_code, finished, origin."""
        import sqlite3  # most commands list nothing

        if not self.root.is_dir():
            return []
        index = self.root / _INDEX
        try:
            # A link would lead to some other database, which is not ours to write to.
            return self._listed(":memory:" if index.is_symlink() else index)
        except sqlite3.DatabaseError:
            # A folder that cannot be written, or a damaged index: it is only an index.
            return self._listed(":memory:")

    def _listed(self, index: Path | str) -> list[dict[str, Any]]:
        import sqlite3

        with contextlib.closing(sqlite3.connect(index, timeout=10)) as database, database:
            database.row_factory = sqlite3.Row
            database.execute(_TABLE)
            # One that somebody else made may have a view in the table's place, which lists what it likes.
            held = [row["sql"] for row in database.execute("select sql from sqlite_master where sql is not null")]
            if held != [f"CREATE TABLE {_TABLE.partition(' exists ')[2]}"]:
                raise sqlite3.DatabaseError("it is no index of ours")
            known = {row["id"]: row["stamp"] for row in database.execute("select id, stamp from runs")}
            for path in (one for file in (RECORD, MATRIX) for one in self.root.glob(f"*/{file}")):
                stamp = path.stat().st_mtime_ns
                if known.pop(path.parent.name, None) == stamp:
                    continue
                with contextlib.suppress(UsageError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
                    record = _read(path.parent, path.name).record
                    outcome, code = record["outcome"], record["exit_code"]
                    row = (
                        path.parent.name,
                        float(record["created"]),
                        ", ".join(str(case["name"]) for case in record["cases"]),
                        str(record["board"].get("name", "")),
                        None if outcome is None else str(outcome),
                        None if code is None else int(code),
                        bool(record["finished"]),
                        origin_text(record.get("origin")),
                        stamp,
                    )
                    database.execute("insert or replace into runs values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            database.executemany("delete from runs where id = ?", [(gone,) for gone in known])
            rows = database.execute("select * from runs order by created").fetchall()
        return [{key: value for key, value in dict(row).items() if key != "stamp"} for row in rows]

    def gc(self, keep: int = 0, older_than_s: float = 0.0) -> list[str]:
        """Delete finished runs but the newest ``keep``, if older than so many seconds; returns their ids."""
        runs = self.summaries()
        gone = []
        for run in runs[: max(len(runs) - keep, 0)]:
            if (self.root / run["id"]).is_symlink():
                continue  # what it leads to is elsewhere
            if run["finished"] and time.time() - run["created"] >= older_than_s:
                with storing(self.root):
                    shutil.rmtree(self.root / run["id"])
                gone.append(run["id"])
        return gone


def _read(folder: Path, file: str) -> Run:
    try:
        record = json.loads(read_file(folder / file))
        if record["schema"] > SCHEMA:
            raise UsageError(f"{folder} was written by a newer hil (schema {record['schema']})")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder}/{file} cannot be read: {error}") from error
    wrong = [key for key, kinds in _FIELDS.items() if not isinstance(record.get(key, ...), kinds)]
    named = [] if wrong else [*record["cases"], {"name": "", **record["board"]}]
    if wrong or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in named):
        raise UsageError(f"{folder}/{file} is no record of a run: {', '.join(wrong) or 'a name'} is damaged")
    return Run(folder, record)


@contextlib.contextmanager
def storing(folder: Path, option: str = "--out") -> Iterator[None]:
    """Raise StorageError for a failed write: where, and what to do; ``option``, if any, names another place."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror or error}",
            stage="report",
            hint="make room there, or see who may write to it" + (f"; {option} names another place" if option else ""),
        ) from error


def write_file(path: Path, data: str | bytes, *, option: str = "--out", make_folder: bool = False) -> None:
    """Write a file so that whoever opens it finds the old one or the whole new one. Raises StorageError: it cannot."""
    with storing(path.parent, option):
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)


def write_json(path: Path, document: Mapping[str, Any], *, option: str = "--out") -> None:
    """Write a document as indented JSON; otherwise as :func:`write_file`."""
    write_file(path, json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n", option=option)


def safe_name(text: str) -> str:
    """A text as part of a file name, in which it takes at most :data:`_NAME_BYTES` bytes."""
    plain = "".join(char if char.isalnum() or char in "-_." else "_" for char in text)
    return plain.encode()[:_NAME_BYTES].decode(errors="ignore").strip(".") or "_"


_SEAL = ".begun"
_KEY = "begun.key"


def seal(folder: Path, request: Mapping[str, Any]) -> None:
    """Note in a run's folder that the user began it. Without a home to keep a key in it cannot be gone on with."""
    if key := _key(make=True):
        (folder / _SEAL).write_text(_mark(key, folder, request) + "\n")


def check_seal(folder: Path, request: Mapping[str, Any]) -> None:
    """Raise UsageError for a run that the user has not begun, or that somebody altered or moved."""
    if not is_sealed(folder, request):
        raise UsageError(
            f"{folder} was not begun by you here: what it says it was asked to do may be anybody's",
            hint="start a new run; one that was moved, or begun by another user or on another machine, cannot go on",
        )


def is_sealed(folder: Path, request: Mapping[str, Any]) -> bool:
    """Whether the user began a run, there and as it says."""
    key, found = _key(make=False), ""
    with contextlib.suppress(OSError, UnicodeDecodeError), (folder / _SEAL).open() as file:
        found = file.read(1 << 10).strip()
    return bool(key) and hmac.compare_digest(found.encode(), _mark(key, folder, request).encode())


def _mark(key: bytes, folder: Path, request: Mapping[str, Any]) -> str:
    text = json.dumps([str(folder.resolve()), jsonable(request)], sort_keys=True)
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _key(*, make: bool) -> bytes:
    """The user's key; nothing where there is none."""
    home = user_folder()
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
            # Of two that begin at once the first one's key stays.
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(temporary)
            temporary.unlink()
        return path.read_bytes()
    return b""
