"""Find the folders that hold sessions and profiles, again and again: what has not changed is not listed again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.controller.storage.runs import RECORD
from hil.controller.web.names import said
from hil.controller.web.profiles import profiles_among
from hil.controller.web.readers import BENCH, RECORDS, TRACE
from hil.controller.workloads.suites.store import HEAD, LINES
from hil.controller.workloads.traces.stored import COMPARISON

# Folders of sessions lie at most so deep below the ones that are named: hil-traces/MODULE/BACKEND/traces/TRACE, and one
# more.
_DEPTH = 6
# A file system's clock may be coarse: a folder that was changed just now may be changed again within the same tick.
_SETTLED_NS = 2_000_000_000
# The files of a session that nobody has written to for so long are looked at in one of so many looks, unless its folder
# has changed, as it does when a record is replaced.
_QUIET_NS, _TURNS = 3600 * 1_000_000_000, 8
# What else of a session's folder is read with its record.
_BESIDE = {HEAD: (LINES,), BENCH: (RECORD,), TRACE: (COMPARISON,)}


@dataclass(frozen=True)
class _Listing:
    """What a folder held."""

    changed_ns: int
    record: str  # the record of a session; "" where it holds none
    below: tuple[str, ...]  # names of the folders in which sessions may lie
    profiles: tuple[tuple[str, str, str], ...]  # as profiles_among() has them


@dataclass(frozen=True)
class _Stamp:
    """That of a session which nobody has written to for long."""

    stamp: str
    folder_ns: int  # when its folder had changed
    turn: int


@dataclass(frozen=True)
class Found:
    """What lies below a folder."""

    sessions: Sequence[tuple[str, str, str]]  # of each its id, its record's name and its stamp
    profiles: Sequence[tuple[str, str, float]]  # of each the way to it as it is said, its kind, and when it was written


class Folders:
    """What the folders below some hold."""

    def __init__(self) -> None:
        self._known: dict[str, _Listing] = {}
        self._stamps: dict[str, _Stamp] = {}
        self._looks = 0

    def look(self, root: Path) -> Found:
        """The sessions below a folder, and the profiles that are not within one; links are not followed."""
        self._looks += 1
        base = str(root)
        skipped = len(base.rstrip("/")) + 1
        sessions, profiles = list[tuple[str, str, str]](), list[tuple[str, str, float]]()
        waiting = [(base, _DEPTH)]
        while waiting:
            place, depth = waiting.pop()
            listing = self._listing(place)
            if listing is None:
                continue
            if listing.record:
                sessions.append((place[skipped:] or ".", listing.record, self._stamp(place, listing)))
            for name, kind, file in listing.profiles:
                way = said("/".join(filter(None, (place[skipped:], name))))
                profiles.append((way, kind, _changed(f"{place}/{file}")))
            if depth:
                waiting += [(f"{place}/{name}", depth - 1) for name in listing.below]
        return Found(sessions, profiles)

    def _stamp(self, place: str, listing: _Listing) -> str:
        """The stamp of a session; that of one which nobody has written to for long is taken only now and then."""
        known = self._stamps.get(place)
        if known and known.folder_ns == listing.changed_ns and (self._looks + known.turn) % _TURNS:
            return known.stamp
        stamp = stamp_of(place, listing.record)
        if time.time_ns() - max(listing.changed_ns, *map(_changed_ns, stamp.split(" "))) > _QUIET_NS:
            self._stamps[place] = _Stamp(stamp, listing.changed_ns, hash(place) % _TURNS)
        else:
            self._stamps.pop(place, None)
        return stamp

    def _listing(self, place: str) -> _Listing | None:
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
        files = profiles_among(name for name, is_folder in found.items() if not is_folder)
        made = _Listing(changed, record, below, tuple(files))
        if abs(time.time_ns() - changed) > _SETTLED_NS:
            self._known[place] = made
        else:
            self._known.pop(place, None)
        return made


def stamp_of(folder: str, record: str) -> str:
    """What changes whenever a session's files do."""
    return " ".join(_file_stamp(f"{folder}/{name}") for name in (record, *_BESIDE.get(record, ())))


def _file_stamp(path: str) -> str:
    try:
        found = os.stat(path)  # noqa: PTH116 - many, and often
    except OSError:
        return "-"
    return f"{found.st_ino}:{found.st_mtime_ns}:{found.st_size}"


def _changed_ns(stamp: str) -> int:
    """When a file was written, as its stamp says; 0 for none."""
    parts = stamp.split(":")
    return int(parts[1]) if len(parts) > 1 else 0


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116 - as above
    except OSError:
        return 0.0


def index_stamp(path: Path) -> str:
    """What changes whenever somebody else writes to an index."""
    return " ".join(_file_stamp(f"{path}{suffix}") for suffix in ("", "-wal"))
