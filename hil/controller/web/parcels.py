"""What is published: the files of a stored session by name and content, and what a server takes of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hil.controller.storage.runs import safe_name
from hil.core.digest import check
from hil.core.text import visible
from hil.errors import UsageError

SCHEMA = 1
# What one session may have. A server has a limit of all of them besides: `hil web --published-gb`.
MOST_FILES = 20_000
MOST_SESSION = 8 << 30
# A file is sent in pieces of so many bytes.
PIECE = 4 << 20
# So many digests are asked for at a time.
DIGESTS = 5_000
_MOST_NAME = 1024
_MOST_PARTS = 16
_MOST_PART = 255


@dataclass(frozen=True)
class FileEntry:
    """A file of a session."""

    name: str  # its path in the session's folder, with "/"
    digest: str
    size: int


@dataclass(frozen=True)
class Parcel:
    """A session to be published."""

    id: str  # the folder that it gets
    files: Sequence[FileEntry]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(one.size for one in self.files)

    def to_json(self) -> dict[str, Any]:
        """As it is sent."""
        return {"schema": SCHEMA, "id": self.id, "files": [[one.name, one.digest, one.size] for one in self.files]}


def parcel_of(document: Any) -> Parcel:
    """A parcel as somebody sent it. Raises UsageError: it is none, or its names lead anywhere, or it is too large."""
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError("that is no session as hil publish sends it", hint="the same release of hil on both sides?")
    name, files = document.get("id"), document.get("files")
    if not isinstance(name, str) or not name or not isinstance(files, list):
        raise UsageError("a session has a name and files")
    entries = [_entry(one) for one in files]
    parcel = Parcel(safe_name(name), entries)
    check_size(parcel)
    names = {one.name for one in entries}
    folders = {one.name[:end] for one in entries for end in range(len(one.name)) if one.name[end] == "/"}
    if len(names) < len(entries) or names & folders:
        raise UsageError("two of the session's files have one name")
    return parcel


def check_size(parcel: Parcel) -> None:
    """Raise UsageError for a session with more than one may have."""
    if len(parcel.files) > MOST_FILES:
        raise UsageError(f"the session has {len(parcel.files)} files, {MOST_FILES} are allowed")
    if parcel.size > MOST_SESSION:
        raise UsageError(
            f"the session has {parcel.size / 1e9:.1f} GB, {MOST_SESSION / 1e9:.1f} GB are allowed",
            hint="leave out what is large: hil publish --no-tensors",
        )


def _entry(value: Any) -> FileEntry:
    if not (isinstance(value, list) and len(value) == 3):
        raise UsageError("a file of a session has a name, a digest and a size")
    name, digest, size = value
    if not isinstance(name, str) or (trouble := name_trouble(name)):
        raise UsageError(f"a session cannot have a file {visible(str(name))[:100]!r}: {trouble}")
    return FileEntry(name, check(str(digest)), checked_size(size))


def checked_size(size: Any) -> int:
    """A file's size. Raises UsageError: it is none, or more than a session may have."""
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MOST_SESSION:
        raise UsageError(f"a file of {str(size)[:30]} bytes is not taken: {MOST_SESSION} are allowed")
    return size


def name_trouble(name: str) -> str:
    """Why a file of that name is not taken; "" where it is."""
    parts = name.split("/")
    if visible(name) != name or "\n" in name or "\t" in name or "\\" in name:
        return "its name has characters that are not shown"
    if any(part in ("", "..") or part.startswith(".") for part in parts):
        return "it is hidden, or lies elsewhere"
    if (
        len(name.encode()) > _MOST_NAME
        or len(parts) > _MOST_PARTS
        or max(len(one.encode()) for one in parts) > _MOST_PART
    ):
        return "its name is too long"
    return ""


def sizes_of(document: Any) -> Mapping[str, int]:
    """Digest -> size, as somebody asks what is missing of them. Raises UsageError: it is none of that."""
    found = document.get("digests") if isinstance(document, dict) else None
    if not isinstance(found, dict) or len(found) > DIGESTS:
        raise UsageError(f"digests with their sizes are asked for, at most {DIGESTS} at a time")
    return {check(digest): checked_size(size) for digest, size in found.items()}
