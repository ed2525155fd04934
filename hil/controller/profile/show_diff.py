"""Two profiles side by side, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hil.controller.profile.diff import OpDiff, ProfileDiff
from hil.controller.profile.show import new_table
from hil.controller.suite.reports.texts import plain, seconds

if TYPE_CHECKING:
    from rich.console import Console

_COLOURS = {"slower": "red", "faster": "green"}


def print_diff(console: Console, diff: ProfileDiff, *, top: int) -> None:
    """Print the change of the whole and of the ``top`` operations that changed the most."""
    from rich.text import Text

    console.print(Text(f"{plain(diff.a)} -> {plain(diff.b)}", style="bold"), soft_wrap=True)
    title = f"p50 of an iteration; a change is one beyond {diff.margin:.0%}, at {diff.confidence:.0%} confidence"
    console.print(Text(title, style="dim"))
    table = new_table("operation", "A", "B", "B - A", "B / A", "interval")
    for one in [diff.total, *list(diff.ops)[:top]]:
        name = Text(plain(one.name), style="bold" if one is diff.total else "")
        if one.change:
            # Before the numbers: a narrow terminal cuts off what stands behind them.
            name = Text.assemble((one.change, _COLOURS.get(one.change, "")), " ", name)
        table.add_row(
            name,
            *(seconds(cost.p50_ns / 1e9 if cost else None) for cost in (one.a, one.b)),
            f"{'-' if one.change_ns <= -0.5 else '+'}{seconds(abs(one.change_ns) / 1e9)}",
            "-" if one.ratio is None else f"{one.ratio:.3f}",
            _interval(one),
            end_section=one is diff.total,
        )
    console.print(table)
    if len(diff.ops) > top:
        console.print(Text(f"  and {len(diff.ops) - top} more, which changed less", style="dim"))


def _interval(one: OpDiff) -> str:
    return "-" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
