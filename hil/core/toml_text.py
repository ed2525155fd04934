"""TOML that nobody vouches for, read in one place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hil.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str, path: Path | None) -> dict[str, Any]:
    """The tables of a TOML document.

    Args:
        text: the document.
        path: the file that it is from, for messages.

    Raises:
        UsageError: it is no TOML, or nests deeper or has longer numbers than Python reads.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
