"""Read and change a triage file: hil-triage.json. Every change replaces the file atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import filelock

from hil.controller.records.base import check_schema, make_record
from hil.controller.records.decisions.triage import TriageDocument, TriageEntry
from hil.controller.storage.paths import path_exists
from hil.controller.storage.runs import write_file
from hil.controller.workloads.triage.entries import TriageList, check_entry
from hil.core.bounded_json import parse_json
from hil.core.files import read_file
from hil.errors import UsageError

NAME = "hil-triage.json"
MAX_ENTRIES = 10_000
# `hil gate --known URL` reads at most this much.
MAX_BYTES = 3 << 20
_LOCK = ".hil-triage.lock"
_LOCK_SECONDS = 10.0


def choose_triage_file(folder: Path) -> tuple[Path, str]:
    """Return the triage file for pages of a directory, and a note if the choice may be unexpected.

    The commands use the file in the working directory, so the pages also use it if the directory has none.
    """
    own, current = folder / NAME, Path(NAME)
    if own.absolute() == current.absolute() or not path_exists(current):
        return own, ""
    if not path_exists(own):
        return current, f"note: {own} does not exist; the pages use {NAME} in the working directory"
    if own.samefile(current):
        return own, ""
    return own, f"note: the pages use {own}, not {NAME} in the working directory; --triage selects another file"


def read_triage(path: Path) -> TriageList:
    """Read a triage file. A missing file has no entries.

    Raises:
        UsageError: the file is unreadable, too large or invalid.
    """
    try:
        data = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        return TriageList()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_triage(data, path)


def parse_triage(data: bytes | Any, source: object) -> TriageList:
    """Parse the JSON of a triage file, or a parsed document. Raises UsageError if it is invalid.

    Args:
        source: file or URL, for error messages.
    """
    try:
        values = parse_json(data) if isinstance(data, bytes) else data
        check_schema(values, Path(str(source)))
        entries = make_record(values, TriageDocument).entries
        for entry in entries:
            check_entry(entry)
        return TriageList(tuple(entries))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not a triage file: {error}", hint="see hil triage --help") from error
    except UsageError as error:
        raise UsageError(f"{source} is not a triage file: {error.message}", hint="see hil triage --help") from error


def update_triage(path: Path, change: Callable[[Sequence[TriageEntry]], Sequence[TriageEntry]]) -> TriageList:
    """Change the entries of a triage file, and return the new entries.

    A lock prevents lost changes of other processes.

    Args:
        change: returns the new entries.

    Raises:
        UsageError: the file is invalid, a link, in use or full.
        StorageError: the file cannot be written.
    """
    lock_file = path.parent / _LOCK
    for one in (path, lock_file):
        # Another user of a shared directory could redirect a write.
        if one.is_symlink():
            raise UsageError(f"{one} is a symbolic link", hint="replace the link by a file")
    if not os.path.isdir(path.parent):  # noqa: PTH112 - Path.is_dir raises for invalid names in older Python versions
        raise UsageError(f"directory {path.parent} not found", hint="create the directory, or choose another file")
    lock = filelock.FileLock(lock_file, timeout=_LOCK_SECONDS)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise UsageError(f"{path} is in use by a different process", hint="retry in a moment") from error
    except OSError as error:
        raise UsageError(f"cannot write in {path.parent}: {error.strerror or error}") from error
    try:
        return write_triage(path, change(read_triage(path).entries))
    finally:
        lock.release()


def write_triage(path: Path, entries: Sequence[TriageEntry]) -> TriageList:
    """Write a triage file atomically.

    Raises:
        UsageError: there are too many entries, or hil could not read an entry again.
        StorageError: the file cannot be written.
    """
    data = encode_triage(entries)
    if len(entries) > MAX_ENTRIES or len(data) > MAX_BYTES:
        raise UsageError(
            f"{path} is full: at most {MAX_ENTRIES} entries and {MAX_BYTES} bytes",
            hint="remove entries with hil triage remove, or use patterns",
        )
    triage = parse_triage(data, path)
    write_file(path, data)
    return triage


def encode_triage(entries: Sequence[TriageEntry]) -> bytes:
    """Return the content of a triage file."""
    document = TriageDocument(schema=1, entries=list(entries))
    return json.dumps(document.to_json(), indent=1, allow_nan=False).encode() + b"\n"
