"""The last screen of a suite."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.storage.texts import counted, line, seconds
from hil.controller.workloads.suites.record import CaseRecord
from hil.controller.workloads.suites.reports.load import load_run
from hil.controller.workloads.suites.reports.totals import Totals, kind_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS = {"pass": "green", "fail": "red", "error": "magenta", "board": "yellow", "quiet": "dim"}
_FAILING = 20
_GROUPS = 12


def print_summary(console: Console, folder: Path) -> None:
    """Totals, failures by stage and operator, and the first 20 failing cases with the commands that repeat them.

    Args:
        console: where to.
        folder: the run's.

    Raises:
        UsageError: the folder holds no suite run.
    """
    from rich.padding import Padding
    from rich.text import Text

    run = load_run(folder)
    totals = Totals.of(run)
    words = [Text(run.title, style="bold")]
    words += [Text(f"{count} {key}", style=COLOURS[kind_of(key)]) for key, count in totals.outcomes.items()]
    if run.started is not None and run.finished is not None:
        words.append(Text(seconds(run.finished - run.started), style="dim"))
    console.print(Text("   ").join(words))
    for note in run.notes:
        console.print(Text(f"  {note}", style="yellow"))
    for note in totals.words:
        console.print(Text(f"  {note}"))
    if totals.failing:
        console.print(_groups("failed in stage", totals.by_stage))
        console.print(_groups("failed at operator", totals.by_op))
    groups = _alike(totals.failing)
    for record, others in groups[:_FAILING]:
        head = Text.assemble((record.outcome, COLOURS[kind_of(record.outcome)]), "  ", (record.id, "bold"))
        if record.confirmed:
            head.append(f"  {record.confirmed}", style="yellow")
        console.print(head)
        if record.message:
            console.print(Padding(Text(line(record.message)), (0, 0, 0, 2), expand=False))
        if record.hint:
            console.print(Padding(Text(f"hint: {line(record.hint)}"), (0, 0, 0, 2), expand=False))
        if record.repeat:
            # Unwrapped, so that it can be copied.
            console.print(Text(f"  {record.repeat}", style="cyan"), soft_wrap=True)
        if others:
            console.print(Text(f"  and {counted(others, 'case')} more for the same reason", style="dim"))
    if more := sum(1 + others for _, others in groups[_FAILING:]):
        console.print(Text(f"and {counted(more, 'failing case')} more", style="dim"))
    where, page = (shlex.quote(str(path)) for path in (folder, folder / "report.html"))
    console.print(Text(f"stored in {where}; open {page}"), soft_wrap=True)


def _alike(failing: Sequence[CaseRecord]) -> list[tuple[CaseRecord, int]]:
    """The failing cases, each with how many others it speaks for: a board that is gone fails all that were to come."""
    found: dict[object, list[CaseRecord]] = {}
    for record in failing:
        lost = kind_of(record.outcome) == "board"
        found.setdefault((record.message, record.hint) if lost else record.id, []).append(record)
    return [(alike[0], len(alike) - 1) for alike in found.values()]


def _groups(title: str, counts: Mapping[str, int]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    shown = list(counts.items())[:_GROUPS]
    told = ", ".join(f"{line(name, 40)} {count}" for name, count in shown)
    rest = sum(counts.values()) - sum(count for _, count in shown)
    table.add_row(Text(f"  {title}", style="dim"), Text(told + (f", others {rest}" if rest else "")))
    return table
