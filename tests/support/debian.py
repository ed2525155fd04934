"""Programs of Debian packages, unpacked into the cache, for a machine on which they are not installed."""

from __future__ import annotations

import functools
import os
import platform
import shutil
from pathlib import Path

from filelock import FileLock

from tools.virtual_board.packages import Apt, unpack
from tools.virtual_board.places import cache_folder, make_private


def _unpacked(name: str, package: str) -> tuple[Path, dict[str, str]]:
    """Return the directory with an unpacked package and its missing dependencies, and the necessary environment."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    arch = platform.machine()
    place = make_private(cache_folder()) / f"{name}-{release}-{arch}"
    with FileLock(f"{place}.lock"):
        if not (place / "ready").exists():
            apt = Apt(make_private(place / "apt"), arch, release)
            apt.update()
            # Do not download what this machine already has: its libraries also work for these programs.
            shutil.copy("/var/lib/dpkg/status", apt.folder / "status")
            for deb in apt.download([package]):
                unpack(deb, make_private(place / "root"))
            (place / "ready").touch()
    libraries = {str(path.parent) for path in (place / "root").rglob("*.so*")}
    return place / "root", {"LD_LIBRARY_PATH": ":".join(sorted(libraries))}


@functools.cache
def program(name: str, package: str, path: str) -> tuple[Path, dict[str, str]]:
    """Return a program of this machine, or at a path in a package, and the environment that it needs."""
    if found := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"):
        return Path(found), {}
    root, environment = _unpacked(name, package)
    return root / path, environment
