"""Files that a session keeps: found below its folder and nowhere else, and few enough to be listed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.controller.web.names import said

# Of one place so many files are listed, of so many looked at.
_LISTED, _LOOKED = 200, 5000


@dataclass(frozen=True)
class KeptFile:
    """A file of a session, or a place elsewhere that its record names."""

    what: str  # ir, run profile, ...; "" is what the case's own folder has
    name: str
    # name, file: as `names.said` writes them.
    file: str = ""  # relative to the session's folder; "" where it lies elsewhere: then its name is the whole path
    bytes: int = 0


def own(folder: Path, path: Path) -> bool:
    """Whether a path lies in a session's folder, links followed: a record may name any."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def bases(folder: Path, roots: Sequence[Path]) -> list[Path]:
    """The folders that a relative path of a session's record may start from, the nearest first."""
    found = [folder]
    root = next((one for one in roots if own(one, folder)), None)
    if root is not None:
        found += [one for one in folder.parents if one == root or root in one.parents]
        # Runs are stored in a folder below the one that `hil run` was called in.
        found.append(root.parent)
    return list(dict.fromkeys([*found, folder.parent.parent, Path.cwd()]))


def kept_files(folder: Path, place: Path | None, left: Mapping[str, str]) -> list[KeptFile]:
    """What a case keeps beside its tensors and logs: IR, profiles, pictures, models.

    Args:
        folder: the session's.
        place: the case's own; None is none.
        left: what else it left, by what that is: folders, relative to the session's or not.
    """
    found: list[KeptFile] = []
    if place is not None and own(folder, place):
        found += _below(folder, place, "")
    for what, where in left.items():
        if own(folder, folder / where):
            found += _below(folder, folder / where, what)
        else:
            found.append(KeptFile(what, said(str(folder / where))))
    return found


def own_files(folder: Path) -> list[KeptFile]:
    """The files of a session's folder itself: its record, reports, tables."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    except OSError:
        return []
    plain = [name for name in names if not name.startswith(".")][:_LISTED]
    return [KeptFile("", said(name), said(name)) for name in plain]


def logs_below(folder: Path, place: Path | None = None) -> list[Path]:
    """The logs in ``logs`` of a session, or of a case's folder."""
    base = (place or folder) / "logs"
    return [path for path in _files(base) if path.suffix == ".log" and own(folder, path)] if own(folder, base) else []


def _below(folder: Path, place: Path, what: str) -> list[KeptFile]:
    found = []
    for path in _files(place):
        inner = path.relative_to(place)
        # Tensors and logs have links of their own; what hil keeps for itself begins with a dot.
        if path.suffix in (".npy", ".log") or any(part.startswith(".") for part in inner.parts):
            continue
        if own(folder, path):
            found.append(KeptFile(what, said(str(inner)), said(str(path.relative_to(folder))), path.stat().st_size))
    return found


def _files(place: Path) -> list[Path]:
    """Plain files below a place, in order; links are not followed."""

    def walk() -> Iterator[Path]:
        for parent, folders, names in os.walk(place):
            folders.sort()
            yield from (Path(parent) / name for name in sorted(names))

    looked = itertools.islice(walk(), _LOOKED)
    return list(itertools.islice((path for path in looked if path.is_file() and not path.is_symlink()), _LISTED))
