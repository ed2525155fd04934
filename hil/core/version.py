"""The version of hil that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """The version as the installed package states it; ``0+source`` where none is installed."""
    try:
        return version("hil")
    except PackageNotFoundError:
        return "0+source"
