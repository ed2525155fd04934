"""A farm's folder on this machine: what is in it, and what the farm that is up there says of itself."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from hil.controller.farm.client import FarmClient
from hil.controller.farm.places import HOME_VARIABLE, FarmAddress, socket_of, token_file
from hil.core.files import write_atomic
from hil.errors import FarmUnreachable, StorageError, UsageError

# What the extra `farm` brings, but for the database of one's own.
_PACKAGES = ("psycopg", "psycopg_pool", "procrastinate", "fsspec", "prometheus_client")
LOCK, SHEET, LOGS = "up.lock", "up.json", "logs"
# A Unix socket's path has at most 107 bytes.
_LONGEST_SOCKET = 107


def need_packages() -> None:
    """Refuse to run a farm without the packages that it needs; whoever only uses one needs none of them.

    Raises:
        UsageError: the extra ``farm`` is not installed.
    """
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(f"running a farm needs {', '.join(missing)}", hint="pip install 'hil[farm]'")


def prepare_home(home: Path) -> None:
    """Make a farm's folder where it is not there, for its owner alone.

    Raises:
        UsageError: its path is too long.
        StorageError: it cannot be written.
    """
    if len(os.fsencode(socket_of(home))) > _LONGEST_SOCKET:
        raise UsageError(f"{home} is too long a path for a socket", hint=f"set {HOME_VARIABLE} to a shorter one")
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        (home / LOGS).mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{home} cannot be written: {error}") from error


def ask(home: Path, what: str, **arguments: Any) -> Any:
    """Ask the farm of a home, without patience.

    Raises:
        FarmUnreachable: it does not answer.
    """
    try:
        token = token_file(home).read_text().strip()
    except OSError as error:
        raise FarmUnreachable(f"{home} has no token") from error
    with FarmClient(FarmAddress((f"unix:{socket_of(home)}",), token), patience_s=0) as farm:
        return farm.ask(what, **arguments)


def sheet_of(home: Path) -> dict[str, Any] | None:
    """What the farm of a home that is up, or starting, says of itself; None where there is none."""
    try:
        found: dict[str, Any] = json.loads((home / SHEET).read_text())
        return found
    except (OSError, ValueError):
        return None


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file that appears at once, and is never readable by more than its mode says.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        write_atomic(path, text, mode=mode)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error
