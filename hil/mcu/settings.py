"""Settings of the agent for a microcontroller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hil.core.chips import Chip, parse_chip


@dataclass(frozen=True)
class ChipSettings:
    """Line, chip and commands of a microcontroller."""

    address: str
    chip: Chip
    flash: tuple[str, ...] = ()  # command; ``{elf}`` and ``{bin}`` are the files
    reset: tuple[str, ...] = ()
    boot_s: float = 10.0
    watchdog_s: float = 60.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ChipSettings:
        """Return the settings from the runtime options. Raises UsageError for an invalid chip."""
        return cls(
            values["address"],
            parse_chip(values["chip"]),
            tuple(values["flash"]),
            tuple(values["reset"]),
            values["boot_s"],
            values["watchdog_s"],
        )
