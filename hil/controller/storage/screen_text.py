"""Text on a terminal: a number and its unit stay in one line, and what is to be copied is never cut."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Stands for a space at which no line is broken: rich breaks lines at every kind of space that there is. It is as wide
# as one, in a range that no text uses, and never comes to the terminal.
_GLUE = "\ue000"
_UNIT = re.compile(r"(?<=\d) (?=(?:[nmu]?s|min|h|bytes|[kKMG]i?B|B|dB|[kMG]?Hz|%|[KMG]?op/s)(?![\w]))")


def together(text: str) -> str:
    """A text, for :func:`show`, that stays in one line."""
    return text.replace(" ", _GLUE)


def show(console: Console, what: RenderableType) -> None:
    """Print; no line is broken within :func:`together`, nor between a number of :func:`units` and its unit."""
    with console.capture() as shown:
        console.print(what, highlight=False)
    console.file.write(shown.get().replace(_GLUE, " "))


def units(text: str) -> str:
    """A text, for :func:`show`, whose numbers stay beside their units."""
    return _UNIT.sub(_GLUE, text)


def say(
    console: Console, label: str, text: str, *, style: str = "", indent: int = 2, width: int = 13, whole: bool = False
) -> None:
    """A labelled line; what does not fit goes on below the text, not below the label.

    Args:
        console: where to.
        label: stands before it; "" is none, and no room for one either.
        text: what is said.
        style: the text's.
        indent: spaces before the line.
        width: the label's.
        whole: never break the line, for it may hold a command to be copied: the terminal itself wraps it.
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    if whole:
        console.print(Text(" " * indent + (f"{label:<{width}}" if label else "")).append(text, style), soft_wrap=True)
        return
    line = Table.grid(padding=0)
    if label:
        line.add_column(width=width)
    line.add_column(overflow="fold")
    body = Text(units(text), style=style)
    line.add_row(label, body) if label else line.add_row(body)
    show(console, Padding(line, (0, 0, 0, indent), expand=False))
