"""Versions of installed packages, which cache keys and records name."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def version(package: str) -> str:
    """The version of an installed package. Read once: a suite asks several times a case, and each costs a millisecond.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    return metadata.version(package)
