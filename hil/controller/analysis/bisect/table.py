"""A bisection on the terminal: a line a layer, what could not be run and why, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hil.controller.analysis.bisect.result import WAYS, Bisection, Finding, listed
from hil.core.results import Outcome

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.BLIND: "yellow", Outcome.SKIP: "dim"}
_REASONS_SHOWN = 10
# A terminal below this many columns has no room for operators and nodes: a layer's name tells both, if shortened.
_ROOMY = 110
# The least that a layer's name has: before it gets less, numbers are left out.
_NAME_LEAST = 14
_NUMBERS = {"max abs": 8, "SQNR dB": 7}
# What nobody looks at in a terminal needs no wrapping.
_UNBOUNDED = 1000


def print_bisection(console: Console, found: Bisection) -> None:
    """Print the table, the reasons and the verdict."""
    from rich.table import Table
    from rich.text import Text

    ways = [way for way in WAYS if any(layer.by(way) for layer in found.layers)]
    if not console.is_terminal:
        console.width = _UNBOUNDED
    roomy = console.width >= _ROOMY
    numbers = _fitting(console.width, found, ways)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("depth", justify="right", no_wrap=True)
    table.add_column("layer", overflow="fold", min_width=_NAME_LEAST)
    if roomy:
        table.add_column("op", overflow="fold")
        table.add_column("nodes", overflow="fold")
    for way in ways:
        table.add_column(way, no_wrap=True)
        for title in numbers:
            table.add_column(title, justify="right", no_wrap=True)
    for layer in found.layers:
        cells: list[Any] = [str(layer.depth), Text(layer.name)]
        if roomy:
            cells += [Text(layer.op), Text(listed(layer.nodes))]
        for way in ways:
            cells += _cells(layer.by(way))[: 1 + len(numbers)]
        table.add_row(*cells)
    _head(console, found)
    console.print(table)
    for text in (*_reasons(found), *(f"note: {note}" for note in found.notes)):
        # What a runtime says may be of several lines.
        console.print(" ".join(text.split()), style="dim", markup=False, highlight=False, soft_wrap=True)
    style = "bold green" if found.exit_code == 0 else "bold red"
    console.print(found.verdict, style=style, markup=False, highlight=False, soft_wrap=True)


def _fitting(width: int, found: Bisection, ways: Sequence[str]) -> list[str]:
    """The columns of numbers for which there is room beside depth, name and outcomes."""
    outcomes = [
        max(len(way), *(len(one.outcome.value) for layer in found.layers if (one := layer.by(way)))) for way in ways
    ]
    room = width - len("depth ") - _NAME_LEAST - 1 - sum(outcomes) - len(ways)
    numbers = list(_NUMBERS)
    while numbers and len(ways) * sum(_NUMBERS[title] + 1 for title in numbers) > room:
        numbers.pop()
    return numbers


def _head(console: Console, found: Bisection) -> None:
    compiled = f", compiled from {found.artifact_model}" if found.artifact_model != found.model else ""
    flow = f", flow {found.flow}" if found.flow else ""
    text = f"{found.model} on {found.board} by {found.runtime}{flow}{compiled}; against {found.against}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _cells(finding: Finding | None) -> list[Any]:
    from rich.text import Text

    if finding is None:
        return ["-", "-", "-"]
    outcome = Text(finding.outcome.value, style=_STYLES.get(finding.outcome, "magenta"))
    if finding.nonfinite:  # what the other values say would look like an answer that is almost right
        return [outcome, "NaN/Inf", "-"]
    return [outcome, _number(finding.max_abs), _number(finding.sqnr_db)]


def _reasons(found: Bisection) -> list[str]:
    """Why: of the first wrong layer in each way, of the model as it is, of every error, of what was not judged."""
    said = []
    for way in WAYS:
        layer = found.first_wrong(way)
        finding = layer.by(way) if layer else None
        if layer and finding:
            said.append(f"{layer.name}, {way}: {finding.reason}")
    if found.whole and found.whole.outcome in (Outcome.FAIL, Outcome.BLIND):
        said.append(f"the model as it is: {found.whole.reason}")
    alike: dict[str, list[str]] = {}
    for what, way, finding in found.failed():
        alike.setdefault(f"{way}: {finding.outcome.value}: {finding.reason}", []).append(what)
    for way in WAYS:
        for layer in found.layers:
            if (skipped := layer.by(way)) and skipped.outcome in (Outcome.BLIND, Outcome.SKIP):
                alike.setdefault(f"{way}: not judged: {skipped.reason}", []).append(layer.name)
    said += [f"{listed(names)}, {reason}" for reason, names in alike.items()]
    if len(said) > _REASONS_SHOWN:
        said = [*said[:_REASONS_SHOWN], f"and {len(said) - _REASONS_SHOWN} more: see --json"]
    return said


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
