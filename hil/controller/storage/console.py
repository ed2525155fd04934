"""The one console that hil prints with: colours and layout are its own, and the text in them is made visible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.segment import Segment

from hil.core.text import VisibleStream, visible

# Wider than any line of a table.
_UNLIMITED = 4000


class Console(rich.console.Console):
    """rich's console, which shows what a terminal would obey in a text (see :func:`hil.core.text.visible`).

    A name with ``:snake:`` in it is no emoji.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of what is to be printed; of rich's own control codes nothing is changed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    @property
    def file(self) -> IO[str]:
        """Where to: the stream itself, for what this console writes is visible already."""
        found = super().file
        return found.own if isinstance(found, VisibleStream) else found

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file


def table_console() -> Console:
    """The console for tables: as wide as the terminal; as wide as they need where stdout is none."""
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=_UNLIMITED)
