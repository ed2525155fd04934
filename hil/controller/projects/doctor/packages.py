"""Check Python, the installed packages and the plugins against the metadata of hil."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hil.controller.projects.doctor.results import FAIL, NOTE, PASS, make_check
from hil.controller.records.commands.projects import EnvironmentCheck
from hil.controller.storage.sources.packages import load
from hil.core.install_hints import make_install_command
from hil.core.installed import list_entry_points
from hil.errors import UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_OWN = "hil"
# Extras for the development of hil.
_INTERNAL = ("dev", "docs")


def check_packages() -> Iterator[EnvironmentCheck]:
    """Check Python and the required packages, then the extras, then the plugins."""
    try:
        own = importlib.metadata.metadata(_OWN)
    except importlib.metadata.PackageNotFoundError:
        fix = "pip install -e DIR, in the environment of this Python"
        yield EnvironmentCheck("hil", NOTE, "not installed: the required packages are unknown", fix)
        return
    yield EnvironmentCheck("hil", PASS, own["Version"])
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        yield EnvironmentCheck("package packaging", FAIL, "not installed", "pip install packaging")
        return
    requirements = [Requirement(text) for text in own.get_all("Requires-Dist") or ()]
    extras = own.get_all("Provides-Extra") or ()
    yield check_python(platform.python_version(), own["Requires-Python"] or "")
    yield from check_required(requirements)
    yield from check_extras(requirements, extras)
    yield from check_plugins()


def check_python(version: str, wanted: str) -> EnvironmentCheck:
    """Check the version of Python."""
    from packaging.specifiers import SpecifierSet

    wrong = "" if SpecifierSet(wanted).contains(version, prereleases=True) else f"{version}, requires {wanted}"
    return make_check("python", wrong, f"{version} ({wanted})", f"create the environment with Python {wanted}")


def check_required(requirements: Sequence[Requirement]) -> Iterator[EnvironmentCheck]:
    """Check the packages that hil requires, one check per package."""
    for one in requirements:
        if _applies(one):
            version, wrong = _read_version(one)
            fix = f"pip install {str(one).partition(';')[0].strip()!r}"
            yield make_check(f"package {one.name}", wrong, f"{version} ({one.specifier})", fix)


def check_extras(requirements: Sequence[Requirement], extras: Sequence[str]) -> Iterator[EnvironmentCheck]:
    """Check the extras of hil. A missing extra is not a failure."""
    required = {one.name for one in requirements if _applies(one)}
    for extra in extras:
        needs = list(_list_needs(requirements, extra))
        # The extras for boards contain only packages that hil also requires.
        if extra in _INTERNAL or all(one.name in required for one in needs):
            continue
        versions = {one.name: _read_version(one) for one in needs}
        wrong = ", ".join(f"{name} {wrong}" for name, (_, wrong) in versions.items() if wrong)
        fine = ", ".join(f"{name} {version}" for name, (version, _) in versions.items())
        yield make_check(f"extra {extra}", wrong, fine, make_install_command(extra), outcome=NOTE)


def check_plugins() -> Iterator[EnvironmentCheck]:
    """Check that the plugins of installed packages can be loaded."""
    for group in sorted(one for one in importlib.metadata.entry_points().groups if one.startswith(f"{_OWN}.")):
        for point in list_entry_points(group):
            package = point.dist.name if point.dist else ""
            if package == _OWN:
                continue
            try:
                load(point, object)
            except UsageError as error:
                yield EnvironmentCheck(f"plugin {point.name}", NOTE, error.message, f"pip uninstall {package}")
            else:
                yield EnvironmentCheck(f"plugin {point.name}", PASS, f"{group}, package {package}")


def _applies(requirement: Requirement, extra: str = "") -> bool:
    """Return True if the requirement applies to this machine, and for an extra only to the extra."""
    if requirement.marker is None:
        return not extra
    applies = requirement.marker.evaluate({"extra": extra})
    return applies and not (extra and requirement.marker.evaluate({"extra": ""}))


def _list_needs(requirements: Sequence[Requirement], extra: str) -> Iterator[Requirement]:
    """Yield the packages of an extra. An extra may contain other extras of hil."""
    for one in requirements:
        if not _applies(one, extra):
            continue
        if one.name == _OWN:
            for other in sorted(one.extras):
                yield from _list_needs(requirements, other)
        else:
            yield one


def _read_version(requirement: Requirement) -> tuple[str, str]:
    """Return the installed version of a package, and what is wrong with it; "" if the version is in the range."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return "", "not installed"
    is_fine = requirement.specifier.contains(version, prereleases=True)
    return version, "" if is_fine else f"{version}, requires {requirement.specifier}"
