"""Telling now and then how far a long transfer has come."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 10.0


class Progress:
    """Tells how far something has come, every ten seconds: of what is done sooner nothing is heard.

    Args:
        say: told it, in a line.
        what: what goes on, such as ``pushing``.
    """

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say = say
        self._what = what
        self._told = time.monotonic()

    def at(self, done: int, total: int) -> None:
        """So many bytes of so many are done."""
        if time.monotonic() - self._told >= _EVERY_S:
            self._told = time.monotonic()
            self._say(f"{self._what}: {megabytes(done)} of {megabytes(total)}")


def megabytes(size: int) -> str:
    """A size for messages, such as ``4.7 MB``."""
    return f"{size / 1e6:.1f} MB" if size < 1e7 else f"{size / 1e6:.0f} MB"
