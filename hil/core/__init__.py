"""What every part of hil needs: tensors, digests, clocks, results, files; and the version of the package."""

from __future__ import annotations


def own_version() -> str:
    """The version of hil as the installed package states it; ``0+source`` where none is installed."""
    from hil.core.installed import version

    try:
        return version("hil")
    except ModuleNotFoundError:
        return "0+source"
