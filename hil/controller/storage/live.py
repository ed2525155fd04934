"""What tools print, shown as it comes to whoever wants to see it.

These are compilers, importers and references, which run in processes of their own and print to a log
(:mod:`hil.controller.storage.isolated`), and the workers of programs on boards. Nothing is shown unless somebody asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hil.core.text import TextSink

_MOST_BYTES = 1 << 20
_sinks: list[TextSink] = []


@contextlib.contextmanager
def showing(sink: TextSink) -> Iterator[None]:
    """Have all that tools print from now on given to ``sink``, a line at a time, from any thread."""
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


def is_shown() -> bool:
    """Whether anybody wants to see it."""
    return bool(_sinks)


def show(who: str, line: str) -> None:
    """Show a line that somebody printed."""
    for sink in list(_sinks):
        sink(f"{who} | {line}")


class LogFollower:
    """Shows what is appended to a log from where it ends now on, each time that :meth:`look` is called."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = log.stat().st_size
        self._rest = b""
        # The logs of a case lie in its folder's `logs`.
        case = log.parent.parent.name if log.parent.name == "logs" else ""
        self._who = ": ".join(filter(None, (case, log.stem)))

    def look(self, *, end: bool = False) -> None:
        """Show the lines that are whole by now; at the end, what is left as well."""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._at)
            while piece := file.read(_MOST_BYTES):
                self._at += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in lines:
                    show(self._who, line.decode(errors="replace"))
        if end and self._rest:
            show(self._who, self._rest.decode(errors="replace"))
            self._rest = b""
