"""Packages with runtimes that `hil board deploy --package` installs: from a project, a wheel or a package index."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import shlex
import shutil
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from hil.controller.devices.deploy.packages import (
    Interpreter,
    NoWheels,
    Package,
    list_platform_tags,
    make_pip_options,
    pack_wheel,
    read_wheel_title,
)
from hil.controller.devices.deploy.wheels import call_pip, list_agent_packages
from hil.core.config_files import parse_toml
from hil.core.files import open_file, read_text
from hil.core.installed import get_version
from hil.core.processes import make_module_command
from hil.core.runtimes import RUNTIME_GROUP
from hil.errors import UsageError

# Errors that zipfile raises for a damaged, encrypted or unsupported file.
DAMAGED_WHEEL = (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)
# Timeout for building a wheel.
_BUILD_SECONDS = 600.0
_MAX_METADATA_BYTES = 4 << 20
# Older versions of setuptools build wheels only with the package wheel.
_SETUPTOOLS_WITH_WHEEL = "70.1"
# Files of a project that are not part of a wheel. Building in a copy leaves the project unchanged.
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "build", "dist", "*.egg-info")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PUBLISHED = re.compile(rf"({_NAME.pattern})(==[A-Za-z0-9.+!_]+)?")


@dataclass(frozen=True)
class VendorPackage:
    """Package of a vendor, ready to send."""

    name: str  # normalized distribution name
    package: Package
    runtimes: tuple[str, ...]  # names of its entry points in ``hil.runtimes``
    requirements: tuple[str, ...]  # normalized names of the distributions that it always needs
    tags: tuple[str, str, str]  # Python, ABI and platform tags of the wheel

    @property
    def marker(self) -> str:
        """Entry in the agent's list of runtimes. It keeps the package when another hil updates the agent."""
        return f"{MARK}{self.name}={self.package.id}"

    def check_platform(self, interpreter: Interpreter) -> None:
        """Raise NoWheels if the wheel does not run on a board's Python."""
        python, abi, platform = (set(one.split(".")) for one in self.tags)
        major, minor = interpreter.version
        here = f"cp{major}{minor}"
        stable = {f"cp3{number}" for number in range(minor + 1)} if "abi3" in abi else {here}
        pythons = {here, *stable, "py3", *(f"py3{number}" for number in range(minor + 1))}
        platforms = {"any", f"linux_{interpreter.machine}", *list_platform_tags(interpreter)}
        if not (python & pythons and abi & {"none", "abi3", here} and platform & platforms):
            raise NoWheels(
                f"the wheel of {self.package.title} is for {'-'.join(self.tags)}, the board has {interpreter.text}",
                hint="build the wheel for the board, and pass the file: --package WHEEL",
            )


# Prefix of a package in the agent's list of runtimes.
MARK = "+"


def prepare_packages(
    sources: Sequence[str], folder: Path, runtimes: Sequence[str], find_interpreter: Callable[[], Interpreter]
) -> tuple[VendorPackage, ...]:
    """Build or fetch the wheels of packages, and pack the wheels for a board.

    Args:
        sources: project directories, wheels, and names of published packages (``NAME`` or ``NAME==VERSION``).
        folder: an empty directory for the results.
        runtimes: runtimes of hil that the agent will have.
        find_interpreter: returns the board's Python, for published packages.

    Raises:
        UsageError: a source is invalid, cannot be built, or requires a package that the agent will not have; or no
            source has a runtime for hil.
        NoWheels: a package is not published for the board's Python.
    """
    found = tuple(_prepare(source, folder / str(number), find_interpreter) for number, source in enumerate(sources))
    present = {"hil", *list_agent_packages(runtimes), *(one.name for one in found)}
    for one in found:
        if missing := [name for name in one.requirements if name not in present]:
            raise UsageError(
                f"{one.package.title} needs {', '.join(missing)}, which the agent does not have",
                hint=f"also pass the wheel of {missing[0]} for the board: --package WHEEL",
            )
    if not any(one.runtimes for one in found):
        raise UsageError(
            f"{', '.join(one.package.title for one in found)} registers no runtime for hil",
            hint=f"add an entry point in the group {RUNTIME_GROUP} (docs/extending.md)",
        )
    return found


def _prepare(source: str, folder: Path, find_interpreter: Callable[[], Interpreter]) -> VendorPackage:
    folder.mkdir(parents=True)
    path = Path(source)
    if path.is_dir():
        wheel = build_wheel(path, folder)
    elif path.suffix == ".whl" and path.is_file():
        wheel = path
    elif published := _PUBLISHED.fullmatch(source):
        wheel = _fetch_wheel(published[1], published[2] or "", folder, find_interpreter())
    else:
        raise UsageError(
            f"--package {source}: project directory or wheel not found",
            hint="pass a directory with pyproject.toml, a .whl file, or NAME==VERSION of a published package",
        )
    try:
        metadata, points = _read_metadata(wheel)
        name = _normalize_name(read_wheel_title(wheel)[0])
        *_, python, abi, platform = wheel.name.removesuffix(".whl").split("-")
        package, required = pack_wheel(wheel, folder), _read_requirements(metadata)
    except (*DAMAGED_WHEEL, ValueError, configparser.Error) as error:
        raise UsageError(f"{wheel} is not a valid wheel: {error}", hint="build the wheel again") from error
    return VendorPackage(name, package, _read_runtimes(points), required, (python, abi, platform))


def _fetch_wheel(name: str, version: str, folder: Path, interpreter: Interpreter) -> Path:
    """Fetch a published wheel for a board: the given version, or the installed version, or the newest version."""
    if not version:
        with contextlib.suppress(PackageNotFoundError):
            version = f"=={get_version(name)}"
    command = make_module_command("pip", "download", "--no-input", "--disable-pip-version-check", "--no-deps")
    command = [*command, f"--dest={folder}", *make_pip_options(interpreter), f"{name}{version}"]
    code, printed = call_pip(command, _BUILD_SECONDS)
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise NoWheels(
            f"pip found no wheel of {name}{version} for {interpreter.text}",
            hint="build the wheel for the board, and pass the file: --package WHEEL",
            detail=printed.strip()[-4000:],
        )
    return wheels[0]


def build_wheel(project: Path, folder: Path) -> Path:
    """Build a project's wheel in a copy.

    Use the build tools of this environment if they satisfy the project's requirements. Otherwise pip fetches them.
    """
    file = project / "pyproject.toml"
    if not file.is_file():
        raise UsageError(f"{project} is not a Python project: pyproject.toml not found", hint="pass a wheel instead")
    copy = folder / "source"
    try:
        shutil.copytree(project, copy, ignore=_list_not_copied)
    except OSError as error:
        # shutil.Error has a list of tuples: source, copy, error.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise UsageError(f"cannot copy {project}: {why}", hint="pass a wheel instead") from error
    command = [*make_module_command("pip", "wheel", "--no-input", "--disable-pip-version-check", "--no-deps")]
    if _has_build_tools(file):
        command.append("--no-build-isolation")
    code, printed = call_pip([*command, f"--wheel-dir={folder}", str(copy)], _BUILD_SECONDS)
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise UsageError(
            f"pip could not build a wheel of {project}",
            hint=f"see pip's output below, or run: pip wheel --no-deps {_quote_folder(project)}",
            detail=printed.strip()[-4000:],
        )
    return wheels[0]


def _quote_folder(folder: Path) -> str:
    """Return a directory for a shell. pip would take a plain name for a package of an index."""
    text = str(folder)
    return shlex.quote(text if os.sep in text or text in (".", "..") else f".{os.sep}{text}")


def _list_not_copied(folder: str, names: list[str]) -> set[str]:
    """Return the names in a directory of a project that hil does not copy, also sockets and links to missing files."""
    special = (name for name in names if not ((path := Path(folder, name)).is_file() or path.is_dir()))
    return {*_NOT_COPIED(folder, names), *special}


def _has_build_tools(file: Path) -> bool:
    """Return whether this environment satisfies the project's build requirements."""
    table = parse_toml(read_text(file), file).get("build-system")
    needed = table.get("requires") if isinstance(table, dict) else ["setuptools"]
    try:
        return all(_is_installed(str(requirement)) for requirement in (needed if isinstance(needed, list) else ()))
    except (PackageNotFoundError, ValueError):  # pip reports invalid requirements
        return False


def _is_installed(requirement: str) -> bool:
    """Return whether an installed package satisfies a requirement.

    Raises:
        PackageNotFoundError: the package is not installed.
        ValueError: the requirement is invalid.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    if wanted.url or wanted.extras:
        return False
    version = get_version(_normalize_name(wanted.name))
    if _normalize_name(wanted.name) == "setuptools" and Version(version) < Version(_SETUPTOOLS_WITH_WHEEL):
        get_version("wheel")
    return wanted.specifier.contains(version, prereleases=True)


def _read_metadata(wheel: Path) -> tuple[str, str]:
    """Return a wheel's METADATA and entry points. Raises ValueError if the wheel has no metadata."""
    with open_file(wheel) as file, zipfile.ZipFile(file) as archive:
        texts = {"METADATA": "", "entry_points.txt": ""}
        for item in archive.infolist():
            folder, _, name = item.filename.partition("/")
            if folder.endswith(".dist-info") and name in texts:
                if item.file_size > _MAX_METADATA_BYTES:
                    raise ValueError(f"{item.filename} is too large")
                texts[name] = archive.read(item).decode()
    if not texts["METADATA"]:
        raise ValueError("METADATA not found")
    return texts["METADATA"], texts["entry_points.txt"]


def _read_runtimes(points: str) -> tuple[str, ...]:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names are case-sensitive
    parser.read_string(points)
    return tuple(parser[RUNTIME_GROUP]) if parser.has_section(RUNTIME_GROUP) else ()


def _read_requirements(metadata: str) -> tuple[str, ...]:
    """Return the names of requirements without conditions. Raises ValueError for an invalid requirement."""
    from packaging.requirements import Requirement

    lines = HeaderParser().parsestr(metadata).get_all("Requires-Dist", [])
    found = [one for one in map(Requirement, lines) if one.marker is None]
    return tuple(dict.fromkeys(_normalize_name(one.name) for one in found))


def _normalize_name(name: str) -> str:
    """Return the normalized name of a distribution. Raises ValueError for an invalid name."""
    from packaging.utils import canonicalize_name

    return canonicalize_name(name, validate=True)
