"""Texts for reports and terminals: what others wrote made plain, and lines that break where they should."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hil.core.text import visible
from hil.errors import HilError

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType
    from rich.table import Table


_ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])"
# What XML 1.0 cannot hold: control characters, halves of surrogate pairs, two non-characters. No reader misses them.
# Compiling this takes as long as importing ten modules: `re` does it when it is first used, and keeps it.
_UNPRINTABLE = "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


def plain(text: str) -> str:
    """The text without a terminal's colours and without characters that XML cannot hold; others are made visible."""
    return visible(re.sub(_UNPRINTABLE, "", re.sub(_ESCAPES, "", text)))


def line(text: str, longest: int = 300) -> str:
    """The text in one line, its end left out where it is longer than so many characters."""
    words = " ".join(plain(text).split())
    return words if len(words) <= longest else f"{words[: longest - 1]}…"


def shortened(text: str, longest: int = 4000) -> str:
    """The text with its middle left out where it is longer: tools tell of trouble at the beginning or at the end."""
    text = plain(text).strip()
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def seconds(value: float | None) -> str:
    """Seconds for people: ``850 us``, ``12.3 ms``, ``4.56 s``, ``2 min 05 s``; "-" for None."""
    if value is None:
        return "-"
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns" if value else "0 s"


def counted(count: int, what: str) -> str:
    """``1 case``, ``2 cases``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def as_text(text: str) -> str:
    """The text; one that begins like a formula is marked as a text, as spreadsheets themselves do it."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def unique_name(base: str, taken: set[str], first: int = 1) -> str:
    """The name or, where it is taken, the first ``NAME_1``, ``NAME_2``, ... that is not; it is taken then."""
    numbers = itertools.count(first)
    name = base
    while name in taken:
        name = f"{base}_{next(numbers)}"
    taken.add(name)
    return name


# What importing torchvision or torchaudio says beside a torch that it was not built for; no error of its own tells it.
_OTHER_TORCH = r"operator (torchvision|torchaudio)::\w+ does not exist"


def first_line(error: BaseException, most: int = 300) -> str:
    """The first line that says something, cut to ``most`` characters; the error's kind where none does."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line[:most] for line in lines if line), type(error).__name__)


@contextlib.contextmanager
def foreign_errors(
    failure: Callable[..., HilError], what: str, *, error_text: Callable[[Exception], str] = first_line, hint: str = ""
) -> Iterator[None]:
    """Turn whatever a framework raises into one of hil's errors, ``WHAT: its words``; hil's own errors pass."""
    try:
        yield
    except HilError:
        raise
    except Exception as error:  # frameworks have many, and what a model calls may raise any
        raise failure(f"{what}: {error_text(error)}", hint=hint, detail=f"{type(error).__name__}: {error}") from error


def import_hint(error: Exception) -> str:
    """What to do about a package that cannot be imported; "" where nothing is known."""
    if found := re.search(_OTHER_TORCH, str(error)):
        return (
            f"the {found[1]} here was built for another torch than the one beside it (PyPI's is for CUDA): "
            "install both from the index of CPU builds that PyTorch's installation page names"
        )
    return f"pip install {error.name.partition('.')[0]}" if isinstance(error, ImportError) and error.name else ""


# Stands for a space at which no line is broken: rich breaks lines at every kind of space that there is. It is as wide
# as one, is assigned to no character, stands among those that rich measures without its tables of widths (3 ms to
# import), and never comes to the terminal.
_GLUE = "\u0378"
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


# A terminal that is too narrow for more breaks the lines itself.
_ROOM_LEAST = 20


def say(
    console: Console, label: str, text: str, *, style: str = "", indent: int = 2, width: int = 13, whole: bool = False
) -> None:
    """A labelled line; what does not fit goes on below the text, not below the label.

    Args:
        label: stands before it; "" is none, and no room for one either.
        whole: never break the line, for it may hold a command to be copied: the terminal itself wraps it.
    """
    from rich.text import Text

    head = " " * indent + (f"{label:<{width}}" if label else "")
    if whole:
        console.print(Text(head).append(text, style), soft_wrap=True)
        return
    room = max(console.width - len(head), _ROOM_LEAST)
    # A table of one row would do the same, and take 0.2 ms: a case has some lines, and a run may have many cases.
    for shown in Text(units(text), style=style).wrap(console, room, overflow="fold"):
        shown.plain = shown.plain.rstrip().replace(_GLUE, " ")
        console.print(Text(head).append_text(shown), soft_wrap=True)
        head = " " * len(head)


def aligned(rows: Sequence[Sequence[str]], *, left: int, gap: int = 2) -> Iterator[str]:
    """Lines of rows whose columns stand below each other: so many aligned to the left, all others to the right."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        blanks = [" " * (width - cell_len(cell)) for width, cell in zip(widths, row, strict=True)]
        padded = [cell + blank for cell, blank in zip(row[:left], blanks, strict=False)]
        padded += [blank + cell for cell, blank in zip(row[left:], blanks[left:], strict=True)]
        yield (" " * gap).join(padded).rstrip()


def table(
    heads: Sequence[str],
    rows: Iterable[Iterable[Any]],
    *,
    numbers: Collection[str] = (),
    whole: Collection[str] = (),
    gap: int = 2,
) -> Table:
    """Rows in aligned columns; a cell that does not fit is folded.

    Args:
        heads: what stands above the columns; if all are "", nothing does.
        rows: texts, which are shown as they are (no markup), or what rich can print.
        numbers: heads of columns that are aligned to the right and never folded.
        whole: heads of other columns that are never folded.
        gap: blanks between two columns.
    """
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", show_header=any(heads))
    for head in heads:
        justify: JustifyMethod = "right" if head in numbers else "left"
        if head in numbers or head in whole:
            made.add_column(head, justify=justify, no_wrap=True)
        else:
            made.add_column(Text(head, overflow="ellipsis"), overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made
