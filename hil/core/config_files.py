"""Configuration files: TOML is parsed here, and a file of the working directory is used once the user trusts it.

A config of hil's own, one in the user's own folder and one whose path was typed are used as they are. Another one lies
in a folder that somebody else may have made (``./board_configs`` of a project that was cloned): what only describes a
board is used, and what runs, reads, writes or connects is used once ``hil board trust`` was called for that folder. The
user's answer is kept by path and by the digest of each file, so that a changed file needs trust again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hil.core.files import write_atomic
from hil.errors import StorageError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str, path: Path | None) -> dict[str, Any]:
    """The tables of a TOML text. Raises UsageError: it is none, or deeper or with longer numbers than Python reads."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


SCHEMA = 1
_FILE = "trusted.json"
# What a config may say untrusted: it describes the board, and nothing in it runs, reads, writes or connects.
# Of the other tables, and of those that are added some day, nothing is used.
_HARMLESS = {"board", "devices", "labels", "simulator"}
_HARMLESS_RUNTIME = {"kind", "tensors", "version"}


def user_folder() -> Path | None:
    """The folder of the user's own configuration, ``$XDG_CONFIG_HOME/hil``; None without a home, as some services run.

    A relative ``XDG_CONFIG_HOME`` counts as none, as its standard says: it would be another one in every folder.
    """
    home = os.environ.get("XDG_CONFIG_HOME", "")
    if Path(home).is_absolute():
        return Path(home) / "hil"
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".config" / "hil"
    return None


def asks_for(data: Mapping[str, Any]) -> list[str]:
    """What a config holds that needs the user's trust, as ``[table] key``; nothing where it only describes a board."""
    found = []
    for table, values in data.items():
        if table not in _HARMLESS:
            keys = values if isinstance(values, Mapping) else {}
            found += [f"[{table}] {key}" for key in keys if not (table == "runtime" and key in _HARMLESS_RUNTIME)]
    return found


def check_trust(path: Path, digest: str, asks: Iterable[str], instead: str = "") -> None:
    """Refuse a file of a folder that nobody typed, unless it is trusted as it is now.

    Args:
        digest: of what it says, and of what that calls.
        asks: what of it needs trust; nothing is never refused.
        instead: how the file itself is named, for the hint; "" where that cannot be.

    Raises:
        UsageError: the user has not trusted it, or it was altered since.
    """
    asks = list(asks)
    state = state_of(path, digest) if asks else "trusted"
    if state == "trusted":
        return
    why = "has been altered since you trusted it" if state == "altered" else "lies where you have not trusted it"
    raise UsageError(
        f"{path} {why}, and it asks for more than hil does by itself: {', '.join(asks)}",
        hint=f"read it, then: hil board trust {path.parent}"
        + (f"; or name the file itself: {instead}" if instead else ""),
    )


def state_of(path: Path, digest: str) -> str:
    """Whether a file is ``trusted`` as it is now, ``altered`` since it was, or ``unknown``.

    Args:
        digest: its present one; "" where it has none any more.
    """
    real = str(path.resolve())
    known = {files[real] for files in trusted_folders().values() if real in files}
    return ("trusted" if digest in known else "altered") if known else "unknown"


def trust(folder: Path, files: Mapping[Path, str]) -> None:
    """Trust a folder's files as they are now, in place of what was trusted there, or of them, before.

    Raises:
        UsageError: there is no home to keep it in.
        StorageError: it cannot be written.
    """
    digests = {str(path.resolve()): digest for path, digest in files.items()}
    _write({**_without(trusted_folders(), digests.__contains__), str(folder): digests})


def distrust(folder: Path) -> bool:
    """Trust a folder no longer, nor any file in it, whichever folder it was trusted with; whether any was.

    Raises:
        StorageError: it cannot be written.
    """
    before = trusted_folders()
    after = {other: files for other, files in before.items() if other != str(folder)}
    after = _without(after, lambda path: Path(path).is_relative_to(folder))
    if after != before:
        _write(after)
    return after != before


def _without(folders: Mapping[str, Mapping[str, str]], gone: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """What is trusted but for some files."""
    kept = {folder: {path: files[path] for path in files if not gone(path)} for folder, files in folders.items()}
    return {folder: files for folder, files in kept.items() if files}


def trusted_folders() -> dict[str, dict[str, str]]:
    """What the user trusts: folder -> a file, without links -> its digest.

    Raises:
        UsageError: the file of it is damaged, or others may write to it.
    """
    base = user_folder()
    if base is None:
        return {}
    path = base / _FILE
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UsageError(f"others may write to {path}, which says what you trust", hint="look at it, then remove it")
    try:
        folders: dict[str, dict[str, str]] = json.loads(text)["folders"]
        if not all(isinstance(digest, str) for files in folders.values() for digest in files.values()):
            raise TypeError("a digest is no text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is damaged: {error}", hint="remove it, and trust again what you trust: hil board trust DIR"
        ) from error
    return folders


def _write(folders: Mapping[str, Mapping[str, str]]) -> None:
    base = user_folder()
    if base is None:
        raise UsageError("there is no home to keep in what you trust", hint="set HOME or XDG_CONFIG_HOME")
    text = json.dumps({"schema": SCHEMA, "folders": folders}, indent=1, sort_keys=True)
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(base / _FILE, text + "\n", mode=0o600)
    except OSError as error:
        raise StorageError(f"{base / _FILE} cannot be written: {error.strerror or error}") from error
