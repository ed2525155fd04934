"""Print the result of `hil bisect --over`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hil.controller.records.decisions.stack_search import StackSearchRecord
from hil.controller.storage.screen.texts import line, make_table
from hil.controller.workloads.stack_search.verdict import get_version

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"pass": "green", "fail": "red", "unstable": "red"}
# Width for output to a file or a pipe, which is not wrapped.
_UNBOUNDED = 1000


def print_search(console: Console, found: StackSearchRecord) -> None:
    """Print a row for every board, and the verdict."""
    from rich.text import Text

    if not console.is_terminal:
        console.width = _UNBOUNDED
    heads = ["board", *([found.over] if found.over != "board" else []), "answer", "runs", "reason"]
    rows = []
    for one in found.boards:
        version = [line(get_version(one, found.over)) or "unknown"] if found.over != "board" else []
        answer = Text(one.answer, style=_STYLES.get(one.answer, "yellow"))
        rows.append([line(one.name or one.request), *version, answer, str(len(one.runs)), line(one.reason)])
    console.print(make_table(heads, rows, numbers=("runs",), whole=("answer",), gap=2))
    style = "bold green" if found.exit_code == 0 else "bold red"
    console.print(found.verdict, style=style, markup=False, highlight=False, soft_wrap=True)
    if found.hint:
        console.print(f"hint: {found.hint}", markup=False, highlight=False, soft_wrap=True)
