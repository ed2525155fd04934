r"""Escape file names for pages, URLs and databases.

File names are bytes. Bytes that are not printable text become ``\x1b``, and backslashes are doubled. Most names do not
change, and different names stay different.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

_WRITTEN = re.compile(rb"\\(\\|x[0-9a-f]{2})")


def said(name: str) -> str:
    """Escape a name or path, so that it can be shown, stored and sent."""
    if name.isprintable() and "\\" not in name:
        return name
    return "".join(map(_said, name))


def _said(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    # File names never contain other lone surrogates.
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors=_errors(character)))


def _errors(character: str) -> str:
    return "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"


def meant(text: str) -> str:
    """Unescape a name; the inverse of :func:`said`."""
    if "\\" not in text:
        return text
    return os.fsdecode(_WRITTEN.sub(_byte, os.fsencode(text)))


def command_text(words: Iterable[str]) -> str:
    r"""Quote a command for a shell. Unprintable names use ``$'\x1b'``, which bash and zsh support."""
    return " ".join(shlex.quote(one) if one.isprintable() else _quoted(one) for one in words)


def _quoted(word: str) -> str:
    escaped = said(word).replace("'", "\\'")
    return f"$'{escaped}'"


def _byte(found: re.Match[bytes]) -> bytes:
    return b"\\" if found[1] == b"\\" else bytes([int(found[1][1:], 16)])
