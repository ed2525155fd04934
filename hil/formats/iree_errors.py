"""Translate IREE's errors. IREE has no error types, so this module parses the error texts. No other module does."""

from __future__ import annotations

import re

from hil.errors import ErrorCode, LoadFailed

# Text about the device that a program was compiled for: ``#hal.device.target<"cuda", [...``.
_MISSING_DEVICE = re.compile(r'HAL device `\w+` not found or unavailable: #hal\.device\.target<"([\w-]+)"')
_WRONG_TARGET = ("INCOMPATIBLE", "no executable")


def load_error(message: str, text: str, *, detail: str = "") -> LoadFailed:
    """Return the error for a program that IREE failed to load.

    Args:
        text: IREE's error text.
    """
    if any(part in text for part in _WRONG_TARGET):
        hint = "the program was compiled for a different CPU or device: check the board's compile flags"
        return LoadFailed(message, hint=hint, detail=detail, code=ErrorCode.WRONG_TARGET)
    return LoadFailed(message, detail=detail)


def find_missing_device(text: str) -> str:
    """Return the device that a program was compiled for, if IREE's error says that this device is missing; else ""."""
    found = _MISSING_DEVICE.search(text)
    return found[1] if found else ""
