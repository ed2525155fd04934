"""Tables of operations: a name, and columns that fit the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

# Titles of the names, by the values of --by.
TITLES = {"op": "operation", "node": "ONNX nodes", "type": "operator types"}
_MIN_NAME_WIDTH = 16


@dataclass(frozen=True)
class ProfileColumn:
    """Column of a table. If the console is not wide enough, the columns with the highest rank are omitted first."""

    title: str
    cells: Sequence[RenderableType]
    rank: int


def make_named_table(
    console: Console, title: str, names: Sequence[Text], columns: Sequence[ProfileColumn], *, sections: int = 0
) -> Table:
    """Make a table with names and numbers, and leave out columns that do not fit the console.

    Args:
        sections: draw a line below the first ``sections`` rows, if the table has more rows.
    """
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    def measure_width(cells: Sequence[RenderableType]) -> int:
        return max((Measurement.get(console, console.options, cell).maximum for cell in cells), default=0)

    least = min(measure_width([title, *names]), _MIN_NAME_WIDTH)
    shown = list(columns)
    while shown and least + sum(1 + measure_width([column.title, *column.cells]) for column in shown) > console.width:
        shown.remove(max(shown, key=lambda column: column.rank))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    table.add_column(title, overflow="fold", min_width=least)
    for column in shown:
        table.add_column(column.title, justify="right", no_wrap=True)
    for number, name in enumerate(names):
        cells = [column.cells[number] for column in shown]
        table.add_row(name, *cells, end_section=number < sections and len(names) > sections)
    return table
