"""Find versions and entry points of installed packages quickly.

:mod:`importlib.metadata` provides both, but is too slow for commands that take a fraction of a second. So hil reads the
``sys.path`` directories directly. hil still uses importlib.metadata if a package registers an entry point in the group,
is missing, or is not in a plain directory.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_SUFFIXES = (".dist-info", ".egg-info")


class _Unsure(Exception):
    """Raised if there may be packages that only importlib.metadata can find."""


def get_version(package: str, folders: Sequence[str] = ()) -> str:
    """Return an installed package's version. Raises importlib.metadata.PackageNotFoundError if not installed.

    Args:
        folders: directories to search before ``sys.path``.
    """
    return _find_version(package, (*folders, *sys.path))


def is_from_index(package: str) -> bool:
    """Return True if pip installed a package from an index, and not from a directory, file, URL or unknown source."""
    try:
        folder = _find_folder(package, tuple(sys.path))
    except _Unsure:
        return False
    # pip writes this file for all other sources (PEP 610).
    return folder is not None and not _read_text(f"{folder}/direct_url.json")


def list_entry_points(group: str) -> Sequence[EntryPoint]:
    """Return the entry points in a group, from all packages."""
    return _find_points(group, tuple(sys.path))


# Cached by `sys.path`: installed packages are assumed not to change while it stays the same.


@functools.cache
def _find_version(package: str, path: tuple[str, ...]) -> str:
    try:
        folder = _find_folder(package, path)
        told = _read_head(f"{folder}/METADATA") if folder is not None else {}
        if _normalize_name(told.get("Name", "")) == _normalize_name(package) and "Version" in told:
            return told["Version"]
    except _Unsure:
        pass
    from importlib import metadata

    return metadata.version(package)


def _find_folder(package: str, path: tuple[str, ...]) -> str | None:
    """Return the metadata directory of a package."""
    return next((folder for name, folder in _list_folders(path) if name == _normalize_name(package)), None)


@functools.cache
def _find_points(group: str, path: tuple[str, ...]) -> Sequence[EntryPoint]:
    try:
        if not any(f"[{group}]" in text for text in _read_registered(path)):
            return ()
    except _Unsure:
        pass
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


@functools.cache
def _read_registered(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the entry_points.txt text of each package."""
    return tuple(filter(None, (_read_text(f"{folder}/entry_points.txt") for _, folder in _list_folders(path))))


@functools.cache
def _list_folders(path: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return (package name, metadata directory) pairs in path order."""
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        raise _Unsure
    return tuple(_iter_folders_in(path))


def _iter_folders_in(path: Sequence[str]) -> Iterator[tuple[str, str]]:
    for place in path:
        try:
            found = os.listdir(place or ".")  # noqa: PTH208 - names alone: hundreds of them
        except NotADirectoryError as error:  # an archive
            raise _Unsure from error
        except OSError:
            continue
        if place.endswith(".egg"):
            raise _Unsure
        for name in found:
            if name.endswith(_SUFFIXES):
                yield _normalize_name(name.rpartition(".")[0].partition("-")[0]), f"{place or '.'}/{name}"


def _read_head(path: str) -> dict[str, str]:
    """Parse a file's header lines, up to the first empty line: name -> value."""
    lines = itertools.takewhile(bool, _read_text(path).splitlines())
    return {name: value.strip() for name, _, value in reversed([line.partition(":") for line in lines])}


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - hundreds of them, in half of Path's time
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
