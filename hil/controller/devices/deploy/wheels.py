"""Wheels for a board's platform, fetched on the host with pip, once; and IREE's command-line tools out of one."""

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
from hil.controller.devices.deploy.packages import COMMAND_HINT, Interpreter, NoWheels, Package, Progress, platform_tags
from hil.controller.storage.cache import Cache
from hil.core import installed
from hil.core.processes import module_command
from hil.core.runtimes import RUNTIMES, Wheel
from hil.core.scratch import temporary_folder
from hil.errors import BoardError, LoadFailed, StorageError, UsageError
from hil.formats.iree_command import PROFILE_TOOL, RUN_TOOL, own_tool

_CPU_HINT = (
    "PyPI's torch needs CUDA on Linux: set PIP_EXTRA_INDEX_URL to the index of CPU builds that PyTorch's "
    "installation page names"
)
# What a package of ours needs beside those that hil names itself.
_BESIDES = ("typing-extensions",)
# pip itself gives a dead connection up; these end what hangs. PyTorch's wheel has 427 MB, IREE's tools some 80.
_FETCH_S, _TOOL_S = 3600.0, 600.0
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*?)\s*(?:;\s*extra == ['\"](\w+)['\"])?")
_LEAST = re.compile(r">=\s*([0-9.]+)")
_NONE_FITS = re.compile(r"No matching distribution found for ([A-Za-z0-9._-]+)")
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError|MaxRetryError|connection (?:error|broken)"
)

# What pip says of its search when it is asked for details: where it looked, and that an index refused to answer (a page
# that an index does not have is a package that it does not have).
_LOOKED = re.compile(r"Looking in indexes: |[1-9]\d* location\(s\) to search")
_UNFETCHED = re.compile(r"Could not fetch URL (?!.*404 Client Error)")


@dataclass(frozen=True)
class Wanted:
    """A distribution that a board needs."""

    name: str
    range: str  # the versions that will do
    here: str = ""  # the one that this machine has itself
    pinned: bool = False  # no other version than this machine's will do

    @property
    def exact(self) -> str:
        """The requirement of this machine's own version, where there is one."""
        return f"{self.name}=={self.here}" if self.here else self.loose

    @property
    def loose(self) -> str:
        """The requirement of any version that will do."""
        return f"{self.name}=={self.here}" if self.pinned and self.here else f"{self.name}{self.range}"


@dataclass(frozen=True)
class Group:
    """Distributions that are fetched together: the agent's own, or those of a runtime."""

    name: str  # says what was asked for: two groups of the same name serve the same
    wanted: tuple[Wanted, ...]


def agent_group() -> Group:
    """What every agent needs."""
    wanted = (*sorted(_requirements()["agent"].items()), *((name, "") for name in _BESIDES))
    return Group("agent", tuple(Wanted(name, allowed, _installed(name)) for name, allowed in wanted))


def runtime_group(runtime: str) -> Group:
    """What a runtime adds to an agent: nothing, where hil knows no package of it.

    A vendor's runtime, of which hil knows none, has to be on the board already.
    """
    # A runtime's extra names the versions of what it brings; where several name a package, they say the same.
    allowed = {name: versions for extra in _requirements().values() for name, versions in extra.items()}
    wheels = RUNTIMES[runtime].wheels if runtime in RUNTIMES else ()
    wanted = tuple(_of_runtime(wheel, allowed.get(wheel.name, "")) for wheel in wheels)
    pins = [one.loose for one in wanted if one.pinned]
    return Group("=".join([runtime, *(pin.partition("==")[2] for pin in pins)]), wanted)


def packages_for(
    interpreter: Interpreter, groups: Iterable[Group], *, say: Callable[[str], None], cache: Cache
) -> list[Package]:
    """The packages of some groups for a board's Python, from the cache or else fetched with pip.

    Raises:
        NoWheels: one of them is not published for that platform.
        BoardError: they could not be fetched, or not even be looked for.
        StorageError: there is no room for them here.
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
            platforms=platform_tags(interpreter),
        )
        meta = {"packages": group.name, "for": interpreter.text}

        def make(folder: Path, group: Group = group) -> None:
            what = f"fetching {group.name.partition('=')[0]} for {interpreter.text}"
            say(what)
            with temporary_folder("hil-wheels-") as place:
                _fetch(interpreter, group, Path(place), _FETCH_S, Progress(say, what))
                packages.write_wheels(sorted(Path(place).glob("*.whl")), folder)

        folder, _ = cache.get_or_make(key, meta, make)
        found += packages.read_index(folder)
    return found


def _fetch(
    interpreter: Interpreter, group: Group, folder: Path, limit_s: float, progress: Progress | None = None
) -> None:
    """Fetch a group's wheels: of this machine's own versions, or where one does not fit, the newest that will do."""
    if not platform_tags(interpreter):
        raise NoWheels(f"no packages are published for {interpreter.text}", hint=COMMAND_HINT)
    loose: set[str] = set()
    while True:
        chosen = [one.loose if one.name in loose else one.exact for one in group.wanted]
        command = module_command("pip", "download", "--no-input", "--disable-pip-version-check", "--no-deps", "-vv")
        # Without retries pip does not say that its index cannot be reached.
        command += ["--progress-bar=raw", "--retries=3", f"--dest={folder}"]
        command += [*packages.pip_options(interpreter), *chosen]
        code, printed = _call(command, limit_s, progress)
        if code == 0:
            return
        if code < 0:
            raise BoardError(
                f"the agent's packages could not be fetched within {limit_s:g} s",
                hint="see that pip reaches its package index",
            )
        if _FULL.search(printed):
            raise StorageError(
                f"there is no room in {folder.parent} for the packages that the board is to get",
                hint="make room there, or name another folder for what is fetched: TMPDIR",
            )
        missing = _NONE_FITS.search(printed)
        name = missing[1].lower().replace("_", "-") if missing else ""
        one = next((one for one in group.wanted if one.name == name), None)
        if one is None or one.loose in chosen or _unreached(printed):
            raise _not_had(name, one.loose if one else name, printed, interpreter)
        loose.add(name)


def _unreached(printed: str) -> bool:
    """Whether an index did not answer: then nobody knows what it has."""
    return bool(_NO_NETWORK.search(printed) or _UNFETCHED.search(printed))


def _not_had(name: str, requirement: str, printed: str, interpreter: Interpreter) -> BoardError:
    """Why a package (``name``; "" where pip did not come as far) was not to be had: nobody publishes it, or no index
    answers.
    """
    detail = printed.strip()[-4000:]
    looked = _LOOKED.search(printed)
    if name and looked and not _unreached(printed):
        hint = _CPU_HINT if requirement.endswith("+cpu") else COMMAND_HINT
        return NoWheels(f"{requirement} is not published for {interpreter.text}", hint=hint, detail=detail)
    if "No module named pip" in printed:
        hint = "pip is missing beside hil: python -m ensurepip"
    else:
        hint = f"the first deploy for a platform needs a package index: see pip's words below; or {COMMAND_HINT}"
    if name and not looked:
        text = f"{requirement} for {interpreter.text} is not at hand, and pip may not look into a package index"
        return BoardError(
            text, hint=f"PIP_NO_INDEX, or no-index in pip's configuration, forbids it: {hint}", detail=detail
        )
    return BoardError(f"pip could not fetch the agent's packages for {interpreter.text}", hint=hint, detail=detail)


def _call(command: Sequence[str], limit_s: float, progress: Progress | None) -> tuple[int, str]:
    """Run pip; its exit code, negative where it was ended for taking too long, and what it said of its troubles."""
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
                    progress.at(int(at[1]), int(at[2]))
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


def _of_runtime(wheel: Wheel, allowed: str) -> Wanted:
    here = _installed(wheel.name)
    if wheel.cpu_build:
        least = _LEAST.search(allowed)
        release = here.partition("+")[0] or (least[1] if least else "")
        return Wanted(wheel.name, f"=={release}+cpu", f"{release}+cpu")
    return Wanted(wheel.name, allowed, here, wheel.same_version)


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@once
def _requirements() -> dict[str, dict[str, str]]:
    """hil's own requirements: extra ("" for none) -> distribution -> the versions that will do."""
    try:
        lines = requires("hil") or []
    except PackageNotFoundError as error:
        raise UsageError(
            "hil is not installed here, so its agent cannot be deployed", hint="pip install hil"
        ) from error
    found: dict[str, dict[str, str]] = {"": {}, "agent": {}, "sim": {}}
    for line in lines:
        parts = _REQUIREMENT.fullmatch(line)
        if parts:
            found.setdefault(parts[3] or "", {})[parts[1].lower().replace("_", "-")] = parts[2]
    return found


PACKAGE = "iree-base-runtime"
# What hil takes out of it, at once: who has one of them can have the other without the network.
_TOOLS = (RUN_TOOL, PROFILE_TOOL)
_ARCHES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
# What a board is taken to have that does not tell: whether the program starts there will show.
_LIBC = "glibc-2.35"


def iree_tool(tool: str, arch: str, libc: str = "", *, version: str = "", cache: Cache, board: str) -> Path:
    """One of IREE's tools for a Linux board, kept in the cache.

    Args:
        arch: the board's, as ``uname -m`` says.
        libc: the board's, as ``glibc 2.36``; "" where it does not tell.
        version: of IREE; "" is this host's own.

    Raises:
        LoadFailed: there is none for such a board.
        BoardError: the package cannot be had.
    """
    family = _ARCHES.get(arch.lower())
    if family is None:
        raise LoadFailed(
            f"{PACKAGE} has no {tool} for a board of architecture {arch or 'unknown'!r}", board=board, hint=_BUILD_HINT
        )
    if libc and not libc.startswith("glibc "):
        raise LoadFailed(
            f"the {tool} of {PACKAGE} needs glibc, and the board has {libc}", board=board, hint=_BUILD_HINT
        )
    wanted = version or installed.version(PACKAGE)
    newest = libc.replace(" ", "-") or _LIBC
    key = Cache.key("tool", package=PACKAGE, version=wanted, arch=family, libc=newest, files=_TOOLS)
    meta = {"package": PACKAGE, "version": wanted, "arch": family}
    entry, _ = cache.get_or_make(key, meta, lambda folder: _fill(folder, wanted, family, newest, board))
    return entry / tool


def _fill(folder: Path, wanted: str, arch: str, libc: str, board: str) -> None:
    own = {tool: _own(tool, wanted, arch) for tool in _TOOLS}
    if all(own.values()):
        for tool, path in own.items():
            shutil.copyfile(str(path), folder / tool)
        return
    with temporary_folder("hil-wheel-") as place:
        wheel = _download(Path(place), wanted, arch, libc, board)
        with zipfile.ZipFile(wheel) as archive:
            for tool in _TOOLS:
                names = [name for name in archive.namelist() if PurePosixPath(name).name == tool]
                if not names:
                    raise BoardError(f"{wheel.name} holds no {tool}", board=board)
                with archive.open(names[0]) as source, (folder / tool).open("wb") as target:
                    shutil.copyfileobj(source, target)


def _own(tool: str, wanted: str, arch: str) -> Path | None:
    """This host's own, where the board's platform and IREE are the same."""
    if sys.platform != "linux" or _ARCHES.get(platform.machine().lower()) != arch or not platform.libc_ver()[0]:
        return None
    return own_tool(tool) if installed.version(PACKAGE) == wanted else None


def _download(folder: Path, wanted: str, arch: str, libc: str, board: str) -> Path:
    # The program itself has nothing to do with Python: any version's package will do, and this host's has one.
    python = Interpreter("", sys.version_info[:2], arch, libc)
    try:
        _fetch(python, Group(PACKAGE, (Wanted(PACKAGE, "", wanted, pinned=True),)), folder, _TOOL_S)
    except BoardError as error:
        raise BoardError(
            f"the package of {PACKAGE} {wanted} for {arch}, {libc.replace('-', ' ')} cannot be had",
            board=board,
            hint=_OWN_HINT,
            detail=error.detail or error.message,
        ) from error
    return next(folder.glob("*.whl"))


_BUILD_HINT = "build one for the board and name it in its config: [runtime] file = ..., or program = ..."
_OWN_HINT = (
    "connect this host to a package index, or have the board use a command of its own: [runtime] file = ... in its "
    "config"
)
