"""Make text safe for terminals, and values safe for JSON.

Model names, board errors, a worker's stderr or another user's text may contain escape sequences. These
could set the terminal's title, clear the screen, or overwrite earlier text.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

TextSink = Callable[[str], None]
"""Receives a progress line for the user."""

# Control characters (C0, DEL, C1) except line ends and tabs; invisible characters that change the text direction or end
# lines; lone surrogates.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]",
)
_PARAMETERS = r"(?:(?<=[?&]token=)|(?<=[?&]password=)|(?<=[?&]sslpassword=))[^&\s'\"]+"
# Logins in URLs: with a user and a password, and with any text, which can also be a token.
_PASSWORDS = re.compile(rf"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)|{_PARAMETERS}")
_LOGINS = re.compile(rf"(?<=://)[^/@\s]+(?=@)|{_PARAMETERS}")
HIDDEN = "***"


def hide_logins(text: str) -> str:
    """Return the text with ``***`` instead of the logins, tokens and passwords in URLs."""
    return _LOGINS.sub(HIDDEN, text)


def hide_passwords(text: str) -> str:
    """Return the text with ``***`` instead of logins with a password, tokens and passwords in URLs."""
    return _PASSWORDS.sub(HIDDEN, text)


def escape_controls(text: str) -> str:
    r"""Return the text with control characters escaped, such as ``\x1b``."""
    return _OBEYED.sub(_escape_control, text.replace("\r\n", "\n"))


def _escape_control(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


class VisibleStream:
    """Text stream that applies :func:`escape_controls` to all output."""

    def __init__(self, own: TextIO) -> None:
        self.own = own

    def write(self, text: str | bytes) -> int:
        """Write a text and return its length. click writes bytes for shell completion."""
        self.own.write(escape_controls(text.decode(errors="replace") if isinstance(text, bytes) else text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write multiple texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # click would bypass this class
            raise AttributeError(name)
        return getattr(self.own, name)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates with question marks. SQLite, protobuf and web pages cannot encode surrogates."""
    return text.encode(errors="replace").decode()


def show_visibly() -> None:
    """Apply :func:`escape_controls` to this process's stdout and stderr."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, VisibleStream(stream))


def convert_to_json(value: Any) -> Any:
    """Convert a value to JSON types. NaN, inf and bytes become strings; tuples become lists."""
    # Int includes bool; checked first because these types are most common.
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): convert_to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [convert_to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return convert_to_json(value.item())
    return str(value)


def make_names_unique(names: Sequence[str], *, alike: Callable[[str], str] = str) -> list[str]:
    """Make names unique: a duplicate becomes ``NAME-2``.

    Names are duplicates if ``alike`` returns the same value for them.
    """
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
