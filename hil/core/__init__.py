"""Shared basics for all of hil: tensors, digests, clocks, results, files, and the package version."""

from __future__ import annotations


def own_version() -> str:
    """Return the installed package's version, or ``0+source`` if hil is not installed."""
    from hil.core.installed import get_version

    try:
        return get_version("hil")
    except ModuleNotFoundError:
        return "0+source"
