"""Installed packages: their versions, and what they register as entry points.

:mod:`importlib.metadata` knows both, but takes longer to import and to read it all than a warm command has to spare. So
the folders of ``sys.path`` are looked into here, and it is asked about what they leave open: where a package does
register something, is not found, or lies elsewhere than in a plain folder.
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
    """There may be packages where only importlib.metadata finds them."""


def version(package: str) -> str:
    """The version of an installed package. Raises importlib.metadata.PackageNotFoundError: it is not installed."""
    return _version(package, tuple(sys.path))


def points(group: str) -> Sequence[EntryPoint]:
    """The entry points of a group, of all packages."""
    return _points(group, tuple(sys.path))


# What is installed stays the same while `sys.path` does: it is read once.


@functools.cache
def _version(package: str, path: tuple[str, ...]) -> str:
    try:
        folder = next((folder for name, folder in _folders(path) if name == _plain(package)), None)
        told = _head(f"{folder}/METADATA") if folder is not None else {}
        if _plain(told.get("Name", "")) == _plain(package) and "Version" in told:
            return told["Version"]
    except _Unsure:
        pass
    from importlib import metadata

    return metadata.version(package)


@functools.cache
def _points(group: str, path: tuple[str, ...]) -> Sequence[EntryPoint]:
    try:
        if not any(f"[{group}]" in text for text in _registered(path)):
            return ()
    except _Unsure:
        pass
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


@functools.cache
def _registered(path: tuple[str, ...]) -> tuple[str, ...]:
    """What each package registers, as it is written."""
    return tuple(filter(None, (_text(f"{folder}/entry_points.txt") for _, folder in _folders(path))))


@functools.cache
def _folders(path: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The name of every package with the folder of its metadata, in the order of the path."""
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        raise _Unsure
    return tuple(_in(path))


def _in(path: Sequence[str]) -> Iterator[tuple[str, str]]:
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
                yield _plain(name.rpartition(".")[0].partition("-")[0]), f"{place or '.'}/{name}"


def _head(path: str) -> dict[str, str]:
    """The first lines of a file, up to an empty one: what stands before a colon, and what after it."""
    lines = itertools.takewhile(bool, _text(path).splitlines())
    return {name: value.strip() for name, _, value in reversed([line.partition(":") for line in lines])}


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - hundreds of them, in half of Path's time
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
