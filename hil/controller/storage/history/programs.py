"""Programs of a history, by digest: ``programs/<digest>/`` with program.json and the files, within a quota."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hil.controller.records.base import read_record
from hil.controller.records.measurements.history import StoredProgram
from hil.core.digest import digest_of, get_algorithm
from hil.core.files import copy_file, digest_file, resolve_within
from hil.core.storage_errors import convert_os_errors
from hil.errors import StorageError, UsageError

RECORD = "program.json"
FILES = "files"
_NAME = re.compile(r"(blake3|sha256)-[0-9a-f]{64}")
_LEFTOVER = re.compile(r"\.(new|old)-[0-9a-f]{16}")
# Age from which a temporary directory is a leftover: no copy of a program takes this long.
_LEFTOVER_SECONDS = 24 * 3600.0
_MAX_RECORD_BYTES = 16 << 20


@dataclass(frozen=True)
class ProgramSource:
    """A program to store: its record, and the directory with its files."""

    record: StoredProgram
    folder: Path


def combine_digests(digests: Mapping[str, str]) -> str:
    """Return the digest of a program: the digest of its only file, or a digest of the sorted file names and digests."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    return digest_of(json.dumps(sorted(digests.items())).encode()) if digests else ""


class ProgramFolder:
    """Directory of programs. Only the process with the history's write lock may publish and delete programs.

    All methods raise StorageError if the directory is a symbolic link. Otherwise, an untrusted repository could link it
    to a directory of the user, and hil would delete files there.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, digest: str) -> Path | None:
        """Return a program's directory, with :data:`RECORD` and :data:`FILES`, or None if it is not stored."""
        folder = self._get_path(digest)
        return folder if (folder / RECORD).is_file() else None

    def read(self, digest: str) -> StoredProgram | None:
        """Return a program's record, or None if it is not stored.

        Raises:
            StorageError: the record is damaged, belongs to another program, or names files outside of the directory.
        """
        folder = self.find(digest)
        if folder is None:
            return None
        try:
            record = read_record(folder / RECORD, StoredProgram, _MAX_RECORD_BYTES)
            _check_folder(record, digest, folder)
        except UsageError as error:
            raise StorageError(
                f"the history's program {digest} is damaged: {error.message}",
                hint=f"delete {folder} and add its runs again: hil history add RUN...",
            ) from error
        return record

    @contextlib.contextmanager
    def copy_program(self, source: ProgramSource) -> Iterator[Path | None]:
        """Copy a program for :meth:`publish`, and verify its digests. The copy needs no lock.

        Yields None if the program is already stored. At the end of the context, an unpublished copy is deleted.

        Raises:
            UsageError: a file is missing, is outside of the directory, or has different content.
            StorageError: the directory cannot be written.
        """
        record = source.record
        if self.find(record.digest) is not None:
            yield None
            return
        temporary = self.root / f".new-{secrets.token_hex(8)}"
        try:
            with self._convert_errors():
                (temporary / FILES).mkdir(parents=True)
                for name, digest in record.files.items():
                    target = resolve_within(temporary / FILES, temporary / FILES / name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    _copy(resolve_within(source.folder, source.folder / name), target, digest)
                (temporary / RECORD).write_text(json.dumps(record.to_json(), indent=1) + "\n")
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def publish(self, digest: str, copy: Path) -> bool:
        """Move a copy into the store. Return False if the program is already stored."""
        if self.find(digest) is not None:
            return False
        with self._convert_errors():
            copy.rename(self._get_path(digest))
        return True

    def evict(self, quota: int, rank: Callable[[], tuple[Mapping[str, float], Collection[str]]]) -> list[str]:
        """Delete programs until the others need at most ``quota`` bytes. Return the digests.

        Args:
            rank: called if the quota is exceeded. Returns two values: digest -> time of the last use (unlisted programs
                are deleted first), and the digests of programs that are never deleted.
        """
        sizes = self.measure_sizes()
        total = sum(sizes.values())
        if total <= quota:
            return []
        order, kept = rank()
        gone = []
        for digest in sorted(sizes, key=lambda one: (order.get(one, 0.0), one)):
            if total <= quota:
                break
            if digest in kept:
                continue
            with self._convert_errors():
                # Rename first, so that a killed process leaves no program with missing files.
                grave = self.root / f".old-{secrets.token_hex(8)}"
                self._get_path(digest).rename(grave)
            shutil.rmtree(grave, ignore_errors=True)
            total -= sizes[digest]
            gone.append(digest)
        return gone

    def measure_sizes(self) -> dict[str, int]:
        """Return digest -> size in bytes of all programs."""
        with self._convert_errors():
            return {
                folder.name.replace("-", ":", 1): sum(
                    file.lstat().st_size for file in folder.rglob("*") if not file.is_dir()
                )
                for folder in self._list(_NAME)
            }

    def remove_leftovers(self) -> None:
        """Delete the temporary directories of killed processes. Recent ones may belong to running processes."""
        oldest = time.time() - _LEFTOVER_SECONDS
        for folder in self._list(_LEFTOVER):
            with contextlib.suppress(FileNotFoundError):
                if folder.stat().st_mtime < oldest:
                    shutil.rmtree(folder, ignore_errors=True)

    def _list(self, name: re.Pattern[str]) -> list[Path]:
        """Return the subdirectories with matching names."""
        self._refuse_link()
        if not self.root.is_dir():
            return []
        with self._convert_errors():
            return [one for one in self.root.iterdir() if name.fullmatch(one.name) and not one.is_symlink()]

    def _refuse_link(self) -> None:
        if self.root.is_symlink():
            raise StorageError(f"{self.root} is a symbolic link", hint="remove the link, or choose another --history")

    def _convert_errors(self) -> contextlib.AbstractContextManager[None]:
        return convert_os_errors(f"cannot write to {self.root}", "free disk space, or choose another --history")

    def _get_path(self, digest: str) -> Path:
        self._refuse_link()
        get_algorithm(digest)  # raises if the text is not a digest; it may be a path
        return self.root / digest.replace(":", "-", 1)


def check_record(record: StoredProgram) -> None:
    """Raise UsageError unless a record has the digest of its files, and a main file."""
    if not record.digest or record.digest != combine_digests(record.files):
        raise UsageError(f"{RECORD} describes another program")
    if record.main not in record.files:
        raise UsageError(f"main file {record.main!r} is not a file of the program")


def _check_folder(record: StoredProgram, digest: str, folder: Path) -> None:
    """Raise UsageError unless a record describes the program with this digest, with all files in its directory."""
    if record.digest != digest:
        raise UsageError(f"{RECORD} describes another program")
    check_record(record)
    if folder.is_symlink() or (folder / FILES).is_symlink():
        raise UsageError("the directory is a symbolic link")
    for name in record.files:
        resolve_within(folder / FILES, folder / FILES / name)


def _copy(source: Path, target: Path, digest: str) -> None:
    try:
        copy_file(source, target)
    except FileNotFoundError as error:
        raise UsageError(f"program file not found: {source}") from error
    if digest_file(target, get_algorithm(digest)) != digest:
        raise UsageError(f"program file {source} has changed since the run")
