"""Text for whatever terminal there is: one that is not UTF-8 gets plain signs, and files are UTF-8 all the same."""

from __future__ import annotations

import codecs
import contextlib
import io
import locale
import os
import sys

_ERRORS = "hil-plain"
# One sign for one, so that columns stay columns. Whatever else there is, such as a letter of a file's name, is escaped.
_PLAIN = {
    "…": "~",
    "·": ".",
    "→": ">",
    "•": "*",
    "—": "-",
    "\N{EN DASH}": "-",
    "\N{MULTIPLICATION SIGN}": "x",
    "µ": "u",
    "\N{NO-BREAK SPACE}": " ",
}
_PLAIN |= dict.fromkeys("─━═╸╺╌┄", "-") | dict.fromkeys("│┃║", "|") | dict.fromkeys("├└┌┐┘┤┬┴┼╭╮╰╯╞╡", "+")
_PLAIN |= dict(zip("▁▂▃▄▅▆▇█", "._-=+*##", strict=True))
_SPINNER = range(0x2800, 0x2900)


def speak_any_locale() -> None:
    """Have no text end a command with a traceback, whatever the locale's encoding is.

    Files that name no encoding are UTF-8 from now on, in this process and in those of Python that it starts.
    """
    codecs.register_error(_ERRORS, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that a stream's encoding lacks."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_plain_sign, error.object[error.start : error.end])), error.end


def _plain_sign(sign: str) -> str:
    if ord(sign) in _SPINNER:
        return "."
    return _PLAIN.get(sign) or sign.encode("ascii", "backslashreplace").decode()
