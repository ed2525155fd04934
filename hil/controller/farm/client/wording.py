"""Format farm values for display."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hil.controller.farm.messages import STACK_LABEL
from hil.controller.farm.selector import format_value, quote_label

# Seconds per unit.
UNITS = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
_OWN_COLUMN = ("name", "site", "host", "hw_type")
_BYTES = ("mem", "memory", "disk")
# Technical labels, hidden in board tables by default. Selectors can use them.
_DETAILS = ("agent", "devices", "features", "kernel", "libc", "system")


def format_labels(labels: Mapping[str, Any], wide: bool = False) -> str:
    """Return labels in selector syntax: ``chip=a53 gpu mem=2GiB runtimes=iree,onnxruntime``.

    Args:
        wide: include technical labels.
    """

    def format_label(name: str, value: Any) -> str:
        if value is True:
            return name
        if not isinstance(value, (list, tuple)):
            return f"{name}={quote_label(format_value(value, ('1B',) if name in _BYTES else ()))}"
        return f"{name}={','.join(quote_label(format_value(each)) for each in value)}"

    left_out = _OWN_COLUMN if wide else (*_OWN_COLUMN, *_DETAILS)
    shown = {
        name: value
        for name, value in sorted(labels.items())
        if name not in left_out and (wide or not name.startswith(STACK_LABEL))
    }
    return " ".join(format_label(name, value) for name, value in shown.items())


def format_duration(seconds: float) -> str:
    """Format a duration: ``0.02s``, ``12s``, ``4m10s``, ``3h05m``, ``2d04h``."""
    if seconds < 10:
        return f"{max(seconds, 0.0):.2f}s"
    whole = round(seconds)
    for big, small in (("d", "h"), ("h", "m"), ("m", "s")):
        if whole >= UNITS[big]:
            return f"{whole // UNITS[big]}{big}{whole % UNITS[big] // UNITS[small]:02d}{small}"
    return f"{whole}s"
