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


def escape_name(name: str) -> str:
    """Escape a name or path, so that it can be shown, stored and sent."""
    if name.isprintable() and "\\" not in name:
        return name
    return "".join(map(_escape_character, name))


def _escape_character(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    # File names never contain other lone surrogates.
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors=_choose_error_handler(character)))


def _choose_error_handler(character: str) -> str:
    return "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"


def unescape_name(text: str) -> str:
    """Unescape a name; the inverse of :func:`escape_name`."""
    if "\\" not in text:
        return text
    return os.fsdecode(_WRITTEN.sub(_unescape_byte, os.fsencode(text)))


def quote_command(words: Iterable[str]) -> str:
    r"""Quote a command for a shell. Unprintable names use ``$'\x1b'``, which bash and zsh support."""
    return " ".join(shlex.quote(one) if one.isprintable() else _quote_unprintable(one) for one in words)


def _quote_unprintable(word: str) -> str:
    escaped = escape_name(word).replace("'", "\\'")
    return f"$'{escaped}'"


def _unescape_byte(found: re.Match[bytes]) -> bytes:
    return b"\\" if found[1] == b"\\" else bytes([int(found[1][1:], 16)])
