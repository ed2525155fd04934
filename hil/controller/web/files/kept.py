"""List a session's files. Only files in the session's directory are found, up to a limit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hil.controller.web.text.names import escape_name

# Maximum files to list per directory, and to examine.
_LISTED, _LOOKED = 200, 5000


@dataclass(frozen=True)
class KeptFile:
    """File of a session, or an external path in the session's record."""

    what: str  # ir, run profile, ...; "" for files in the case's directory
    name: str
    # name, file: escaped by `names.said`.
    file: str = ""  # relative to the session's directory; "" for an external file, whose name is its whole path
    bytes: int = 0


def own(folder: Path, path: Path) -> bool:
    """Return True if the resolved path is inside the directory. Records may contain arbitrary paths."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def list_bases(folder: Path, roots: Sequence[Path]) -> list[Path]:
    """Return base directories for relative paths in a session's record, nearest first."""
    found = [folder]
    root = next((one for one in roots if own(one, folder)), None)
    if root is not None:
        found += [one for one in folder.parents if one == root or root in one.parents]
        # `hil run` stores sessions below the current directory.
        found.append(root.parent)
    return list(dict.fromkeys([*found, folder.parent.parent, Path.cwd()]))


def list_kept_files(folder: Path, place: Path | None, directories: Mapping[str, str]) -> list[KeptFile]:
    """Return a case's files other than tensors and logs: IR, profiles, pictures, models.

    Args:
        folder: the session's directory.
        place: the case's directory, or None.
        directories: kind -> directory with other files, absolute or relative to ``folder``.
    """
    found: list[KeptFile] = []
    if place is not None and own(folder, place):
        found += _list_kept_below(folder, place, "")
    for what, where in directories.items():
        if own(folder, folder / where):
            found += _list_kept_below(folder, folder / where, what)
        else:
            found.append(KeptFile(what, escape_name(str(folder / where))))
    return found


def own_files(folder: Path) -> list[KeptFile]:
    """Return the files directly in a session's directory: record, reports, tables."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    except OSError:
        return []
    plain = [name for name in names if not name.startswith(".")][:_LISTED]
    return [KeptFile("", escape_name(name), escape_name(name)) for name in plain]


def list_logs(folder: Path, place: Path | None = None) -> list[Path]:
    """Return the log files in a session's or case's ``logs`` directory."""
    base = (place or folder) / "logs"
    return (
        [path for path in _list_files(base) if path.suffix == ".log" and own(folder, path)] if own(folder, base) else []
    )


def _list_kept_below(folder: Path, place: Path, what: str) -> list[KeptFile]:
    found = []
    for path in _list_files(place):
        inner = path.relative_to(place)
        # Tensors and logs have separate links. Names with a leading dot are internal.
        if path.suffix in (".npy", ".log") or any(part.startswith(".") for part in inner.parts):
            continue
        if own(folder, path):
            found.append(
                KeptFile(what, escape_name(str(inner)), escape_name(str(path.relative_to(folder))), path.stat().st_size)
            )
    return found


def _list_files(place: Path) -> list[Path]:
    """Return the regular files below a directory, sorted. Symbolic links are not followed."""

    def walk() -> Iterator[Path]:
        for parent, folders, names in os.walk(place):
            folders.sort()
            yield from (Path(parent) / name for name in sorted(names))

    looked = itertools.islice(walk(), _LOOKED)
    return list(itertools.islice((path for path in looked if path.is_file() and not path.is_symlink()), _LISTED))
