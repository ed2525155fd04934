"""Find the package to check: a project directory, a wheel or an installed package."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hil.controller.devices.deploy.vendor_packages import DAMAGED_WHEEL, build_wheel
from hil.core.files import open_file
from hil.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class RegisteredPoint:
    """Entry point of a package."""

    group: str
    name: str
    value: str

    @property
    def text(self) -> str:
        """Group and name."""
        return f"{self.group} {self.name}"


@dataclass(frozen=True)
class CheckedPackage:
    """Package with its entry points. ``folders`` are directories to import from first."""

    name: str
    version: str
    points: tuple[RegisteredPoint, ...]
    folders: tuple[str, ...] = ()


def open_package(source: str, folder: Path) -> CheckedPackage:
    """Return a package: from a project directory or a wheel, which hil unpacks into a directory, or installed.

    Raises:
        UsageError: the package does not exist, cannot be built, or has no entry points for hil.
    """
    path = Path(source)
    if path.is_dir() or path.suffix == ".whl":
        wheel = build_wheel(path, folder) if path.is_dir() else path
        site = folder / "site"
        try:
            with open_file(wheel) as file, zipfile.ZipFile(file) as archive:
                archive.extractall(site)
        except DAMAGED_WHEEL as error:
            raise UsageError(f"{wheel} is not a valid wheel: {error}", hint="build the wheel again") from error
        if len(list(metadata.distributions(path=[str(site)]))) != 1:
            raise UsageError(f"{wheel} is not a valid wheel: METADATA not found", hint="build the wheel again")
        return read_folder(site)
    try:
        return _read_package(metadata.distribution(source), ())
    except (metadata.PackageNotFoundError, ValueError) as error:
        known = sorted({one.name for one in metadata.distributions() if one.name})
        raise UsageError(
            f"package {source!r} not found",
            hint=f"{did_you_mean(source, known)}pass a project directory, a wheel or the name of an installed package",
        ) from error


def read_folder(site: Path) -> CheckedPackage:
    """Return the only package in an import directory."""
    (found,) = metadata.distributions(path=[str(site)])
    return _read_package(found, (str(site),))


def _read_package(found: metadata.Distribution, folders: tuple[str, ...]) -> CheckedPackage:
    # sorted: a package may list the entry points in any order
    points = sorted((one.group, one.name, one.value) for one in found.entry_points if one.group.startswith("hil."))
    if not points:
        raise UsageError(
            f"{found.name} {found.version} has no entry points for hil",
            hint="declare entry points in pyproject.toml (docs/extending.md)",
        )
    return CheckedPackage(found.name, found.version, tuple(RegisteredPoint(*one) for one in points), folders)
