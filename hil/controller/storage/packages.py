"""Installed packages: their versions, their folders, and what they register as entry points."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hil.core.field_types import check_fields
from hil.core.guarded import guarded, package_text, shown
from hil.core.installed import points, version
from hil.errors import UsageError, did_you_mean, one_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def needed_version(package: str, extra: str = "") -> str:
    """The version of a package, which an extra of hil may bring. Raises UsageError: it is not installed."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except ModuleNotFoundError:
            continue
    raise _missing(package, extra)


def package_folder(name: str, extra: str = "") -> Path:
    """Where a package lies; it is not imported. Raises UsageError: it is not installed."""
    spec = importlib.util.find_spec(name)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        return Path(place)
    raise _missing(name, extra)


def _missing(package: str, extra: str) -> UsageError:
    hint = f"pip install 'hil[{extra}]'" if extra else f"pip install {package}"
    return UsageError(f"this needs {package}, which is not installed here", hint=hint)


class Registered(dict[str, T]):
    """Things by name. What packages broke is not among them, and a UsageError once its own name is asked for."""

    def __init__(self, found: Mapping[str, T], broken: Mapping[str, UsageError] | None = None) -> None:
        super().__init__(found)
        self.broken = dict(broken or {})

    def __missing__(self, name: str) -> T:
        self.check(name)
        raise KeyError(name)

    def check(self, name: str) -> None:
        """Raise UsageError: a package broke what has this name."""
        if error := self.broken.get(name):
            raise UsageError(error.message, hint=error.hint) from error

    def broken_text(self) -> str:
        """The end of a hint, for a name that a broken entry point may have been to give; "" where none is broken."""
        return "".join(f"; {error.message}" for error in self.broken.values())


def registered(
    group: str,
    built_in: Mapping[str, T],
    kind: type | None = None,
    check: Callable[[T], object] | None = None,
) -> Registered[T]:
    """The built-in things of a group and those that installed packages add under the entry point ``group``.

    A package may replace a built-in one by taking its name.

    Args:
        kind, check: as :func:`load` has them.
    """
    found, broken = dict(built_in), {}
    for point in points(group):
        try:
            found[point.name] = load(point, kind, check)
        except UsageError as error:
            broken[point.name] = error
            found.pop(point.name, None)
    return Registered(found, broken)


def load(point: EntryPoint, kind: type | None = None, check: Callable[[Any], object] | None = None) -> Any:
    """What an entry point names.

    Args:
        kind: the type that it must be of; None is a function, or a class to be called.
        check: raises TypeError or ValueError for one that cannot be used; fields of a dataclass are checked before.

    Raises:
        UsageError: it cannot be loaded, or is something else; the message names the package.
    """
    broken = partial(_broken, point)
    with guarded(f"loading {where(point)}", broken):
        thing = point.load()
    if not (callable(thing) if kind is None else isinstance(thing, kind)):
        wanted = "function" if kind is None else f"hil.plugins.{kind.__name__}"
        raise refused(point, f"is no {wanted}: {shown(thing)}")
    with guarded(f"checking {where(point)}", broken, UsageError):
        try:
            if is_dataclass(thing):
                check_fields(thing)
            if check is not None:
                check(thing)
        except (TypeError, ValueError) as error:
            raise refused(point, f"cannot be used: {error}") from error
    return thing


def _broken(point: EntryPoint, message: str, **more: str) -> UsageError:
    return UsageError(message, **{**more, "hint": _repair(point)})


def _repair(point: EntryPoint) -> str:
    return f"repair or uninstall the package {package_text(point)}"


def refused(point: EntryPoint, why: str) -> UsageError:
    """The error of an entry point that cannot be used."""
    return UsageError(f"{where(point)} {why}", hint=_repair(point))


def where(point: EntryPoint) -> str:
    """How errors call an entry point."""
    return f"the entry point {point.name!r} of {point.group}, of the package {package_text(point)},"


def pick(group: str, found: Mapping[str, T], name: str) -> T:
    """The one of that name. Raises UsageError: there is none, or a package broke it."""
    if isinstance(found, Registered):
        found.check(name)
    if name not in found:
        hint = f"{did_you_mean(name, found)}{one_of(sorted(found))}"
        raise UsageError(f"there is no {group} {name!r}", hint=hint)
    return found[name]
