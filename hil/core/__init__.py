"""What every part of hil needs: tensors, digests, clocks, results, files; and the version of the package."""

from __future__ import annotations

import functools


@functools.cache
def own_version() -> str:
    """The version of hil as the installed package states it; ``0+source`` where none is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hil")
    except PackageNotFoundError:
        return "0+source"
