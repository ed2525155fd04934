"""Check paths from user input without exceptions. pathlib raises an error for very long names."""

from __future__ import annotations

import os
from pathlib import Path

from hil.errors import UsageError


def is_file(path: str | Path) -> bool:
    """Return True if a path is a file; False for an invalid path."""
    return os.path.isfile(path)


def is_folder(path: str | Path) -> bool:
    """Return True if a path is a directory; False for an invalid path."""
    return os.path.isdir(path)


def path_exists(path: str | Path) -> bool:
    """Return True if a path exists; False for an invalid path."""
    return os.path.exists(path)


def make_sibling_path(model: Path, suffix: str) -> Path:
    """Return the path of a file next to a model: the stem of the model's name, and a suffix.

    A SavedModel is a directory, so the path may be ``.``, which has no name.
    """
    model = model if model.name else model.absolute()
    return model.parent / f"{model.stem}{suffix}"


def locate(name: str | Path, base: Path, *, board: str = "") -> Path | None:
    """Resolve a path of a board's config against ``base``; None for "". Raises UsageError for an unknown ``~USER``."""
    try:
        return base / Path(name).expanduser() if name else None
    except RuntimeError as error:
        raise UsageError(f"unknown user in path {str(name)!r}", board=board) from error
