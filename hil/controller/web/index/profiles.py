"""Find stored profiles, and decide which of them pages may read.

A user can store a profile anywhere, often outside the session's directory, and a record can name any directory. So
pages only read profiles whose resolved path is in a directory served by `hil web`. For other profiles, pages show only
the path.

URLs identify a profile by the number of the served directory and the relative path: ``0/profiles/monday``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.controller.analysis.profile.rows import DISPATCHES, EXECUTABLES, PASSES
from hil.controller.analysis.profile.store import HEAD, TABLE, TRACE, read_profile
from hil.controller.web.files.kept import list_bases
from hil.controller.web.text.names import escape_name, unescape_name
from hil.controller.web.text.roots import MAX_DIGITS, number_roots
from hil.core.timeline import Profile
from hil.errors import UsageError

# Maximum bytes per file to read for a page. A million operations take 150 MB.
_MAX_FILE_BYTES = {HEAD: 32 << 20, TABLE: 256 << 20, PASSES: 16 << 20, DISPATCHES: 16 << 20, EXECUTABLES: 16 << 20}
_TRACES = (".pftrace", ".pftrace.gz")
_OUTSIDE = "pages only read --runs directories: add the directory with hil web --runs DIR"


@dataclass(frozen=True)
class StoredProfile:
    """Stored profile."""

    kind: str  # run, compile, or trace for a profile that only has a trace
    folder: Path  # directory, or the trace file for a trace without directory
    key: str  # identifier in URLs; "" if pages may not read the profile
    changed: float = 0.0  # seconds since the epoch

    @property
    def name(self) -> str:
        """Name in lists: the relative path."""
        return self.key.partition("/")[2] or escape_name(self.folder.name)


@dataclass(frozen=True)
class ProfileList:
    """Profiles, newest first, and the total number."""

    found: Sequence[StoredProfile]
    total: int


def list_named_profiles(
    roots: Sequence[Path], folder: Path, case: str, names: Mapping[str, Sequence[str]]
) -> list[StoredProfile]:
    """Return the profiles in a case's record, as :attr:`.CaseDetail.profiles` lists them.

    Names are paths relative to the directory of the command. For multiple models, each has a subdirectory.

    Args:
        folder: directory of the session.
    """

    def list_places(ways: Sequence[str]) -> list[Path]:
        starts = (start / way for way in ways for start in list_bases(folder, roots))
        return list(dict.fromkeys(place for start in starts for place in (start, start / case)))

    return find_stored_profiles(roots, {kind: list_places(ways) for kind, ways in names.items()})


def find_stored_profiles(roots: Sequence[Path], places: Mapping[str, Sequence[Path]]) -> list[StoredProfile]:
    """Return the first existing profile per kind among candidate directories."""
    found = []
    for kind, candidates in places.items():
        keyed = [(_make_url_key(roots, place), place) for place in candidates]
        inside = [(key, place) for key, place in keyed if key and classify_profile(place)]
        outside = [(key, place) for key, place in keyed if not key and _resolve_path(place) is not None]
        # Of the profiles outside served directories, use only the first candidate. Later candidates are guesses,
        # because the base directory of a relative path is unknown.
        key, place = next(iter((*inside, *outside[:1])), ("", None))
        if place is not None:
            found.append(StoredProfile(kind, _resolve_path(place) or place, key))
    return found


def find_profile(roots: Sequence[Path], key: str) -> StoredProfile:
    """Return the profile for a URL key. Raises UsageError if the profile is missing or may not be read."""
    number, _, way = key.partition("/")
    root = number_roots(roots).get(int(number)) if number.isdecimal() and len(number) <= MAX_DIGITS else None
    if root is not None and "\0" not in way:
        folder = root / unescape_name(way)
        if _make_url_key(roots, folder) and (kind := classify_profile(folder)):
            return StoredProfile(kind, folder.resolve(), key)
    raise UsageError(f"profile {key[:200]!r} not found", hint="see the list of traces; the profile may have been moved")


def list_profiles(
    database: sqlite3.Connection, roots: Sequence[Path], most: int, *, kind: str = "", but: str = ""
) -> ProfileList:
    """List the profiles in served directories outside sessions.

    Args:
        most: maximum number of profiles, newest first.
        kind: only list this kind; "" lists all.
        but: key of a profile to exclude.
    """
    where, values = "(? = '' or kind = ?) and root || '/' || way != ?", (kind, kind, but)
    total = database.execute(f"select count(*) from profiles where {where}", values).fetchone()[0]
    rows = database.execute(
        f"select root, way, kind, changed from profiles where {where} order by changed desc, root, way limit ?",
        (*values, most),
    )
    numbered = number_roots(roots)
    found = [
        StoredProfile(row[2], numbered[row[0]] / unescape_name(row[1]), f"{row[0]}/{row[1]}", row[3])
        for row in rows
        if row[0] in numbered
    ]
    return ProfileList(found, total)


def find_profiles_among(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return the profiles among a directory's files as name, kind and main file.

    The directory itself has the name "".
    """
    files = set(names)
    kind = _find_kind(files)
    found = [("", kind, {"run": HEAD, "compile": PASSES, "trace": TRACE}[kind])] if kind else []
    return found + [(name, "trace", name) for name in sorted(files) if name != TRACE and name.endswith(_TRACES)]


def classify_profile(folder: Path) -> str:
    """Return the :attr:`StoredProfile.kind` of a directory or trace file, or "" if it is not a profile."""
    try:
        if folder.name.endswith(_TRACES) and folder.is_file():
            return "trace"
        return _find_kind({name for name in (HEAD, PASSES, TRACE) if (folder / name).is_file()})
    except (OSError, ValueError):
        return ""


def resolve_file(roots: Sequence[Path], profile: StoredProfile, name: str) -> Path:
    """Return the resolved path of a profile's file. Raises UsageError if the file may not be read or is too large."""
    path = _resolve_path(profile.folder / name)
    if path is None or not _make_url_key(roots, path) or not path.is_file():
        raise UsageError(f"{name} not found in {profile.folder}")
    length, most = path.stat().st_size, _MAX_FILE_BYTES.get(name)
    if most is not None and length > most:
        raise UsageError(
            f"{path} exceeds the size limit for pages: {length} bytes", hint=f"use hil profile show {profile.folder}"
        )
    return path


def trace_file(roots: Sequence[Path], profile: StoredProfile) -> Path:
    """Return the trace of a profile. Raises UsageError if the trace is missing or may not be read."""
    if profile.folder.is_file() and _make_url_key(roots, profile.folder):
        return profile.folder
    return resolve_file(roots, profile, TRACE)


def open_profile(roots: Sequence[Path], profile: StoredProfile) -> Profile:
    """Read a run's profile. Raises UsageError if the profile is damaged, too large, or may not be read."""
    for name in (HEAD, TABLE):
        resolve_file(roots, profile, name)
    return read_profile(profile.folder)


def check_compilation(roots: Sequence[Path], profile: StoredProfile) -> Path:
    """Return a compilation's directory after checking the files. Raises UsageError like :func:`open_profile`."""
    for name in (PASSES, DISPATCHES, EXECUTABLES):
        resolve_file(roots, profile, name)
    return profile.folder


def make_show_hint(profile: StoredProfile) -> str:
    """Return the hint for a profile that pages may not read."""
    return f"{profile.folder} is outside the served directories; {_OUTSIDE}"


def _find_kind(names: set[str]) -> str:
    for name, kind in ((HEAD, "run"), (PASSES, "compile"), (TRACE, "trace")):
        if name in names:
            return kind
    return ""


def _make_url_key(roots: Sequence[Path], place: Path) -> str:
    """Return the URL key of a path, or "" if it is not in a served directory."""
    found = _resolve_path(place)
    for number, root in number_roots(roots).items():
        if found is not None and found.is_relative_to(root):
            way = escape_name(found.relative_to(root).as_posix())
            return f"{number}/{'' if way == '.' else way}"
    return ""


def _resolve_path(place: Path) -> Path | None:
    try:
        return place.resolve()
    except (OSError, ValueError, RuntimeError):
        return None
