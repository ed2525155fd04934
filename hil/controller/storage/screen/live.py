"""Show the output of tools while they run.

The tools are compilers, importers and references in isolated processes, which print to a log
(:mod:`hil.controller.storage.isolation.isolated`). Program workers on boards are tools too. Output is shown only if a
sink is registered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hil.core.files import open_file
from hil.core.text import TextSink

_MAX_BYTES = 1 << 20
_sinks: list[TextSink] = []


@contextlib.contextmanager
def show_output(sink: TextSink) -> Iterator[None]:
    """Pass all output of tools to ``sink``, line by line. ``sink`` may be called from any thread."""
    _sinks.append(sink)
    try:
        yield
    finally:
        _sinks.remove(sink)


def is_shown() -> bool:
    """Return True if a sink is registered."""
    return bool(_sinks)


def show(who: str, line: str) -> None:
    """Pass a line of output to the sinks."""
    for sink in list(_sinks):
        sink(f"{who} | {line}")


class LogFollower:
    """Follows a log from its current end. Each call of :meth:`show_new_lines` shows the new lines."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._at = log.stat().st_size
        self._rest = b""
        # The logs of a case are in the `logs` directory of the case.
        case = log.parent.parent.name if log.parent.name == "logs" else ""
        self._who = ": ".join(filter(None, (case, log.stem)))

    def show_new_lines(self, *, end: bool = False) -> None:
        """Show the lines that are complete. With ``end``, also show an incomplete last line."""
        with contextlib.suppress(OSError), open_file(self._log) as file:
            file.seek(self._at)
            while piece := file.read(_MAX_BYTES):
                self._at += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in lines:
                    show(self._who, line.decode(errors="replace"))
        if end and self._rest:
            show(self._who, self._rest.decode(errors="replace"))
            self._rest = b""
