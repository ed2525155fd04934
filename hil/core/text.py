"""Text for terminals and for JSON: control characters are written out, and values become ones that JSON has.

A model's name, a board's error, a worker's stderr or another user's purpose may hold escape sequences, which would set
the terminal's title, clear it, or rewrite what is on it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

TextSink = Callable[[str], None]
"""Takes a line that tells a person what goes on."""

# Control characters but for line ends and tabs (C0, DEL, C1), what turns the direction of writing or ends a line
# unseen, and halves of surrogate pairs.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]",
)


def visible(text: str) -> str:
    r"""The text with whatever a terminal obeys written out, such as ``\x1b``."""
    return _OBEYED.sub(_written_out, text.replace("\r\n", "\n"))


def _written_out(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


class VisibleStream:
    """A text stream that makes all it is given :func:`visible`."""

    def __init__(self, own: TextIO) -> None:
        self.own = own

    def write(self, text: str) -> int:
        """Write a text; returns how many characters it had."""
        self.own.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would write to it, around this
            raise AttributeError(name)
        return getattr(self.own, name)


def show_visibly() -> None:
    """Have all that this process writes to stdout and stderr made :func:`visible`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, VisibleStream(stream))


def jsonable(value: Any) -> Any:
    """The value with what JSON does not know made into texts (NaN, inf, bytes) and lists."""
    if value is None or isinstance(value, (str, int)):  # bool too; first, since it is most of what there is
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return jsonable(value.item())
    return str(value)


def numbered(names: Sequence[str], *, alike: Callable[[str], str] = str) -> list[str]:
    """Names that differ: the second of one name is called ``NAME-2``; ``alike`` tells which are one name."""
    taken: set[str] = set()
    found = []
    for name in names:
        again, one = 1, name
        while alike(one) in taken:
            again += 1
            one = f"{name}-{again}"
        taken.add(alike(one))
        found.append(one)
    return found
