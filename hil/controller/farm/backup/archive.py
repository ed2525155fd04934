"""Archive of a farm: a tar file whose last entry, the manifest, has a digest of all other entries.

`tar` can list and extract the archive. hil reads it with a separate reader, because an archive may be damaged or
hostile: sizes are bounded, and names are never used as paths without a check.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path, PurePosixPath

from hil.controller.records.base import make_record
from hil.controller.records.lab.farm_backup import BACKUP_FORMAT, BackupManifest
from hil.core.bounded_json import parse_json
from hil.core.digest import DEFAULT, Hasher, check, get_algorithm
from hil.core.files import open_file
from hil.errors import UsageError

DATABASE, MANIFEST = "database.dump", "manifest.json"
_STORE, _HOME = "store/", "home/"
# Limits for the manifest, a file's name and its components.
_MAX_MANIFEST_BYTES, _MAX_MANIFEST_VALUES = 4 << 20, 100_000
_MAX_NAME_BYTES, _MAX_PARTS = 1000, 16
_PIECE = 1 << 20
_BLOCK = tarfile.BLOCKSIZE
_TRUNCATED = "the file is truncated"
_STORED = re.compile(r"store/(blake3|sha256)/[0-9a-f]{2}/([0-9a-f]{64})")


class DigestDiffers(Exception):
    """A file's content does not match its digest or its size."""


@dataclass(frozen=True)
class ArchiveEntry:
    """Entry of an archive. Read ``pieces`` before the next entry."""

    name: str
    size: int
    pieces: Iterator[bytes]

    @property
    def stored_digest(self) -> str:
        """Digest of a file of the farm's store; "" for other entries."""
        found = _STORED.fullmatch(self.name)
        return f"{found[1]}:{found[2]}" if found else ""

    @property
    def home_path(self) -> PurePosixPath | None:
        """Path below the farm's home directory, or None for other entries."""
        return PurePosixPath(self.name.removeprefix(_HOME)) if self.name.startswith(_HOME) else None


def name_stored(digest: str) -> str:
    """Return the entry name of a file of the farm's store."""
    algorithm, _, figures = check(digest).partition(":")
    return f"{_STORE}{algorithm}/{figures[:2]}/{figures}"


def name_home(path: PurePosixPath) -> str:
    """Return the entry name of a file in the farm's home directory."""
    return f"{_HOME}{path}"


class ArchiveWriter:
    """Writer of an archive. Add the entries, then call :meth:`finish`."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self._content = Hasher()

    def add(self, name: str, size: int, pieces: Iterable[bytes], expected: str = "") -> str:
        """Add an entry and return its digest.

        Args:
            expected: digest of the content; "" for any content.

        Raises:
            DigestDiffers: the content has another size or digest.

        After an error, the archive does not contain the entry.
        """
        start = self._file.tell()
        hasher, count = Hasher(get_algorithm(expected) if expected else DEFAULT), 0
        try:
            self._write_header(name, size)
            for piece in pieces:
                count += len(piece)
                if count > size:
                    break
                hasher.update(piece)
                self._file.write(piece)
            digest = hasher.digest()
            if count != size or expected not in ("", digest):
                raise DigestDiffers(name)
        except BaseException:
            self._file.seek(start)
            self._file.truncate()
            raise
        self._file.write(bytes(-size % _BLOCK))
        self._content.update(_describe(name, size, digest))
        return digest

    def finish(self, manifest: BackupManifest) -> BackupManifest:
        """Add the manifest, with the digest of all entries, and the end of the archive. Return the manifest."""
        manifest = manifest.replace(content=self._content.digest())
        text = json.dumps(manifest.to_json(), indent=1).encode()
        self._write_header(MANIFEST, len(text))
        self._file.write(text + bytes(-len(text) % _BLOCK) + bytes(2 * _BLOCK))
        return manifest

    def _write_header(self, name: str, size: int) -> None:
        header = tarfile.TarInfo(name)
        header.size, header.mode = size, 0o600
        self._file.write(header.tobuf(tarfile.GNU_FORMAT))


def verify_archive(path: Path) -> BackupManifest:
    """Read a whole archive, and check the digests of all entries.

    Raises:
        UsageError: the file is not a backup, is damaged or incomplete, or was made by a newer hil.
    """
    with open_file(path) as file:
        content, dump = Hasher(), ""
        for entry in iter_entries(file, path):
            if entry.name == MANIFEST:
                return _check_manifest(path, file, entry, content.digest(), dump)
            digest = _digest_entry(path, entry)
            dump = digest if entry.name == DATABASE else dump
            content.update(_describe(entry.name, entry.size, digest))
    raise _make_error(path, "the manifest is missing: the file is incomplete")


def iter_entries(file: BufferedReader, path: Path) -> Iterator[ArchiveEntry]:
    """Yield the entries of an archive up to its end.

    Raises:
        UsageError: the file is not a tar archive with valid names, or is truncated.
    """
    left = path.stat().st_size
    known: set[str] = set()
    while True:
        header = _read_header(file, path)
        if header is None:
            return
        long_name = ""
        if header.type == tarfile.GNUTYPE_LONGNAME:
            if not 0 < header.size <= _MAX_NAME_BYTES:
                raise _make_error(path, "a name is too long")
            raw = _read_exactly(file, path, header.size + -header.size % _BLOCK)
            long_name = raw[: header.size].rstrip(b"\0").decode(errors="replace")
            header = _read_header(file, path)
        if header is not None and header.type == tarfile.REGTYPE and left < header.size:
            raise _make_error(path, _TRUNCATED)
        if header is None or header.type != tarfile.REGTYPE or header.size < 0:
            raise _make_error(path, "an entry is not a regular file")
        name = _check_name(path, long_name or header.name)
        if name in known:
            raise _make_error(path, f"duplicate entry {name[:100]!r}")
        known.add(name)
        pieces = _iter_pieces(file, path, header.size)
        yield ArchiveEntry(name, header.size, pieces)
        for _ in pieces:  # skip the rest of an entry that the caller did not read
            pass
        _read_exactly(file, path, -header.size % _BLOCK)


def _check_manifest(path: Path, file: BufferedReader, entry: ArchiveEntry, content: str, dump: str) -> BackupManifest:
    if entry.size > _MAX_MANIFEST_BYTES:
        raise _make_error(path, "the manifest is too large")
    try:
        values = parse_json(b"".join(entry.pieces), _MAX_MANIFEST_VALUES)
    except ValueError as error:
        raise _make_error(path, f"invalid manifest: {error}") from error
    if isinstance(values, dict) and isinstance(values.get("format"), int) and values["format"] > BACKUP_FORMAT:
        raise UsageError(
            f"{path} has format {values['format']}; this hil reads format {BACKUP_FORMAT}", hint="update hil"
        )
    try:
        manifest = make_record(values, BackupManifest)
    except UsageError as error:
        raise _make_error(path, f"invalid manifest: {error.message}") from error
    if manifest.content != content or manifest.dump != dump:
        raise _make_error(path, "the digests do not match the manifest")
    _read_exactly(file, path, -entry.size % _BLOCK)
    if file.read(2 * _BLOCK + 1) != bytes(2 * _BLOCK):
        raise _make_error(path, "unexpected data after the manifest")
    return manifest


def _digest_entry(path: Path, entry: ArchiveEntry) -> str:
    """Return an entry's digest. Raises UsageError for a file of the store whose digest differs from its name."""
    named = entry.stored_digest
    hasher = Hasher(get_algorithm(named) if named else DEFAULT)
    for piece in entry.pieces:
        hasher.update(piece)
    digest = hasher.digest()
    if named and digest != named:
        raise _make_error(path, f"digest mismatch: expected {named}, got {digest}")
    return digest


def _describe(name: str, size: int, digest: str) -> bytes:
    return f"{name}\0{size}\0{digest}\n".encode("utf-8", "surrogateescape")


def _check_name(path: Path, name: str) -> str:
    """Return a valid entry name. Raises UsageError for an unknown name or a path outside the home directory."""
    if name in (DATABASE, MANIFEST) or _STORED.fullmatch(name):
        return name
    inside = PurePosixPath(name.removeprefix(_HOME))
    parts = inside.parts
    plain = name == f"{_HOME}{inside}" and name.isprintable() and not inside.is_absolute()
    if not (plain and 0 < len(parts) <= _MAX_PARTS and ".." not in parts):
        raise _make_error(path, f"invalid entry {name[:100]!r}")
    return name


def _read_header(file: BufferedReader, path: Path) -> tarfile.TarInfo | None:
    """Return the next header, or None at the end of the archive."""
    block = _read_exactly(file, path, _BLOCK)
    if block == bytes(_BLOCK):
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError) as error:
        raise _make_error(path, str(error)) from error


def _iter_pieces(file: BufferedReader, path: Path, size: int) -> Iterator[bytes]:
    while size:
        piece = _read_exactly(file, path, min(size, _PIECE))
        size -= len(piece)
        yield piece


def _read_exactly(file: BufferedReader, path: Path, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise _make_error(path, _TRUNCATED)
    return data


def _make_error(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path} is not a complete backup of a farm: {reason}", hint="use a file that hil farm backup wrote"
    )
