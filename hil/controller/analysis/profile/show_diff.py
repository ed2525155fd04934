"""Two profiles side by side, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hil.controller.analysis.profile.diff import Cost, OpDiff, ProfileDiff
from hil.controller.analysis.profile.show import Column, named_table, print_mark, time_text
from hil.controller.storage.texts import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_COLOURS = {"slower": "red", "faster": "green"}


def print_diff(console: Console, diff: ProfileDiff, *, top: int) -> None:
    """Print which is faster, by the timed runs, and the ``top`` operations: those that changed the most, or where the
    profiled times cannot be compared those with the largest shares.
    """
    from rich.text import Text

    console.print(Text(f"{plain(diff.a)} -> {plain(diff.b)}", style="bold"), soft_wrap=True)
    console.print(Text(diff.verdict, style=_COLOURS.get(diff.timed.change, "")), soft_wrap=True)
    beyond = f"p50 of an iteration; a change is one beyond {diff.margin:.0%}, at {diff.confidence:.0%} confidence"
    console.print(Text(beyond, style="dim"), soft_wrap=True)
    shown = [diff.total, *list(diff.ops)[:top]]
    if diff.incomparable:
        console.print(_changes(console, [diff.timed], diff))
        text = f"\nOperations by their share of their own run. Their times are not comparable: {diff.incomparable}."
        console.print(Text(text, style="yellow"), soft_wrap=True)
        console.print(_shares(console, shown[1:], diff))
    else:
        console.print(_changes(console, [diff.timed, *shown], diff))
    for name, times in (("A", diff.a_times), ("B", diff.b_times)):
        print_mark(console, times, f"of {name}, ")
    if len(diff.ops) > top:
        less = "have smaller shares" if diff.incomparable else "changed less"
        console.print(Text(f"  and {len(diff.ops) - top} more, which {less}", style="dim"))


def _changes(console: Console, shown: list[OpDiff], diff: ProfileDiff) -> object:
    return named_table(
        console,
        "operation",
        [_name(one) for one in shown],
        [
            Column("A", [_cost(one, one.a, diff.a_times.mark) for one in shown], 1),
            Column("B", [_cost(one, one.b, diff.b_times.mark) for one in shown], 2),
            Column("B - A", [_change(one) for one in shown], 4),
            Column("B / A", ["-" if one.ratio is None else f"{one.ratio:.3f}" for one in shown], 3),
            Column("interval", [_interval(one) for one in shown], 5),
        ],
        sections=2,
    )


def _shares(console: Console, shown: list[OpDiff], diff: ProfileDiff) -> object:
    def share(cost: Cost | None) -> str:
        return f"{cost.share:.1%}" if cost else "-"

    return named_table(
        console,
        "operation",
        [_name(one) for one in shown],
        [
            Column("of A", [share(one.a) for one in shown], 1),
            Column("of B", [share(one.b) for one in shown], 2),
            Column("A", [_cost(one, one.a, diff.a_times.mark) for one in shown], 3),
            Column("B", [_cost(one, one.b, diff.b_times.mark) for one in shown], 4),
        ],
    )


def _name(one: OpDiff) -> Text:
    from rich.text import Text

    name = Text(plain(one.name), style="bold" if one.kind in ("timed", "total") else "")
    # Before the numbers: a narrow terminal leaves out what stands behind them.
    return Text.assemble((one.change, _COLOURS.get(one.change, "")), " ", name) if one.change else name


def _cost(one: OpDiff, cost: Cost | None, mark: str) -> str:
    if cost is None:
        return "-"
    return time_text(cost.p50_ns) + ("" if one.kind == "timed" else mark)


def _change(one: OpDiff) -> str:
    if one.kind == "timed" and one.ratio is None:
        return "-"
    return f"{'-' if one.change_ns <= -0.5 else '+'}{time_text(abs(one.change_ns))}"


def _interval(one: OpDiff) -> str:
    return "-" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
