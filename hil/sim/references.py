"""References to simulated runtimes. The agent passes them to fork servers and imports no runtime itself."""

from __future__ import annotations

# Prefix of a runtime's name, so that no name matches another attribute of the module.
PREFIX = "runtime."


def make_reference(runtime: str) -> str:
    """Return the ``module:name`` reference of a runtime on a simulated board, for :mod:`hil.sim.runtime`."""
    return f"hil.sim.runtime:{PREFIX}{runtime}"
