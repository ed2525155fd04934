r"""Names of files as texts: what no page, address or database can hold of a name is written out.

A name is bytes to the system. Here those that are no printable text become ``\x1b``, and a backslash two; most names
stay what they are, and no two names become one.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

_WRITTEN = re.compile(rb"\\(\\|x[0-9a-f]{2})")


def said(name: str) -> str:
    """A name, or a path, as a text that can be shown, stored and sent."""
    if name.isprintable() and "\\" not in name:
        return name
    return "".join(map(_said, name))


def _said(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable():
        return character
    # Half of a surrogate pair that stands for no byte is in no name of a file.
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors=_errors(character)))


def _errors(character: str) -> str:
    return "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"


def meant(text: str) -> str:
    """The name that a text says: :func:`said` backwards."""
    if "\\" not in text:
        return text
    return os.fsdecode(_WRITTEN.sub(_byte, os.fsencode(text)))


def command_text(words: Iterable[str]) -> str:
    """A command as one types it; a shell makes the same names of it (bash and zsh know ``$'\\x1b'``)."""
    return " ".join(shlex.quote(one) if one.isprintable() else _quoted(one) for one in words)


def _quoted(word: str) -> str:
    escaped = said(word).replace("'", "\\'")
    return f"$'{escaped}'"


def _byte(found: re.Match[bytes]) -> bytes:
    return b"\\" if found[1] == b"\\" else bytes([int(found[1][1:], 16)])
