"""Check names and texts in bundles. The C verifier (verifier/names.c) has the same rules."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import PurePosixPath

# Ranges of characters that are invisible or change how other characters are displayed: controls, formats (including
# text direction), spaces except " ", surrogates, private use. The list is explicit because Python's character data
# depends on the Python version.
HIDDEN = (
    *((0x00, 0x1F), (0x7F, 0xA0), (0xAD, 0xAD), (0x600, 0x605), (0x61C, 0x61C), (0x6DD, 0x6DD), (0x70F, 0x70F)),
    *((0x890, 0x891), (0x8E2, 0x8E2), (0x1680, 0x1680), (0x180E, 0x180E), (0x2000, 0x200F), (0x2028, 0x202F)),
    *((0x205F, 0x206F), (0x3000, 0x3000), (0xD800, 0xF8FF), (0xFDD0, 0xFDEF), (0xFEFF, 0xFEFF), (0xFFF9, 0xFFFB)),
    *((0x110BD, 0x110BD), (0x110CD, 0x110CD), (0x13430, 0x1343F), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A)),
    *((0xE0000, 0xE007F), (0xF0000, 0x10FFFF)),
)
_FIRSTS = [first for first, _ in HIDDEN]


def is_shown(text: str) -> bool:
    """Return True if all characters of a text are visible."""
    if text.isascii():
        return text.isprintable()
    return not any(map(_is_hidden, map(ord, text)))


def _is_hidden(code: int) -> bool:
    place = bisect_right(_FIRSTS, code) - 1
    return (place >= 0 and code <= HIDDEN[place][1]) or code & 0xFFFE == 0xFFFE


def can_coexist(names: Iterable[str]) -> bool:
    """Return True if files with these names can coexist in a directory, even on case-insensitive file systems.

    Only the case of ASCII letters is ignored. For other letters, extraction fails instead of overwriting a file.
    """
    folded = ["".join(char.lower() if char.isascii() else char for char in name) for name in names]
    folders = {str(parent) for name in folded for parent in PurePosixPath(name).parents}
    return len(set(folded)) == len(folded) and not folders & set(folded)
