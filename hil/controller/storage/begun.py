"""Runs that the user began: only those are gone on with.

What a run was asked to do lies in its folder, and with it flags for compilers, files to write and boards to reach. A
folder may be anybody's; so each run is sealed with a key of the user's, over what was asked for and where it lies.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hil.core.config_files import user_folder
from hil.core.text import jsonable
from hil.errors import UsageError

_SEAL = ".begun"
_KEY = "begun.key"


def seal(folder: Path, request: Mapping[str, Any]) -> None:
    """Note in a run's folder that the user began it. Without a home to keep a key in it cannot be gone on with.

    Args:
        folder: the run's, just made.
        request: what it was asked to do.

    Raises:
        OSError: the folder cannot be written.
    """
    if key := _key(make=True):
        (folder / _SEAL).write_text(_mark(key, folder, request) + "\n")


def check_seal(folder: Path, request: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that the user has not begun.

    Args:
        folder: the run's.
        request: what it says it was asked to do.

    Raises:
        UsageError: somebody else began it, or altered or moved it.
    """
    if not is_sealed(folder, request):
        raise UsageError(
            f"{folder} was not begun by you here: what it says it was asked to do may be anybody's",
            hint="start a new run; one that was moved, or begun by another user or on another machine, cannot go on",
        )


def is_sealed(folder: Path, request: Mapping[str, Any]) -> bool:
    """Whether the user began a run, there and as it says."""
    key, found = _key(make=False), ""
    with contextlib.suppress(OSError, UnicodeDecodeError), (folder / _SEAL).open() as file:
        found = file.read(1 << 10).strip()
    return bool(key) and hmac.compare_digest(found.encode(), _mark(key, folder, request).encode())


def _mark(key: bytes, folder: Path, request: Mapping[str, Any]) -> str:
    told = json.dumps([str(folder.resolve()), jsonable(request)], sort_keys=True)
    return hmac.new(key, told.encode(), "sha256").hexdigest()


def _key(*, make: bool) -> bytes:
    """The user's key; nothing where there is none."""
    home = user_folder()
    if home is None:
        return b""
    path = home / _KEY
    with contextlib.suppress(OSError):
        if make and not path.exists():
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = home / f"{_KEY}.{secrets.token_hex(4)}"
            number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(number, "wb") as file:
                file.write(secrets.token_bytes(32))
            # Of two that begin at once the first one's key stays.
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(temporary)
            temporary.unlink()
        return path.read_bytes()
    return b""
