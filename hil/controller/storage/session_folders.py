"""Find stored runs and suite runs by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from hil.controller.storage.paths import is_file, is_folder
from hil.errors import UsageError, did_you_mean

# Default directories of runs and of suite runs.
DEFAULT_ROOT, SUITES = Path("hil-runs"), Path("hil-suites")
_MAX_SHOWN, _MAX_NAME = 5, 100


def list_roots(runs: Path | None = None) -> tuple[Path, Path]:
    """Return the directories that contain runs and suite runs.

    Args:
        runs: directory of runs; None is hil-runs.
    """
    return runs or DEFAULT_ROOT, SUITES


def find_session_folder(name: str, roots: Sequence[Path], records: Collection[str], kind: str = "session") -> Path:
    """Return the directory of a stored run, suite run or other session.

    Args:
        name: a path, a name, a unique prefix of a name, or ``latest``, the newest of all directories.
        roots: directories to search.
        records: file names. A directory with one of these files is a session.
        kind: word for a session in errors.

    Raises:
        UsageError: no session matches, or multiple sessions match.
    """
    try:
        if has_record(Path(name), records):
            return Path(name)
        stored = [path for root in roots if is_folder(root) for path in root.iterdir() if has_record(path, records)]
    except OSError as error:  # the name is too long, or a directory is not readable
        raise UsageError(f"{kind} {name[:_MAX_NAME]!r} not found: {error.strerror or error}") from error
    stored.sort(key=lambda path: path.name)  # names start with the time
    found = stored[-1:] if name == "latest" else [path for path in stored if name and path.name.startswith(name)]
    exact = [path for path in found if path.name == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    hint = f"specify the directory of a {kind}, which contains a record: {' or '.join(records)}"
    if found:
        shown = ", ".join(map(str, found[:_MAX_SHOWN]))
        raise UsageError(f"ambiguous {kind} {name!r}: {shown}", hint=hint)
    if name and is_folder(Path(name)):
        raise UsageError(f"{name} is a directory, but not a {kind}", hint=hint)
    where = ", ".join(map(str, roots))
    hint = f"{did_you_mean(name[:_MAX_NAME], [path.name for path in stored])}{hint}"
    raise UsageError(f"{kind} {name[:_MAX_NAME]!r} not found in {where}", hint=hint)


def has_record(folder: Path, records: Iterable[str]) -> bool:
    """Return True if a directory contains one of these files."""
    return any(is_file(folder / name) for name in records)
