"""Scan directories for sessions and profiles. Unchanged directories are not listed again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from hil.controller.storage.runs import RECORD
from hil.controller.web.index.index import VERSION
from hil.controller.web.index.profiles import find_profiles_among
from hil.controller.web.readers import BENCH, RECORDS, TRACE
from hil.controller.web.text.names import escape_name
from hil.controller.workloads.suites.store import HEAD, LINES
from hil.controller.workloads.traces.trace import COMPARISON
from hil.core.digest import digest_of

# Maximum depth to scan below a root. The deepest known layout is hil-traces/MODULE/BACKEND/traces/TRACE.
_DEPTH = 6
# Do not cache directories changed within this time: a coarse file system clock may hide a second change.
_SETTLED_NS = 2_000_000_000
# After an hour without writes, check a session's files only in every _TURNS-th scan. If the directory changed, for
# example because a record was replaced, the files are always checked.
_QUIET_NS, _TURNS = 3600 * 1_000_000_000, 8
# Other files that are read together with a record.
_EXTRA_FILES = {HEAD: (LINES,), BENCH: (RECORD,), TRACE: (COMPARISON,)}


@dataclass(frozen=True)
class _Listing:
    """Cached directory contents."""

    changed_ns: int
    record: str  # a session's record file; "" if the directory is not a session
    below: tuple[str, ...]  # subdirectories that may contain sessions
    profiles: tuple[tuple[str, str, str], ...]  # as find_profiles_among() returns them


@dataclass(frozen=True)
class _Stamp:
    """Cached stamp for a session without recent writes."""

    stamp: str
    folder_ns: int  # the directory's modification time
    turn: int


@dataclass(frozen=True)
class ScanResult:
    """Sessions and profiles below a directory."""

    sessions: Sequence[tuple[str, str, str]]  # id, record name, stamp
    profiles: Sequence[tuple[str, str, float]]  # escaped relative path, kind, modification time


class Folders:
    """Scanner for sessions and profiles that caches listings between scans."""

    def __init__(self) -> None:
        self._known: dict[str, _Listing] = {}
        self._stamps: dict[str, _Stamp] = {}
        self._looks = 0

    def scan(self, root: Path) -> ScanResult:
        """Scan for sessions below a directory, and for profiles outside sessions. Symbolic links are not followed."""
        self._looks += 1
        base = str(root)
        skipped = len(base.rstrip("/")) + 1
        sessions, profiles = list[tuple[str, str, str]](), list[tuple[str, str, float]]()
        waiting = [(base, _DEPTH)]
        while waiting:
            place, depth = waiting.pop()
            listing = self._list_folder(place)
            if listing is None:
                continue
            if listing.record:
                sessions.append((place[skipped:] or ".", listing.record, self._stamp_session(place, listing)))
            for name, kind, file in listing.profiles:
                way = escape_name("/".join(filter(None, (place[skipped:], name))))
                profiles.append((way, kind, _read_modified_time(f"{place}/{file}")))
            if depth:
                waiting += [(f"{place}/{name}", depth - 1) for name in listing.below]
        return ScanResult(sessions, profiles)

    def _stamp_session(self, place: str, listing: _Listing) -> str:
        """Return a session's stamp. Sessions without recent writes are checked only in some scans."""
        known = self._stamps.get(place)
        if known and known.folder_ns == listing.changed_ns and (self._looks + known.turn) % _TURNS:
            return known.stamp
        stamp = stamp_of(place, listing.record)
        if time.time_ns() - max(listing.changed_ns, *map(_parse_changed_ns, stamp.split(" "))) > _QUIET_NS:
            self._stamps[place] = _Stamp(stamp, listing.changed_ns, hash(place) % _TURNS)
        else:
            self._stamps.pop(place, None)
        return stamp

    def _list_folder(self, place: str) -> _Listing | None:
        try:
            changed = os.stat(place).st_mtime_ns  # noqa: PTH116 - many, and often
            known = self._known.get(place)
            if known is not None and known.changed_ns == changed:
                return known
            with os.scandir(place) as entries:
                found = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            self._known.pop(place, None)
            return None
        record = next((name for name in RECORDS if name in found and not found[name]), "")
        below: tuple[str, ...] = ()
        if RECORDS.get(record, "matrix") == "matrix":
            below = tuple(sorted(name for name, is_folder in found.items() if is_folder and not name.startswith(".")))
        files = find_profiles_among(name for name, is_folder in found.items() if not is_folder)
        made = _Listing(changed, record, below, tuple(files))
        if abs(time.time_ns() - changed) > _SETTLED_NS:
            self._known[place] = made
        else:
            self._known.pop(place, None)
        return made


def stamp_of(folder: str, record: str) -> str:
    """Return a stamp that changes if one of the session's files changes."""
    return " ".join(_read_file_stamp(f"{folder}/{name}") for name in (record, *_EXTRA_FILES.get(record, ())))


def _read_file_stamp(path: str) -> str:
    try:
        found = os.stat(path)  # noqa: PTH116 - many, and often
    except OSError:
        return "-"
    return f"{found.st_ino}:{found.st_mtime_ns}:{found.st_size}"


def _parse_changed_ns(stamp: str) -> int:
    """Return the modification time in a file's stamp, or 0 for a missing file."""
    parts = stamp.split(":")
    return int(parts[1]) if len(parts) > 1 else 0


def _read_modified_time(path: str) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116 - as above
    except OSError:
        return 0.0


def index_path(roots: Sequence[Path]) -> Path:
    """Return the path of the index in the user's cache. Every set of directories has a separate index."""
    name = digest_of(b"\n".join(map(os.fsencode, sorted(set(roots))))).partition(":")[2][:16]
    return Path(platformdirs.user_cache_dir("hil")) / "web" / f"{name}-{VERSION}.sqlite"


def index_stamp(path: Path) -> str:
    """Return a stamp that changes if a process writes to the index."""
    return " ".join(_read_file_stamp(f"{path}{suffix}") for suffix in ("", "-wal"))
