"""Parse the table ``[peak]`` of a board config: peaks from the data sheet of a board.

::

    [peak]
    f32_gflops = 102.4
    int8_gops = 409.6
    memory_gb_s = 12.8
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hil.core.config_keys import make_key
from hil.core.config_values import reject_key
from hil.errors import UsageError

# Billions per second.
_LEAST, _MOST = 1e-6, 1e11


@dataclass(frozen=True)
class PeakConfig:
    """Peaks of a data sheet; 0 if unknown. hil uses them only without measured peaks, and labels them."""

    f32_gflops: float = make_key(0.0, "Billions of float32 operations per second.", unset="unknown")
    f16_gflops: float = make_key(0.0, "Billions of float16 operations per second.", unset="unknown")
    int8_gops: float = make_key(0.0, "Billions of int8 operations per second.", unset="unknown")
    memory_gb_s: float = make_key(0.0, "Billions of bytes per second of the memory.", unset="unknown")


def parse_peak(table: Mapping[str, Any], where: str) -> PeakConfig:
    """Parse the table. Raises UsageError for an unknown key or a value that is not a positive number."""
    known = [one.name for one in fields(PeakConfig)]
    for key, value in table.items():
        if key not in known:
            reject_key(where, key, known)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST <= value <= _MOST:
            raise UsageError(f"{where} {key} must be a number from {_LEAST:g} to {_MOST:g}")
    return PeakConfig(**{key: float(value) for key, value in table.items()})
