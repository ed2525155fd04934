"""Parse TOML config files, and check the user's trust in files from the working directory.

hil trusts its own configs, configs in the user's config directory, and configs named by path. Other people may have
written the other configs, such as ``./board_configs`` in a cloned project. From these configs, hil uses only settings
that describe a board. Settings that run, read, write or connect need ``hil board trust`` for the directory. hil stores
the path and digest of a trusted file, so a changed file needs approval again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hil.core.files import MAX_TEXT_BYTES, open_file, write_atomic
from hil.errors import StorageError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str, path: Path | None) -> dict[str, Any]:
    """Parse TOML text. Raises UsageError if the text is invalid, or exceeds Python's limits on nesting or digits."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


SCHEMA = 1
_FILE = "trusted.json"
# Tables that an untrusted config may use: they describe the board, and do not run, read, write or connect. Other
# tables, including future ones, are ignored.
_HARMLESS = {"access", "board", "arithmetic", "devices", "labels", "peak", "simulator"}
_HARMLESS_RUNTIME = {"kind", "tensors", "version"}


def get_user_folder() -> Path | None:
    """Return the user's config directory ``$XDG_CONFIG_HOME/hil``; None without a home, as in some services.

    A relative ``XDG_CONFIG_HOME`` is ignored, as the XDG standard requires.
    """
    home = os.environ.get("XDG_CONFIG_HOME", "")
    if Path(home).is_absolute():
        return Path(home) / "hil"
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".config" / "hil"
    return None


def list_trusted_settings(data: Mapping[str, Any]) -> list[str]:
    """Return the settings that need the user's trust, as ``[table] key``. Board descriptions need none."""
    found = []
    for table, values in data.items():
        if table not in _HARMLESS:
            keys = values if isinstance(values, Mapping) else {}
            found += [f"[{table}] {key}" for key, value in keys.items() if not _is_harmless(table, key, value)]
    return found


def _is_harmless(table: str, key: str, value: Any) -> bool:
    return (table == "runtime" and key in _HARMLESS_RUNTIME) or (table == "stack" and isinstance(value, str))


def check_trust(path: Path, digest: str, asks: Iterable[str], instead: str = "") -> None:
    """Raise an error unless the user trusts a config file in its current state.

    For files that the user did not name by path.

    Args:
        digest: current digest of the text and of the programs that the config runs.
        asks: settings that need trust; if empty, the check passes.
        instead: for the hint: how to specify the file by path; "" if unsupported.

    Raises:
        UsageError: the user has not trusted the file, or it changed since then.
    """
    asks = list(asks)
    state = state_of(path, digest) if asks else "trusted"
    if state == "trusted":
        return
    why = (
        "has been altered since you trusted it" if state == "altered" else "is in a directory that you have not trusted"
    )
    raise UsageError(
        f"{path} {why}, but uses settings that need trust: {', '.join(asks)}",
        hint=f"review the file, then run: hil board trust {path.parent}"
        + (f"; or pass the file by its path: {instead}" if instead else ""),
    )


def state_of(path: Path, digest: str) -> str:
    """Return a file's trust state: ``trusted``, ``altered`` since it was trusted, or ``unknown``.

    Args:
        digest: current digest; "" if it cannot be computed.
    """
    real = str(path.resolve())
    known = {files[real] for files in read_trusted().values() if real in files}
    return ("trusted" if digest in known else "altered") if known else "unknown"


def trust(folder: Path, files: Mapping[Path, str]) -> None:
    """Trust a directory's files in their current state. Earlier trust in the directory or in these files is replaced.

    Raises:
        UsageError: the user has no home directory for the list of trusted files.
        StorageError: the file cannot be written.
    """
    digests = {str(path.resolve()): digest for path, digest in files.items()}
    _write({**_drop_trusted(read_trusted(), digests.__contains__), str(folder): digests})


def remove_trust(folder: Path) -> bool:
    """Remove trust in a directory and all files in it. Return True if any was trusted.

    Raises:
        StorageError: the file cannot be written.
    """
    before = read_trusted()
    after = {other: files for other, files in before.items() if other != str(folder)}
    after = _drop_trusted(after, lambda path: Path(path).is_relative_to(folder))
    if after != before:
        _write(after)
    return after != before


def _drop_trusted(folders: Mapping[str, Mapping[str, str]], gone: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """Return the trusted files without the files for which ``gone`` returns True."""
    kept = {folder: {path: files[path] for path in files if not gone(path)} for folder, files in folders.items()}
    return {folder: files for folder, files in kept.items() if files}


def read_trusted() -> dict[str, dict[str, str]]:
    """Return the user's trusted files: directory -> resolved file path -> digest.

    Raises:
        UsageError: the trust file is damaged, or other users may write to it.
    """
    base = get_user_folder()
    if base is None:
        return {}
    path = base / _FILE
    try:
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            text = file.read(min(status.st_size, MAX_TEXT_BYTES)).decode()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UsageError(
            f"the list of trusted files {path} is writable by other users", hint="inspect the file, then remove it"
        )
    try:
        folders: dict[str, dict[str, str]] = json.loads(text)["folders"]
        if not all(isinstance(digest, str) for files in folders.values() for digest in files.values()):
            raise TypeError("a digest is not a string")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is damaged: {error}",
            hint="remove the file, then run for each trusted directory: hil board trust DIR",
        ) from error
    return folders


def _write(folders: Mapping[str, Mapping[str, str]]) -> None:
    base = get_user_folder()
    if base is None:
        raise UsageError(
            "cannot store the list of trusted files: missing home directory", hint="set HOME or XDG_CONFIG_HOME"
        )
    text = json.dumps({"schema": SCHEMA, "folders": folders}, indent=1, sort_keys=True)
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(base / _FILE, text + "\n", mode=0o600)
    except OSError as error:
        raise StorageError(f"{base / _FILE} cannot be written: {error.strerror or error}") from error
