"""Versions of installed packages, which cache keys and records name."""

from __future__ import annotations

import functools
from importlib import metadata

from hil.errors import UsageError


@functools.cache
def version(package: str) -> str:
    """The version of an installed package. Read once: a suite asks several times a case, and each costs a millisecond.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    return metadata.version(package)


def needed_version(package: str, extra: str) -> str:
    """The version of a package that an extra of hil brings.

    Raises:
        UsageError: it is not installed.
    """
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UsageError(f"this needs {package}, which is not installed here", hint=f"pip install 'hil[{extra}]'")
