"""Show ticks in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hil.controller.analysis.profile.ticks.columns import TITLES, ProfileColumn, make_named_table
from hil.controller.analysis.profile.totals import NOT_THE_MODEL, make_common_shortener
from hil.core.timeline import OpTicks, Ticks

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class TickGroup:
    """Operations with the same key. The ticks of a group are the sum of the medians."""

    name: str
    others: tuple[str, ...]  # nodes of an operation, or operations of nodes and types
    calls: int
    p50: float
    minimum: int
    maximum: int
    share: float


_KEYS: dict[str, Callable[[OpTicks], str]] = {
    "op": lambda one: one.name,
    "node": lambda one: ", ".join(one.onnx_nodes) or _name_rest(one),
    "type": lambda one: "+".join(one.op_types) or _name_rest(one),
}


def _name_rest(one: OpTicks) -> str:
    return NOT_THE_MODEL if one.kind == "runtime" else one.name


def group_ticks(ticks: Ticks, by: str) -> list[TickGroup]:
    """Group operations by ``op``, ``node`` or ``type``, the most ticks first."""
    groups: dict[str, list[OpTicks]] = {}
    for one in ticks.operations:
        groups.setdefault(_KEYS[by](one), []).append(one)
    found = [_make_group(name, members, by) for name, members in groups.items()]
    return sorted(found, key=lambda group: -group.p50)


def _make_group(name: str, members: Sequence[OpTicks], by: str) -> TickGroup:
    lists = [one.onnx_nodes if by == "op" else (one.name,) for one in members]
    return TickGroup(
        name,
        tuple(dict.fromkeys(name for names in lists for name in names)),
        sum(one.calls for one in members),
        sum(one.p50 for one in members),
        sum(one.minimum for one in members),
        sum(one.maximum for one in members),
        sum(one.share for one in members),
    )


def format_ticks(ticks: float) -> str:
    """Format a number of ticks."""
    return f"{ticks:,.0f}"


def describe_ticks(ticks: Ticks) -> str:
    """Return what a tick of the emulated board is."""
    return f"1 tick is {ticks.instructions_per_tick:.3g} instructions of the emulated CPU, and not a time"


def print_ticks(console: Console, ticks: Ticks, *, by: str, top: int) -> None:
    """Print the ticks of a run and of the ``top`` groups of operations."""
    from rich.text import Text

    iterations = f"{ticks.iterations} iteration{'s' if ticks.iterations != 1 else ''}"
    console.print(f"  run           p50 {format_ticks(ticks.p50)} ticks of {iterations}", highlight=False)
    console.print(f"  ticks         {describe_ticks(ticks)}", highlight=False, soft_wrap=True)
    found = group_ticks(ticks, by)
    shown = found[:top]
    short = make_common_shortener([one.name for one in ticks.operations if one.kind == "compute"])
    names = [Text(short(one.name)) for one in shown]
    for name, one in zip(names, shown, strict=True):
        name.append(f"\n{', '.join(map(short, one.others))}" if one.others else "", "dim")
    columns = [
        ProfileColumn("ticks/run", [format_ticks(one.p50) for one in shown], 1),
        ProfileColumn("share", [f"{one.share:.1%}" for one in shown], 2),
        ProfileColumn("calls", [str(one.calls) for one in shown], 3),
        ProfileColumn("min", [format_ticks(one.minimum) for one in shown], 4),
        ProfileColumn("max", [format_ticks(one.maximum) for one in shown], 5),
    ]
    console.print()
    console.print(make_named_table(console, TITLES[by], names, columns))
    if len(found) > top:
        rest = sum(one.share for one in found[top:])
        console.print(Text(f"  and {len(found) - top} more with {rest:.1%} of the ticks", style="dim"))
