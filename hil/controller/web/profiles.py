"""Where stored profiles are, and which of them pages may read.

A profile lies where its user wanted it, often outside of its session's folder, and a record may name any folder of this
machine. So pages read only what lies, links followed, in the folders that `hil web` was given; of another one they say
where it is. Addresses name a profile by the number of such a folder and the way from there: ``0/profiles/monday``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.controller.analysis.profile.rows import DISPATCHES, EXECUTABLES, PASSES
from hil.controller.analysis.profile.store import HEAD, TABLE, TRACE, read_profile
from hil.controller.web.kept import bases
from hil.controller.web.names import meant, said
from hil.core.timeline import Profile
from hil.errors import UsageError

# A profile's files are summed up, or read whole, only up to so many bytes: a million operations are 150 MB.
_MOST = {HEAD: 32 << 20, TABLE: 256 << 20, PASSES: 16 << 20, DISPATCHES: 16 << 20, EXECUTABLES: 16 << 20}
_TRACES = (".pftrace", ".pftrace.gz")
_OUTSIDE = "pages read what lies in the folders of --runs alone: name that folder too, hil web --runs DIR"


@dataclass(frozen=True)
class StoredProfile:
    """A profile."""

    kind: str  # run; compile for a compilation's; trace where there is nothing but a trace
    folder: Path  # or the trace itself, where it has none
    key: str  # what addresses name it by; "" where pages may not read it
    changed: float = 0.0  # seconds since the epoch

    @property
    def name(self) -> str:
        """What it is called where several are listed: the way to it."""
        return self.key.partition("/")[2] or said(self.folder.name)


@dataclass(frozen=True)
class ProfileList:
    """Profiles, the newest first, and how many there are."""

    found: Sequence[StoredProfile]
    total: int


def named_profiles(
    roots: Sequence[Path], folder: Path, case: str, names: Mapping[str, Sequence[str]]
) -> list[StoredProfile]:
    """The profiles that the record of a case names, as :attr:`.CaseDetail.profiles` has them.

    Each is named as its user did, seen from where the command was called; of several models each has a folder in it.

    Args:
        folder: the session's.
    """

    def places(ways: Sequence[str]) -> list[Path]:
        starts = (start / way for way in ways for start in bases(folder, roots))
        return list(dict.fromkeys(place for start in starts for place in (start, start / case)))

    return stored_profiles(roots, {kind: places(ways) for kind, ways in names.items()})


def stored_profiles(roots: Sequence[Path], places: Mapping[str, Sequence[Path]]) -> list[StoredProfile]:
    """The profiles that lie in the first of some places each, by their kind."""
    found = []
    for kind, candidates in places.items():
        keyed = [(_key(roots, place), place) for place in candidates]
        inside = [(key, place) for key, place in keyed if key and kind_of(place)]
        outside = [(key, place) for key, place in keyed if not key and _resolved(place) is not None]
        # The last ones are guesses, made where the record has a way from a folder that nobody knows.
        key, place = next(iter((*inside, *outside[:1])), ("", None))
        if place is not None:
            found.append(StoredProfile(kind, _resolved(place) or place, key))
    return found


def find_profile(roots: Sequence[Path], key: str) -> StoredProfile:
    """The profile that an address names. Raises UsageError: there is none, or pages may not read it."""
    number, _, way = key.partition("/")
    if number.isdecimal() and len(number) < 6 and int(number) < len(roots) and "\0" not in way:
        folder = roots[int(number)] / meant(way)
        if _key(roots, folder) and (kind := kind_of(folder)):
            return StoredProfile(kind, folder.resolve(), key)
    raise UsageError(f"there is no profile {key[:200]!r}", hint="it may have been moved; see the list of traces")


def list_profiles(
    database: sqlite3.Connection, roots: Sequence[Path], most: int, *, kind: str = "", but: str = ""
) -> ProfileList:
    """The profiles below the folders that `hil web` was given, but those within a session's own.

    Args:
        most: how many are listed, the newest.
        kind: of this kind alone; "" is any.
        but: the key of one that is not listed.
    """
    where, values = "(? = '' or kind = ?) and root || '/' || way != ?", (kind, kind, but)
    total = database.execute(f"select count(*) from profiles where {where}", values).fetchone()[0]
    rows = database.execute(
        f"select root, way, kind, changed from profiles where {where} order by changed desc, root, way limit ?",
        (*values, most),
    )
    found = [StoredProfile(row[2], roots[row[0]] / meant(row[1]), f"{row[0]}/{row[1]}", row[3]) for row in rows]
    return ProfileList(found, total)


def profiles_among(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """The profiles of a folder's files: of each its name, "" where it is the folder, its kind, and its main file."""
    files = set(names)
    kind = _kind(files)
    found = [("", kind, {"run": HEAD, "compile": PASSES, "trace": TRACE}[kind])] if kind else []
    return found + [(name, "trace", name) for name in sorted(files) if name != TRACE and name.endswith(_TRACES)]


def kind_of(folder: Path) -> str:
    """What a folder has a profile of, or a file is, in the words of :attr:`StoredProfile.kind`; "" for no profile."""
    try:
        if folder.name.endswith(_TRACES) and folder.is_file():
            return "trace"
        return _kind({name for name in (HEAD, PASSES, TRACE) if (folder / name).is_file()})
    except (OSError, ValueError):
        return ""


def file_of(roots: Sequence[Path], profile: StoredProfile, name: str) -> Path:
    """A file of a profile's, links followed. Raises UsageError: pages may not read it, or it is too long."""
    path = _resolved(profile.folder / name)
    if path is None or not _key(roots, path) or not path.is_file():
        raise UsageError(f"{profile.folder} has no {name} that can be shown")
    length, most = path.stat().st_size, _MOST.get(name)
    if most is not None and length > most:
        raise UsageError(
            f"{path} has {length} bytes: too many for a page", hint=f"hil profile show {profile.folder} reads it"
        )
    return path


def trace_file(roots: Sequence[Path], profile: StoredProfile) -> Path:
    """The trace of a profile. Raises UsageError: it has none, or pages may not read it."""
    if profile.folder.is_file() and _key(roots, profile.folder):
        return profile.folder
    return file_of(roots, profile, TRACE)


def open_profile(roots: Sequence[Path], profile: StoredProfile) -> Profile:
    """A run's profile, its files checked. Raises UsageError: it is damaged, too long, or pages may not read it."""
    for name in (HEAD, TABLE):
        file_of(roots, profile, name)
    return read_profile(profile.folder)


def check_compilation(roots: Sequence[Path], profile: StoredProfile) -> Path:
    """A compilation's folder, its files checked. Raises UsageError as :func:`open_profile`."""
    for name in (PASSES, DISPATCHES, EXECUTABLES):
        file_of(roots, profile, name)
    return profile.folder


def how_to_show(profile: StoredProfile) -> str:
    """What to do to see a profile that pages may not read."""
    return f"{profile.folder} is elsewhere; {_OUTSIDE}"


def _kind(names: set[str]) -> str:
    for name, kind in ((HEAD, "run"), (PASSES, "compile"), (TRACE, "trace")):
        if name in names:
            return kind
    return ""


def _key(roots: Sequence[Path], place: Path) -> str:
    """What addresses name a place by; "" where it lies in none of the folders."""
    found = _resolved(place)
    for number, root in enumerate(roots):
        if found is not None and found.is_relative_to(root):
            way = said(found.relative_to(root).as_posix())
            return f"{number}/{'' if way == '.' else way}"
    return ""


def _resolved(place: Path) -> Path | None:
    try:
        return place.resolve()
    except (OSError, ValueError, RuntimeError):
        return None
