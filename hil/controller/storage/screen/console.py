"""Console for all output of hil, with colors and layout. Control characters in texts become visible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.segment import Segment

from hil.core.text import VisibleStream, escape_controls

# Console width for output without a terminal: wider than any table row.
_UNLIMITED = 4000


class Console(rich.console.Console):
    """rich's console with visible control characters (see :func:`hil.core.text.escape_controls`).

    Names such as ``:snake:`` are not replaced by emoji.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments to print. rich's control codes are not changed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)

    @property
    def file(self) -> IO[str]:
        """The output stream. A VisibleStream is unwrapped, because this console already escapes control characters."""
        found = super().file
        return found.own if isinstance(found, VisibleStream) else found

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        rich.console.Console.file.fset(self, new_file)  # type: ignore[attr-defined]


def make_table_console() -> Console:
    """Return a console for tables: as wide as the terminal, or unlimited if stdout is not a terminal."""
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=_UNLIMITED)
