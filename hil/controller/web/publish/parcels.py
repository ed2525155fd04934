"""Manifest of a published session (file names, digests, sizes), and the server's limits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from hil.controller.storage.runs import make_safe_name
from hil.core.bounded_json import parse_json
from hil.core.digest import check
from hil.core.text import escape_controls
from hil.errors import UsageError

SCHEMA = 1
# Internal directory of a store of published sessions.
STORE = ".hil-web"
# Limits per session: number of files, number of directories, bytes. `hil web --published-gb` limits all sessions
# together.
MAX_FILES = 20_000
MAX_SESSION = 8 << 30
# Bytes per upload request.
PIECE = 4 << 20
# Maximum number of digests per request.
DIGESTS = 5_000
_MAX_NAME = 1024
_MAX_PARTS = 16
_MAX_PART = 255
# Maximum number of values in a request's JSON. Each file needs four.
_MAX_VALUES = 5 * MAX_FILES


@dataclass(frozen=True)
class FileEntry:
    """File of a session."""

    name: str  # path in the session's directory, with "/"
    digest: str
    size: int


@dataclass(frozen=True)
class Parcel:
    """Session to publish."""

    id: str  # directory name on the server
    files: Sequence[FileEntry]

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(one.size for one in self.files)

    @cached_property
    def folders(self) -> set[str]:
        """Directories that contain the files."""
        direct = {one.name.rpartition("/")[0] for one in self.files} - {""}
        return direct | {str(above) for one in direct for above in list(PurePosixPath(one).parents)[:-1]}

    def to_json(self) -> dict[str, Any]:
        """Return the request body."""
        return {"schema": SCHEMA, "id": self.id, "files": [[one.name, one.digest, one.size] for one in self.files]}


def is_published(session: Path) -> bool:
    """Return True if a session is in a store. Such a session may come from another machine."""
    return any((folder / STORE).is_dir() for folder in session.parents)


def read_request(body: bytes) -> Any:
    """Parse the JSON of a request. Raises ValueError if the JSON is invalid or has too many values."""
    return parse_json(body, _MAX_VALUES)


def check_parcel(document: Any) -> Parcel:
    """Validate a parcel from a request.

    Raises UsageError for an invalid document, unsafe names, or an oversized session.
    """
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError("invalid publish request", hint="use the same hil release on both machines")
    name, files = document.get("id"), document.get("files")
    if not isinstance(name, str) or not name or not isinstance(files, list):
        raise UsageError("session name and files required")
    entries = [_parse_entry(one) for one in files]
    parcel = Parcel(make_safe_name(name), entries)
    check_size(parcel)
    names = {one.name for one in entries}
    if len(names) < len(entries) or names & parcel.folders:
        raise UsageError("duplicate file names in the session")
    return parcel


def check_size(parcel: Parcel) -> None:
    """Raise UsageError if a session exceeds the limits."""
    if len(parcel.files) > MAX_FILES:
        raise UsageError(f"the session has {len(parcel.files)} files, at most {MAX_FILES} are allowed")
    if len(parcel.folders) > MAX_FILES:
        raise UsageError(f"the session has {len(parcel.folders)} directories, at most {MAX_FILES} are allowed")
    if parcel.size > MAX_SESSION:
        raise UsageError(
            f"the session has {parcel.size / 1e9:.1f} GB, at most {MAX_SESSION / 1e9:.1f} GB are allowed",
            hint="omit large files: hil publish --no-tensors",
        )


def _parse_entry(value: Any) -> FileEntry:
    if not (isinstance(value, list) and len(value) == 3):
        raise UsageError("file name, digest and size required for each file")
    name, digest, size = value
    if not isinstance(name, str) or (trouble := name_trouble(name)):
        raise UsageError(f"invalid file name {escape_controls(str(name))[:100]!r}: {trouble}")
    return FileEntry(name, check(str(digest)), check_file_size(size))


def check_file_size(size: Any) -> int:
    """Validate a file's size. Raises UsageError if the size is invalid or exceeds the limit for a session."""
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_SESSION:
        raise UsageError(f"invalid file size {str(size)[:30]}: at most {MAX_SESSION} bytes are allowed")
    return size


def name_trouble(name: str) -> str:
    """Return the reason for rejecting a file name, or "" if it is valid."""
    parts = name.split("/")
    if escape_controls(name) != name or "\n" in name or "\t" in name or "\\" in name:
        return "unprintable character or backslash in the name"
    if any(part in ("", "..") or part.startswith(".") for part in parts):
        return "hidden file, or outside the session directory"
    if len(name.encode()) > _MAX_NAME or len(parts) > _MAX_PARTS or max(len(one.encode()) for one in parts) > _MAX_PART:
        return "name exceeds the length limit"
    return ""


def check_sizes(document: Any) -> Mapping[str, int]:
    """Return the sizes by digest in a request for missing content. Raises UsageError if the request is invalid."""
    found = document.get("digests") if isinstance(document, dict) else None
    if not isinstance(found, dict) or len(found) > DIGESTS:
        raise UsageError(f"invalid digest list: expected at most {DIGESTS} digests with sizes")
    return {check(digest): check_file_size(size) for digest, size in found.items()}
