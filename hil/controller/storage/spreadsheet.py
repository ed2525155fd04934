"""Text of others in a CSV file: a spreadsheet shows it, and runs nothing."""

from __future__ import annotations


def as_text(text: str) -> str:
    """The text; one that begins like a formula is marked as a text, as spreadsheets themselves do it."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
