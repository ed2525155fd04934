"""Which folder among the artifacts is whose: a module keeps its own from run to run, and never gets another's."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path, PurePath
from typing import Any

from hil.controller.storage.runs import storing, write_json
from hil.errors import UsageError

_FILE = "modules.json"
_LOCK = ".modules.lock"


def module_name(module_class: Callable[[], Any], name: str = "") -> str:
    """Return what a module is called: its class's name, or the one given, in which ``/`` makes folders.

    Raises:
        UsageError: it has none, or the one given leads elsewhere.
    """
    found = name or str(getattr(module_class, "__name__", ""))
    if not found:
        raise UsageError(f"{module_class!r} has no name", hint='give it one: name="ResNet50/cifar10"')
    path = PurePath(found)
    if path.is_absolute() or not path.parts or os.pardir in path.parts:
        raise UsageError(f"{found!r} is no name of a module", hint='for example name="ResNet50/cifar10"')
    return path.as_posix()


def owner_of(thing: Any, artifacts: Path) -> str:
    """Return what tells a class or function from all others: its file, seen from the artifacts, and its name in it."""
    name = getattr(thing, "__qualname__", "") or type(thing).__qualname__
    try:
        file = os.path.relpath(Path(inspect.getfile(thing)).absolute(), artifacts.absolute())
    except (TypeError, OSError, ValueError):  # typed at a prompt, or on another drive
        file = str(getattr(thing, "__module__", ""))
    return f"{file}::{name}"


def claim(artifacts: Path, name: str, owner: str) -> Path:
    """Return a module's folder; where it is another one's, who still is there, that with the next free number.

    Raises:
        StorageError: the folder cannot be written.
    """
    import filelock

    with storing(artifacts, "--artifacts_dir"):
        artifacts.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(artifacts / _LOCK):
            owners = _owners(artifacts / _FILE)
            for number in count():
                numbered = f"{name}_{number}" if number else name
                holder = owners.get(numbered, owner)
                if holder == owner or not _is_there(artifacts, numbered, holder):
                    break
            if owners.get(numbered) != owner:
                write_json(artifacts / _FILE, {**owners, numbered: owner}, option="--artifacts_dir")
    return artifacts / numbered


def _owners(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # what is lost is only who was here before
        return {}
    return {str(name): str(owner) for name, owner in found.items()} if isinstance(found, dict) else {}


def _is_there(artifacts: Path, name: str, owner: str) -> bool:
    """Whether an owner's folder and its test file still exist."""
    file = owner.partition("::")[0]
    return (artifacts / name).is_dir() and (not file.endswith(".py") or (artifacts / file).is_file())
