"""Paths as somebody typed them, of which anything may be asked: pathlib raises for names that are too long."""

from __future__ import annotations

import os
from pathlib import Path


def is_file(path: str | Path) -> bool:
    """Whether it names a file; false for what can be no path."""
    return os.path.isfile(path)


def exists(path: str | Path) -> bool:
    """Whether it names anything; false for what can be no path."""
    return os.path.exists(path)
