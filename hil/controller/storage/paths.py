"""Paths as somebody typed them, of which anything may be asked: pathlib raises for names that are too long."""

from __future__ import annotations

import os
from pathlib import Path

from hil.errors import UsageError


def is_file(path: str | Path) -> bool:
    """Whether it names a file; false for what can be no path."""
    return os.path.isfile(path)


def is_folder(path: str | Path) -> bool:
    """Whether it names a folder; false for what can be no path."""
    return os.path.isdir(path)


def exists(path: str | Path) -> bool:
    """Whether it names anything; false for what can be no path."""
    return os.path.exists(path)


def located(name: str | Path, base: Path, *, board: str = "") -> Path | None:
    """A path of a board's config, relative to ``base``; None for "". Raises UsageError: ``~USER`` of nobody."""
    try:
        return base / Path(name).expanduser() if name else None
    except RuntimeError as error:
        raise UsageError(f"{name} lies in the home of a user that there is not", board=board) from error
