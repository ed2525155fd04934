"""Check directories and free space: the cache, temporary files, shared memory, the trust list and the project."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hil.controller.pipeline.settings.project import find_project, read_project
from hil.controller.projects.doctor.results import FAIL, NOTE, PASS, make_check
from hil.controller.records.commands.projects import CheckOutcome, EnvironmentCheck
from hil.controller.storage.cache import Cache
from hil.core.config_files import read_trusted, state_of
from hil.errors import HilError

_MIB = 1 << 20
# Free space below these limits: a failure, because hil cannot store a program; and a note.
_MIN_FREE, _LOW_FREE = 100 * _MIB, 1024 * _MIB
_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED = 64 * _MIB


def check_places(here: Path) -> Iterator[EnvironmentCheck]:
    """Check the directories that commands in ``here`` use."""
    yield from _check_cache()
    yield from _check_temporary()
    yield from _check_space("disk of this directory", here, NOTE)
    if sys.platform == "linux":
        yield check_shared_memory(_SHARED_MEMORY)
    yield _check_trust_list()
    yield from _check_project(here)


def _check_cache() -> Iterator[EnvironmentCheck]:
    cache = Cache()
    fix = "set HIL_CACHE_DIR to a writable directory"
    if wrong := _find_write_error(cache.root):
        yield EnvironmentCheck("cache", FAIL, wrong, fix)
        return
    try:
        entries = cache.ls()
    except HilError as error:
        yield EnvironmentCheck("cache", FAIL, error.message, error.hint or fix)
        return
    size = sum(one.size for one in entries)
    yield EnvironmentCheck("cache", PASS, f"{cache.root}: {len(entries)} entries, {size / _MIB:,.0f} MiB")
    yield from _check_space("disk of the cache", cache.root, FAIL)


def _check_temporary() -> Iterator[EnvironmentCheck]:
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        yield EnvironmentCheck("temporary files", FAIL, str(error), "set TMPDIR to a writable directory")
        return
    yield EnvironmentCheck("temporary files", PASS, str(folder))
    yield from _check_space("disk of temporary files", folder, FAIL)


def _find_write_error(folder: Path) -> str:
    """Create a directory and a file in it, and return the error; "" without an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot write to {folder}: {error.strerror or error}"


def _check_space(name: str, folder: Path, outcome: CheckOutcome) -> Iterator[EnvironmentCheck]:
    """Check the free space. With little space, the outcome is a note; with almost no space, it is ``outcome``."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield EnvironmentCheck(name, NOTE, f"unknown: {error.strerror or error}")
        return
    found = f"{free / 1e9:,.1f} GB free"
    fix = "hil cache gc --max-mb 500; hil runs gc"
    state: CheckOutcome = FAIL if outcome == FAIL and free < _MIN_FREE else NOTE
    yield make_check(name, found if free < _LOW_FREE else "", found, fix, outcome=state)


def check_shared_memory(folder: Path) -> EnvironmentCheck:
    """Check the file system for shared memory. Agents and simulators pass tensors through it."""
    name, fix = "shared memory", f"mount -t tmpfs tmpfs {folder}; for containers: docker run --shm-size 1g"
    if wrong := "" if folder.is_dir() else f"{folder} is missing":
        return EnvironmentCheck(name, FAIL, wrong, fix)
    if wrong := _find_write_error(folder):
        return EnvironmentCheck(name, FAIL, wrong, fix)
    free = shutil.disk_usage(folder).free
    found = f"{free / _MIB:,.0f} MiB free in {folder}"
    return make_check(name, found if free < _MIN_SHARED else "", found, fix, outcome=NOTE)


def _check_trust_list() -> EnvironmentCheck:
    try:
        folders = read_trusted()
    except HilError as error:
        return EnvironmentCheck("trusted files", FAIL, error.message, error.hint)
    return EnvironmentCheck("trusted files", PASS, f"{len(folders)} trusted directories (hil board trust --list)")


def _check_project(here: Path) -> Iterator[EnvironmentCheck]:
    path = find_project(here)
    if path is None:
        return
    try:
        project = read_project(path)
        state = state_of(path, project.digest) if project.asks else "trusted"
    except HilError as error:
        yield EnvironmentCheck("project file", FAIL, error.message, error.hint)
        return
    wrong = "" if state == "trusted" else f"{path} needs trust: {', '.join(project.asks)}"
    yield make_check("project file", wrong, str(path), f"hil board trust {path.parent}", outcome=NOTE)
