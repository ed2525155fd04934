"""Format texts for reports and terminals: sanitize untrusted text, and control line breaks."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hil.core.text import escape_controls
from hil.errors import HilError

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType
    from rich.table import Table


_ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])"
# Characters that XML 1.0 forbids: control characters, surrogates, two noncharacters. Compiling this pattern takes as
# long as importing ten modules, so `re` compiles and caches it at the first use.
_UNPRINTABLE = "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


def make_plain(text: str) -> str:
    """Remove terminal colors and characters that XML forbids, and make other control characters visible."""
    return escape_controls(re.sub(_UNPRINTABLE, "", re.sub(_ESCAPES, "", text)))


def line(text: str, longest: int = 300) -> str:
    """Return the text as a single line, truncated to ``longest`` characters."""
    words = " ".join(make_plain(text).split())
    return words if len(words) <= longest else f"{words[: longest - 1]}…"


def shorten(text: str, longest: int = 4000) -> str:
    """Shorten a text in the middle, because tools report errors at the start or the end."""
    text = make_plain(text).strip()
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters omitted ...\n{text[-half:]}"


# Numbers from this share of a unit round to the whole unit with three digits: 999.6 us is "1 ms", not "1e+03 us".
ROUNDS_UP = 0.9995


def format_seconds(value: float | None, digits: int = 3) -> str:
    """Format seconds: ``850 us``, ``12.3 ms``, ``4.56 s``, ``2 min 05 s``; "-" for None."""
    rounds_up = 1 - 0.5 * 10.0**-digits
    if value is None:
        return "-"
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60):02d} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size * rounds_up:
            return f"{value / size:.{digits}g} {unit}"
    return f"{value * 1e9:.{digits}g} ns" if value else "0 s"


_MIN_JOULES = 1e-12


def format_joules(value: float, digits: int = 3) -> str:
    """Format an energy: ``1.25 J``, ``850 uJ``. The energy above idle may be negative by noise.

    An energy below a picojoule is an error of rounding: ``0 J``.
    """
    size = abs(value)
    if size < _MIN_JOULES:
        return "0 J"
    for unit, scale in (("J", 1.0), ("mJ", 1e-3), ("uJ", 1e-6)):
        if size >= scale * (1 - 0.5 * 10.0**-digits):
            return f"{value / scale:.{digits}g} {unit}"
    return f"{value * 1e9:.{digits}g} nJ"


def format_count(count: int, what: str) -> str:
    """Format a count: ``1 case``, ``2 cases``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def as_text(text: str) -> str:
    """Prefix a text that looks like a formula with an apostrophe, so that spreadsheets treat it as text."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def make_unique_name(base: str, taken: set[str], first: int = 1) -> str:
    """Return the name or, if taken, the first free ``NAME_1``, ``NAME_2``, ... The result is added to ``taken``."""
    numbers = itertools.count(first)
    name = base
    while name in taken:
        name = f"{base}_{next(numbers)}"
    taken.add(name)
    return name


# Error text of a torchvision or torchaudio that was built for a different torch. The error has no specific exception
# type.
_OTHER_TORCH = r"operator (torchvision|torchaudio)::\w+ does not exist"


def get_first_line(error: BaseException, most: int = 300) -> str:
    """Return the first non-empty line of an error, cut to ``most`` characters, or the error's type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line[:most] for line in lines if line), type(error).__name__)


@contextlib.contextmanager
def convert_foreign_errors(
    failure: Callable[..., HilError],
    what: str,
    *,
    error_text: Callable[[Exception], str] = get_first_line,
    hint: str = "",
) -> Iterator[None]:
    """Convert all errors of a framework to an error of hil, ``WHAT: MESSAGE``. Errors of hil are not converted."""
    try:
        yield
    except HilError:
        raise
    except Exception as error:  # frameworks have many error types, and code in a model may raise any
        raise failure(f"{what}: {error_text(error)}", hint=hint, detail=f"{type(error).__name__}: {error}") from error


def import_hint(error: Exception) -> str:
    """Return a hint for a package that cannot be imported; "" if none is known."""
    if found := re.search(_OTHER_TORCH, str(error)):
        return (
            f"{found[1]} was built for a different torch than the installed one (PyPI's is for CUDA): install both "
            "from the CPU package index on PyTorch's installation page"
        )
    return f"pip install {error.name.partition('.')[0]}" if isinstance(error, ImportError) and error.name else ""


# Placeholder for a space without line break, because rich breaks lines at every kind of space. Before printing, hil
# replaces the placeholder by a space. The placeholder is an unassigned character that is as wide as a space. rich
# measures this character without its width tables, which take 3 ms to import.
_GLUE = "\u0378"
_UNIT = re.compile(r"(?<=\d) (?=(?:[nmu]?s|min|h|bytes|[kKMG]i?B|B|dB|[kMG]?Hz|%|[KMG]?op/s)(?![\w]))")


def keep_together(text: str) -> str:
    """Return a text for :func:`show` without line breaks."""
    return text.replace(" ", _GLUE)


def show(console: Console, what: RenderableType) -> None:
    """Print a text. Do not break lines inside :func:`keep_together` texts.

    In :func:`keep_units` texts, do not break lines between numbers and units.
    """
    with console.capture() as shown:
        console.print(what, highlight=False)
    console.file.write(shown.get().replace(_GLUE, " "))


def keep_units(text: str) -> str:
    """Return a text for :func:`show` that keeps numbers and units on the same line."""
    return _UNIT.sub(_GLUE, text)


# Minimum width of a text. Narrower terminals break the lines themselves.
_MIN_TEXT_WIDTH = 20


def print_labelled(
    console: Console, label: str, text: str, *, style: str = "", indent: int = 2, width: int = 13, whole: bool = False
) -> None:
    """Print a labelled line. Continuation lines are aligned with the text.

    Args:
        label: Printed before the text; "" omits the label and the column.
        whole: Never break the line, because it may contain a command to copy. The terminal wraps the line.
    """
    from rich.text import Text

    head = " " * indent + (f"{label:<{width}}" if label else "")
    if whole:
        console.print(Text(head).append(text, style), soft_wrap=True)
        return
    room = max(console.width - len(head), _MIN_TEXT_WIDTH)
    # Do not use a one-row table. It has the same effect but takes 0.2 ms, and a run may have many lines.
    for shown in Text(keep_units(text), style=style).wrap(console, room, overflow="fold"):
        shown.plain = shown.plain.rstrip().replace(_GLUE, " ")
        console.print(Text(head).append_text(shown), soft_wrap=True)
        head = " " * len(head)


def align_rows(rows: Sequence[Sequence[str]], *, left: int, gap: int = 2) -> Iterator[str]:
    """Yield rows as lines with aligned columns: the first ``left`` columns left-aligned, the others right-aligned."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        blanks = [" " * (width - cell_len(cell)) for width, cell in zip(widths, row, strict=True)]
        padded = [cell + blank for cell, blank in zip(row[:left], blanks, strict=False)]
        padded += [blank + cell for cell, blank in zip(row[left:], blanks[left:], strict=True)]
        yield (" " * gap).join(padded).rstrip()


def make_table(
    heads: Sequence[str],
    rows: Iterable[Iterable[Any]],
    *,
    numbers: Collection[str] = (),
    whole: Collection[str] = (),
    gap: int = 2,
) -> Table:
    """Return a table with aligned columns. Cells that do not fit are folded.

    Args:
        heads: Column headings; no heading row if all are "".
        rows: Cells: texts, which are printed without markup, or rich renderables.
        numbers: Headings of columns that are right-aligned and never folded.
        whole: Headings of other columns that are never folded.
        gap: Spaces between columns.
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


def format_score(value: float | str | None, is_share: bool, sign: str = "") -> str:
    """Return a score as text, shares in percent.

    Args:
        value: a number, "inf", "-inf", "nan", or None if unknown.
        sign: "+" to show the sign of positive numbers.
    """
    if value is None:
        return "-"
    return f"{100 * float(value):{sign}.2f} %" if is_share else f"{float(value):{sign}.6g}"
