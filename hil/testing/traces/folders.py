"""Assign artifact directories to modules.

A module has the same directory in each run. Two modules never share a directory.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path, PurePath
from typing import Any

from hil.controller.storage.runs import convert_write_errors, write_json
from hil.core.files import read_file
from hil.errors import UsageError

_FILE = "modules.json"
_LOCK = ".modules.lock"


def choose_module_name(module_class: Callable[[], Any], name: str = "") -> str:
    """Return a module's name: the given name, in which ``/`` creates subdirectories, or the class name.

    Raises:
        UsageError: the module has no name, or the path is outside the artifacts directory.
    """
    found = name or str(getattr(module_class, "__name__", ""))
    if not found:
        raise UsageError(f"missing module name for {module_class!r}", hint='for example name="ResNet50/cifar10"')
    path = PurePath(found)
    if path.is_absolute() or not path.parts or os.pardir in path.parts:
        raise UsageError(
            f"invalid module name {found!r}: expected a relative path", hint='for example name="ResNet50/cifar10"'
        )
    return path.as_posix()


def identify_owner(thing: Any, artifacts: Path) -> str:
    """Return a unique id of a class or function.

    The id contains the path of the file, relative to the artifacts directory, and the qualified name.
    """
    name = getattr(thing, "__qualname__", "") or type(thing).__qualname__
    try:
        file = os.path.relpath(Path(inspect.getfile(thing)).absolute(), artifacts.absolute())
    except (TypeError, OSError, ValueError):  # defined at a prompt, or on a different drive
        file = str(getattr(thing, "__module__", ""))
    return f"{file}::{name}"


def claim_folder(artifacts: Path, name: str, owner: str) -> Path:
    """Return a module's directory. Add a number if another existing module uses the name.

    Raises:
        StorageError: the directory is not writable.
    """
    import filelock

    with convert_write_errors(artifacts, "--artifacts_dir"):
        artifacts.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(artifacts / _LOCK):
            owners = _read_owners(artifacts / _FILE)
            for number in count():
                numbered = f"{name}_{number}" if number else name
                holder = owners.get(numbered, owner)
                if holder == owner or not _is_in_use(artifacts, numbered, holder):
                    break
            if owners.get(numbered) != owner:
                write_json(artifacts / _FILE, {**owners, numbered: owner}, option="--artifacts_dir")
    return artifacts / numbered


def _read_owners(path: Path) -> dict[str, str]:
    try:
        found = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):  # the file is damaged: continue without the earlier owners
        return {}
    return {str(name): str(owner) for name, owner in found.items()} if isinstance(found, dict) else {}


def _is_in_use(artifacts: Path, name: str, owner: str) -> bool:
    """Return True if an owner's directory and test file still exist."""
    file = owner.partition("::")[0]
    return (artifacts / name).is_dir() and (not file.endswith(".py") or (artifacts / file).is_file())
