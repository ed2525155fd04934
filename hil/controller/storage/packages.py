"""Installed packages: their versions, their folders, and what they register as entry points."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import TypeVar

from hil.core.digest import digest_file
from hil.errors import UsageError, did_you_mean, one_of

T = TypeVar("T")


@functools.cache
def version(package: str) -> str:
    """The version of an installed package. Read once: a suite asks several times a case, and each costs a millisecond.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    return metadata.version(package)


def needed_version(package: str, extra: str = "") -> str:
    """The version of a package, which an extra of hil may bring. Raises UsageError: it is not installed."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except metadata.PackageNotFoundError:
            continue
    raise _missing(package, extra)


def package_folder(name: str, extra: str = "") -> Path:
    """Where a package lies; it is not imported. Raises UsageError: it is not installed."""
    spec = importlib.util.find_spec(name)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        return Path(place)
    raise _missing(name, extra)


def file_version(module: str) -> str:
    """The digest of a module's file, for keys of the cache: a package may be edited without a new version.

    "" where there is no file, and of hil's own modules, which have such versions.
    """
    if module.partition(".")[0] == "hil":
        return ""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    return _digest_of_file(spec.origin) if spec is not None and spec.has_location and spec.origin else ""


@functools.cache
def _digest_of_file(path: str) -> str:
    """Once a process: it goes on with the code that it has."""
    return digest_file(Path(path))


def _missing(package: str, extra: str) -> UsageError:
    hint = f"pip install 'hil[{extra}]'" if extra else f"pip install {package}"
    return UsageError(f"this needs {package}, which is not installed here", hint=hint)


def registered(group: str, built_in: Mapping[str, T]) -> dict[str, T]:
    """The built-in things of a group and those that installed packages add under the entry point ``group``.

    A package may replace a built-in one by taking its name. One that cannot be loaded is a UsageError.
    """
    found = dict(built_in)
    for point in points(group):
        try:
            found[point.name] = point.load()
        except Exception as error:
            raise UsageError(
                f"the entry point {point.name!r} of {group} cannot be loaded: {error}",
                hint=f"it comes from the package {point.dist.name if point.dist else '?'}: repair or uninstall that",
            ) from error
    return found


def points(group: str) -> EntryPoints:
    """The entry points of a group."""
    return _points(group, tuple(sys.path))


@functools.cache
def _points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Reading what every installed package registers takes milliseconds; it stays the same while ``sys.path`` does."""
    return entry_points(group=group)


def pick(group: str, found: Mapping[str, T], name: str) -> T:
    """The one of that name. Raises UsageError: there is none."""
    if name not in found:
        hint = f"{did_you_mean(name, found)}{one_of(sorted(found))}"
        raise UsageError(f"there is no {group} {name!r}", hint=hint)
    return found[name]
