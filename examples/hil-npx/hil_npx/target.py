"""Choose the compiler's flags for a board."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hil.plugins import Target

# Boards with this architecture have the large chip.
_LARGE = ("x86_64", "aarch64")


def choose_target(machine: Mapping[str, Any]) -> Target:
    """Return the target for a board's description (`hil board info --json`, `machine`)."""
    lanes = 16 if machine.get("arch") in _LARGE else 4
    return Target((f"--npx-lanes={lanes}",), f"npx with {lanes} lanes", arch="npx")
