"""Texts that others made (a tool's words, names of models) put so that any report can hold them."""

from __future__ import annotations

import re

from hil.core.text import visible

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# What XML 1.0 cannot hold: control characters, halves of surrogate pairs, two non-characters. No reader misses them.
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def plain(text: str) -> str:
    """The text without a terminal's colours and without characters that XML cannot hold; others are made visible."""
    return visible(_UNPRINTABLE.sub("", _ESCAPES.sub("", text)))


def line(text: str, longest: int = 300) -> str:
    """The text in one line, its end left out where it is longer than so many characters."""
    words = " ".join(plain(text).split())
    return words if len(words) <= longest else f"{words[: longest - 1]}…"


def shortened(text: str, longest: int = 4000) -> str:
    """The text with its middle left out where it is longer: tools tell of trouble at the beginning or at the end."""
    text = plain(text).strip()
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def seconds(value: float | None) -> str:
    """Seconds for people: ``850 us``, ``12.3 ms``, ``4.56 s``, ``2 min 05 s``; "-" for None."""
    if value is None:
        return "-"
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.0f} ns" if value else "0 s"


def counted(count: int, what: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{count} {what}{'' if count == 1 else 's'}"
