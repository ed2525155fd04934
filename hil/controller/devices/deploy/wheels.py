"""Fetch wheels for a board's platform with pip, cache them, and extract IREE's command-line tools."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache as once
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path, PurePosixPath

from hil.controller.devices.deploy import packages
from hil.controller.devices.deploy.packages import (
    COMMAND_HINT,
    Interpreter,
    NoWheels,
    Package,
    ProgressPrinter,
    list_platform_tags,
)
from hil.controller.storage.cache import Cache
from hil.core import installed
from hil.core.files import copy_file
from hil.core.processes import make_module_command
from hil.core.runtimes import RUNTIMES, Wheel
from hil.core.scratch import make_temporary_folder
from hil.errors import BoardError, LoadFailed, StorageError, UsageError
from hil.formats.iree_command import PROFILE_TOOL, RUN_TOOL, own_tool

_CPU_HINT = (
    "PyPI's torch requires CUDA on Linux: set PIP_EXTRA_INDEX_URL to the index of CPU builds from PyTorch's "
    "installation page"
)
# Dependencies of the agent's packages that are not in hil's metadata.
_BESIDES = ("typing-extensions",)
# Timeouts in seconds for a hanging pip. pip itself detects dead connections. PyTorch's wheel has 427 MB, IREE's tools
# about 80 MB.
_FETCH_S, _TOOL_S = 3600.0, 600.0
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*?)\s*(?:;\s*extra == ['\"](\w+)['\"])?")
_MIN_VERSION = re.compile(r">=\s*([0-9.]+)")
_NONE_FITS = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)")
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|MaxRetryError|connection (?:error|broken)"
)

# Patterns for the verbose output of pip: the searched indexes, and an index that did not respond. A missing page (404)
# only means that the index does not have the package.
_LOOKED = re.compile(r"Looking in indexes: |[1-9]\d* location\(s\) to search")
_UNFETCHED = re.compile(r"Could not fetch URL (?!.*404 Client Error)")


@dataclass(frozen=True)
class WheelRequirement:
    """Distribution that a board needs."""

    name: str
    range: str  # allowed versions
    here: str = ""  # version installed on this machine
    pinned: bool = False  # whether only this machine's version is allowed

    @property
    def exact(self) -> str:
        """Requirement of this machine's version, or of any allowed version if none is installed."""
        return f"{self.name}=={self.here}" if self.here else self.loose

    @property
    def loose(self) -> str:
        """Requirement that accepts any allowed version, or only this machine's version if the package is pinned."""
        return f"{self.name}=={self.here}" if self.pinned and self.here else f"{self.name}{self.range}"


@dataclass(frozen=True)
class WheelGroup:
    """Distributions that are fetched together: the distributions of the agent, or of a runtime."""

    name: str  # identifies the contents: groups with the same name are interchangeable
    wanted: tuple[WheelRequirement, ...]


def make_agent_group() -> WheelGroup:
    """Return the distributions that every agent needs."""
    wanted = (*sorted(_read_requirements()["agent"].items()), *((name, "") for name in _BESIDES))
    return WheelGroup(
        "agent", tuple(WheelRequirement(name, allowed, _get_installed_version(name)) for name, allowed in wanted)
    )


def make_runtime_group(runtime: str) -> WheelGroup:
    """Return the distributions that a runtime adds to an agent.

    The group is empty for runtimes without known packages, such as a vendor's runtime. The packages of these runtimes
    must already be on the board.
    """
    # hil's extras specify the versions. All extras with the same package specify the same version.
    allowed = {name: versions for extra in _read_requirements().values() for name, versions in extra.items()}
    wheels = RUNTIMES[runtime].wheels if runtime in RUNTIMES else ()
    wanted = tuple(_require_wheel(wheel, allowed.get(wheel.name, "")) for wheel in wheels)
    pins = [one.loose for one in wanted if one.pinned]
    return WheelGroup("=".join([runtime, *(pin.partition("==")[2] for pin in pins)]), wanted)


def list_agent_packages(runtimes: Iterable[str]) -> set[str]:
    """Return the names of the distributions that an agent with these runtimes has."""
    groups = (make_agent_group(), *map(make_runtime_group, runtimes))
    return {one.name for group in groups for one in group.wanted}


def fetch_packages(
    interpreter: Interpreter, groups: Iterable[WheelGroup], *, say: Callable[[str], None], cache: Cache
) -> list[Package]:
    """Return the packages of wheel groups for a board's Python, from the cache or fetched with pip.

    Raises:
        NoWheels: A package is not published for the board's platform.
        BoardError: Fetching failed, or no package index was available.
        StorageError: This machine lacks space for the packages.
    """
    found: list[Package] = []
    for group in groups:
        if not group.wanted:
            continue
        parts = [[one.exact, one.loose] for one in group.wanted]
        key = Cache.key(
            "board-wheels",
            format=packages.FORMAT,
            wanted=parts,
            python=list(interpreter.version),
            platforms=list_platform_tags(interpreter),
        )
        meta = {"packages": group.name, "for": interpreter.text}

        def make(folder: Path, group: WheelGroup = group) -> None:
            what = f"fetching {group.name.partition('=')[0]} for {interpreter.text}"
            say(what)
            with make_temporary_folder("hil-wheels-") as place:
                _fetch(interpreter, group, Path(place), _FETCH_S, ProgressPrinter(say, what))
                packages.write_wheels(sorted(Path(place).glob("*.whl")), folder)

        folder, _ = cache.get_or_make(key, meta, make)
        found += packages.read_index(folder)
    return found


def _fetch(
    interpreter: Interpreter, group: WheelGroup, folder: Path, limit_s: float, progress: ProgressPrinter | None = None
) -> None:
    """Fetch a group's wheels in the versions installed on this machine.

    If a version is not available, fetch the newest allowed version.
    """
    if not list_platform_tags(interpreter):
        raise NoWheels(f"no packages are published for {interpreter.text}", hint=COMMAND_HINT)
    loose: set[str] = set()
    while True:
        chosen = [one.loose if one.name in loose else one.exact for one in group.wanted]
        command = make_module_command(
            "pip", "download", "--no-input", "--disable-pip-version-check", "--no-deps", "-vv"
        )
        # Set retries, because pip reports an unreachable index only if it retries.
        command += ["--progress-bar=raw", "--retries=3", f"--dest={folder}"]
        command += [*packages.make_pip_options(interpreter), *chosen]
        code, printed = call_pip(command, limit_s, progress)
        if code == 0:
            return
        if code < 0:
            raise BoardError(
                f"timed out after {limit_s:g} s: fetching the agent's packages",
                hint="check pip's connection to the package index",
            )
        if _FULL.search(printed):
            raise StorageError(
                f"not enough disk space in {folder.parent} for the board's packages",
                hint="free disk space, or set TMPDIR to a different directory",
            )
        missing = _NONE_FITS.search(printed)
        name = missing[1].lower().replace("_", "-") if missing else ""
        one = next((one for one in group.wanted if one.name == name), None)
        if one is None or one.loose in chosen or _is_index_unreachable(printed):
            raise _make_fetch_error(name, one.loose if one else name, printed, interpreter)
        loose.add(name)


def _is_index_unreachable(printed: str) -> bool:
    """Return whether an index did not respond, so that the available packages are unknown."""
    return bool(_NO_NETWORK.search(printed) or _UNFETCHED.search(printed))


def _make_fetch_error(name: str, requirement: str, printed: str, interpreter: Interpreter) -> BoardError:
    """Return the error for a package that could not be fetched: not published, or no index available.

    ``name`` is "" if pip failed before it searched for the package.
    """
    detail = printed.strip()[-4000:]
    looked = _LOOKED.search(printed)
    if name and looked and not _is_index_unreachable(printed):
        hint = _CPU_HINT if requirement.endswith("+cpu") else COMMAND_HINT
        return NoWheels(f"{requirement} is not published for {interpreter.text}", hint=hint, detail=detail)
    if "No module named pip" in printed:
        hint = "install pip: python -m ensurepip"
    else:
        hint = f"the first deploy for a platform requires a package index: see pip's output below; or {COMMAND_HINT}"
    if name and not looked:
        text = f"{requirement} for {interpreter.text} is not cached, and pip's access to a package index is disabled"
        return BoardError(text, hint=f"unset PIP_NO_INDEX, or no-index in pip's configuration: {hint}", detail=detail)
    return BoardError(f"pip could not fetch the agent's packages for {interpreter.text}", hint=hint, detail=detail)


def call_pip(command: Sequence[str], limit_s: float, progress: ProgressPrinter | None = None) -> tuple[int, str]:
    """Run pip. Return its exit code (negative after a timeout) and the error output."""
    searched: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=printed, text=True, errors="replace"
        ) as process,
    ):
        guard = threading.Timer(limit_s, process.kill)
        guard.start()
        try:
            assert process.stdout
            for line in process.stdout:
                if progress and (at := _PROGRESS.match(line)):
                    progress.set_progress(int(at[1]), int(at[2]))
                elif _LOOKED.match(line) or _UNFETCHED.match(line):
                    searched.append(line)
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            guard.cancel()
        printed.seek(0)
        return code, "".join(searched) + printed.read()


def _require_wheel(wheel: Wheel, allowed: str) -> WheelRequirement:
    here = _get_installed_version(wheel.name)
    if wheel.cpu_build:
        least = _MIN_VERSION.search(allowed)
        release = here.partition("+")[0] or (least[1] if least else "")
        return WheelRequirement(wheel.name, f"=={release}+cpu", f"{release}+cpu")
    return WheelRequirement(wheel.name, allowed, here, wheel.same_version)


def _get_installed_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@once
def _read_requirements() -> dict[str, dict[str, str]]:
    """Return hil's requirements: extra ("" for none) -> distribution -> allowed versions."""
    try:
        lines = requires("hil") or []
    except PackageNotFoundError as error:
        raise UsageError(
            "hil is not installed as a Python package on this machine, so it cannot deploy the agent",
            hint="pip install hil",
        ) from error
    found: dict[str, dict[str, str]] = {"": {}, "agent": {}, "sim": {}}
    for line in lines:
        parts = _REQUIREMENT.fullmatch(line)
        if parts:
            found.setdefault(parts[3] or "", {})[parts[1].lower().replace("_", "-")] = parts[2]
    return found


PACKAGE = "iree-base-runtime"
# Tools to extract together from IREE's package, so that either all of them are cached or none.
_TOOLS = (RUN_TOOL, PROFILE_TOOL)
_ARCHES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
# Assumed C library for a board that does not report its C library. A wrong guess fails when the program starts.
_LIBC = "glibc-2.35"


def fetch_iree_tool(tool: str, arch: str, libc: str = "", *, version: str = "", cache: Cache, board: str) -> Path:
    """Return one of IREE's tools for a Linux board, from the cache if possible.

    Args:
        arch: The board's architecture, as printed by ``uname -m``.
        libc: The board's C library, such as ``glibc 2.36``; "" if unknown.
        version: IREE version; "" means this host's version.

    Raises:
        LoadFailed: The tool does not exist for such a board.
        BoardError: The package could not be fetched.
    """
    family = _ARCHES.get(arch.lower())
    if family is None:
        raise LoadFailed(
            f"{PACKAGE} does not include {tool} for architecture {arch or 'unknown'!r}", board=board, hint=_BUILD_HINT
        )
    if libc and not libc.startswith("glibc "):
        raise LoadFailed(
            f"the {tool} of {PACKAGE} requires glibc, but the board has {libc}", board=board, hint=_BUILD_HINT
        )
    wanted = version or installed.get_version(PACKAGE)
    newest = libc.replace(" ", "-") or _LIBC
    key = Cache.key("tool", package=PACKAGE, version=wanted, arch=family, libc=newest, files=_TOOLS)
    meta = {"package": PACKAGE, "version": wanted, "arch": family}
    entry, _ = cache.get_or_make(key, meta, lambda folder: _fill(folder, wanted, family, newest, board))
    return entry / tool


def _fill(folder: Path, wanted: str, arch: str, libc: str, board: str) -> None:
    own = {tool: _own(tool, wanted, arch) for tool in _TOOLS}
    if all(own.values()):
        for tool, path in own.items():
            copy_file(str(path), folder / tool)
        return
    with make_temporary_folder("hil-wheel-") as place:
        wheel = _download(Path(place), wanted, arch, libc, board)
        with zipfile.ZipFile(wheel) as archive:
            for tool in _TOOLS:
                names = [name for name in archive.namelist() if PurePosixPath(name).name == tool]
                if not names:
                    raise BoardError(f"{tool} not found in {wheel.name}", board=board)
                with archive.open(names[0]) as source, (folder / tool).open("wb") as target:
                    shutil.copyfileobj(source, target)


def _own(tool: str, wanted: str, arch: str) -> Path | None:
    """Return this host's tool if platform and IREE version match, else None."""
    if sys.platform != "linux" or _ARCHES.get(platform.machine().lower()) != arch or not platform.libc_ver()[0]:
        return None
    return own_tool(tool) if installed.get_version(PACKAGE) == wanted else None


def _download(folder: Path, wanted: str, arch: str, libc: str, board: str) -> Path:
    # The tools do not depend on Python, so the package for this host's Python version is sufficient.
    python = Interpreter("", sys.version_info[:2], arch, libc)
    try:
        _fetch(python, WheelGroup(PACKAGE, (WheelRequirement(PACKAGE, "", wanted, pinned=True),)), folder, _TOOL_S)
    except BoardError as error:
        raise BoardError(
            f"cannot fetch the package {PACKAGE} {wanted} for {arch}, {libc.replace('-', ' ')}",
            board=board,
            hint=_OWN_HINT,
            detail=error.detail or error.message,
        ) from error
    return next(folder.glob("*.whl"))


_BUILD_HINT = "build the tool for the board, and set the path in the config: [runtime] file = ..., or program = ..."
_OWN_HINT = (
    "connect this machine to a package index, or set a custom command in the board's config: [runtime] file = ..."
)
