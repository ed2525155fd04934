"""Names in the locations of MLIR's operations, as text."""

from __future__ import annotations

import re

# `"fc1"`, and `"model.mlir":12:3`, which is a place in a file.
_PART = re.compile(r'"(?P<name>(?:[^"\\]|\\.)*)"(?::(?P<line>\d+):\d+(?: to (?::\d+)?:\d+)?)?')
_ESCAPE = re.compile(rb'\\([0-9A-Fa-f]{2}|["\\nt])')
_LETTERS = {b"n": b"\n", b"t": b"\t", b'"': b'"', b"\\": b"\\"}


def names_in(location: str) -> list[str]:
    """What ``loc("fc1")``, ``loc(fused["a", "b"])`` or ``loc("model.mlir":12:3)`` name, in order, each once.

    A place in a file is told as ``line 12``, and left out where there is a name besides.
    """
    names: dict[str, None] = {}
    lines: dict[str, None] = {}
    for part in _PART.finditer(location):
        if part["line"]:
            lines[f"line {part['line']}"] = None
        else:
            names[_plain(part["name"])] = None
    return list(names or lines)


def _plain(text: str) -> str:
    def letter(match: re.Match[bytes]) -> bytes:
        return _LETTERS.get(match[1]) or bytes.fromhex(match[1].decode())

    return _ESCAPE.sub(letter, text.encode()).decode(errors="replace")
