"""Find versions, directories and entry points of installed packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hil.core.field_types import check_fields
from hil.core.guarded import format_package, format_value, guard_plugin
from hil.core.install_hints import make_install_command
from hil.core.installed import get_version, list_entry_points
from hil.errors import UsageError, did_you_mean, format_expected

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


def require_version(package: str, extra: str = "", folders: Sequence[str] = ()) -> str:
    """Return the version of a package.

    Args:
        extra: The extra of hil that installs the package, for the hint.
        folders: Directories to search first.

    Raises:
        UsageError: the package is not installed.
    """
    for name in (package, f"{package}-cpu"):
        try:
            return get_version(name, folders)
        except ModuleNotFoundError:
            continue
    raise _make_missing_error(package, extra)


def find_package_folder(name: str, extra: str = "") -> Path:
    """Return a package's directory without importing it. Raises UsageError if the package is not installed."""
    spec = importlib.util.find_spec(name)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        return Path(place)
    raise _make_missing_error(name, extra)


def _make_missing_error(package: str, extra: str) -> UsageError:
    hint = make_install_command(extra) if extra else f"pip install {package}"
    return UsageError(f"requires {package}, which is not installed", hint=hint)


class Registered(dict[str, T]):
    """Registered objects by name. Broken entry points are missing; accessing such a name raises UsageError."""

    def __init__(self, found: Mapping[str, T], broken: Mapping[str, UsageError] | None = None) -> None:
        super().__init__(found)
        self.broken = dict(broken or {})

    def __missing__(self, name: str) -> T:
        self.check(name)
        raise KeyError(name)

    def check(self, name: str) -> None:
        """Raise UsageError if the entry point with this name is broken."""
        if error := self.broken.get(name):
            raise UsageError(error.message, hint=error.hint) from error

    def format_broken(self) -> str:
        """Return the errors of broken entry points, as text for the end of a hint about an unknown name.

        A broken entry point may define the unknown name. The text is "" without broken entry points.
        """
        return "".join(f"; {error.message}" for error in self.broken.values())


def load_registered(
    group: str,
    built_in: Mapping[str, T],
    kind: type | None = None,
    check: Callable[[T], object] | None = None,
) -> Registered[T]:
    """Return the built-in objects of a group, and the objects that installed packages register as entry points.

    A package may replace a built-in object by using the same name.

    Args:
        kind, check: See :func:`load`.
    """
    found, broken = dict(built_in), {}
    for point in list_entry_points(group):
        try:
            found[point.name] = load(point, kind, check)
        except UsageError as error:
            broken[point.name] = error
            found.pop(point.name, None)
    return Registered(found, broken)


def load(point: EntryPoint, kind: type | None = None, check: Callable[[Any], object] | None = None) -> Any:
    """Load and validate an entry point.

    Args:
        kind: The required type; None requires a callable.
        check: Raises TypeError or ValueError for an unusable object. Fields of a dataclass are checked first.

    Raises:
        UsageError: the entry point cannot be loaded or is invalid. The message names the package.
    """
    broken = partial(_make_broken_error, point)
    with guard_plugin(f"loading {describe_entry_point(point)}", broken):
        thing = point.load()
    if not (callable(thing) if kind is None else isinstance(thing, kind)):
        wanted = "function" if kind is None else f"hil.plugins.{kind.__name__}"
        raise make_refused_error(point, f"must be a {wanted}, got {format_value(thing)}")
    with guard_plugin(f"checking {describe_entry_point(point)}", broken, UsageError):
        try:
            if is_dataclass(thing):
                check_fields(thing)
            if check is not None:
                check(thing)
        except (TypeError, ValueError) as error:
            raise make_refused_error(point, f"is invalid: {error}") from error
    return thing


def _make_broken_error(point: EntryPoint, message: str, **more: Any) -> UsageError:
    return UsageError(message, **{**more, "hint": _repair(point)})


def _repair(point: EntryPoint) -> str:
    return f"repair or uninstall the package {format_package(point)}"


def make_refused_error(point: EntryPoint, why: str) -> UsageError:
    """Return the error for an unusable entry point."""
    return UsageError(f"{describe_entry_point(point)} {why}", hint=_repair(point))


def describe_entry_point(point: EntryPoint) -> str:
    """Return the description of an entry point for error messages."""
    return f"the entry point {point.name!r} of {point.group} (package {format_package(point)})"


def pick(group: str, found: Mapping[str, T], name: str) -> T:
    """Return the object with a name. Raises UsageError if the name is unknown or broken."""
    if isinstance(found, Registered):
        found.check(name)
    if name not in found:
        hint = f"{did_you_mean(name, found)}{format_expected(sorted(found))}"
        raise UsageError(f"{group} {name!r} not found", hint=hint)
    return found[name]
