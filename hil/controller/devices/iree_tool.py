"""IREE's command-line tools for a board: out of the iree-base-runtime package of its platform, kept in the cache."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from hil.controller.storage import packages as versions
from hil.controller.storage.cache import Cache
from hil.core.installation import module_command
from hil.core.scratch import temporary_folder
from hil.errors import BoardError, LoadFailed
from hil.formats.iree_command import PROFILE_TOOL, RUN_TOOL, own_tool

PACKAGE = "iree-base-runtime"
# What hil takes out of it, at once: who has one of them can have the other without the network.
_TOOLS = (RUN_TOOL, PROFILE_TOOL)
_ARCHES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
# What a board is taken to have that does not tell: whether the program starts there will show.
_LIBC = "glibc-2.35"
_DOWNLOAD_S = 600.0


def iree_tool(tool: str, arch: str, libc: str = "", *, version: str = "", cache: Cache, board: str) -> Path:
    """One of IREE's tools for a Linux board.

    Args:
        tool: its name: ``iree-run-module``, ``iree-benchmark-module``.
        arch: the board's, as ``uname -m`` says.
        libc: the board's, as ``glibc 2.36``; "" where it does not tell.
        version: of IREE; "" is this host's own.
        cache: where the tool is kept.
        board: the board's name, for messages.

    Raises:
        LoadFailed: there is none for such a board.
        BoardError: the package cannot be had.
    """
    family = _ARCHES.get(arch.lower())
    if family is None:
        raise LoadFailed(
            f"{PACKAGE} has no {tool} for a board of architecture {arch or 'unknown'!r}",
            board=board,
            hint=_BUILD_HINT,
        )
    if libc and not libc.startswith("glibc "):
        raise LoadFailed(
            f"the {tool} of {PACKAGE} needs glibc, and the board has {libc}", board=board, hint=_BUILD_HINT
        )
    wanted = version or versions.version(PACKAGE)
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
    return own_tool(tool) if versions.version(PACKAGE) == wanted else None


def _download(folder: Path, wanted: str, arch: str, libc: str, board: str) -> Path:
    from hil.controller.devices.deploy.wheels import Interpreter, pip_options

    # The program itself has nothing to do with Python: any version's package will do, and this host's has one.
    python = Interpreter("", sys.version_info[:2], arch, libc)
    command = module_command("pip", "download", "--quiet", "--disable-pip-version-check", "--no-input")
    command += ["--no-deps", f"--dest={folder}", *pip_options(python)]
    command.append(f"{PACKAGE}=={wanted}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise BoardError(f"downloading {PACKAGE} {wanted} took too long", board=board, hint=_OWN_HINT) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise BoardError(
            f"the package of {PACKAGE} {wanted} for {arch}, {libc.replace('-', ' ')} cannot be had",
            board=board,
            hint=_OWN_HINT,
            detail=done.stderr.strip()[-4000:],
        )
    return wheels[0]


_BUILD_HINT = "build one for the board and name it in its config: [runtime] file = ..., or program = ..."
_OWN_HINT = (
    "connect this host to a package index, or have the board use a command of its own: [runtime] file = ... in its "
    "config"
)
