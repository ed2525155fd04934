"""Translate IREE's errors. IREE has no error types, so this module parses the error texts. No other module does."""

from __future__ import annotations

from hil.errors import ErrorCode, LoadFailed

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
