"""A profile for the terminal and as JSON: what ran where, what it cost, and which operations took the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hil.controller.analysis.profile.show_totals import RunTimes, Total, run_times, shortener, totals
from hil.controller.storage.texts import counted, plain, seconds
from hil.core.timeline import Profile

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

TITLES = {"op": "operation", "node": "ONNX nodes", "type": "operator types"}

_BAR = 8
_WIDE = 110
_NAME_LEAST = 16
_ESTIMATED = "the work is that of the shapes, the time is measured"


def profile_record(profile: Profile, *, by: str, top: int) -> dict[str, Any]:
    """What ``--json`` prints: the profile's head, the ``top`` totals by ``by``, and how many there are."""
    times, found = run_times(profile), totals(profile.rows, by)
    return {
        "run": profile.run,
        "model": profile.model,
        "board": profile.board,
        "runtime": profile.runtime,
        "timed_p50_ns": times.timed_p50_ns,
        "profiled_p50_ns": times.profiled_p50_ns,
        "overhead": times.overhead,
        "iterations": times.iterations,
        "rows": len(profile.rows),
        "clock_error_ns": profile.clock.error_ns,
        "by": by,
        "groups": len(found),
        "totals": [asdict(total) for total in found[:top]],
        "notes": list(profile.notes),
    }


def print_profile(console: Console, profile: Profile, *, by: str, top: int) -> None:
    """Print the profile's head, its top operations with bars, the estimates of their work, and the notes."""
    from rich.text import Text

    found, times = totals(profile.rows, by), run_times(profile)
    where = ", ".join(filter(None, (plain(profile.board), plain(profile.runtime))))
    head = Text.assemble((plain(profile.model), "bold"), f" on {where}")
    console.print(head, soft_wrap=True)
    # Nothing timed, or nothing profiled: the notes say why.
    if times.timed_p50_ns is not None:
        console.print(f"  timed run     p50 {time_text(times.timed_p50_ns)}", highlight=False)
    if times.profiled_p50_ns is not None:
        over = "" if times.overhead is None else f", {times.overhead:+.1%} beside the timed run"
        text = (
            f"  profiled run  p50 {time_text(times.profiled_p50_ns)} of {counted(times.iterations, 'iteration')}{over}"
        )
        console.print(text, highlight=False)
    if profile.calls and profile.clock.error_ns:
        text = f"  clock         the board's is known to {time_text(profile.clock.error_ns)} beside the host's"
        console.print(text, highlight=False)
    if found:
        console.print()
        console.print(_top_table(console, found[:top], by, times))
        if len(found) > top:
            rest = sum(total.share for total in found[top:])
            console.print(Text(f"  and {len(found) - top} more with {rest:.1%} of the time", style="dim"))
        estimated = [
            one for one in found[:top] if one.kind == "compute" and None not in (one.flops_per_s, one.bytes_per_s)
        ]
        if estimated:
            console.print(Text(f"\nestimates: {_ESTIMATED}", style="dim"))
            console.print(_roofline_table(console, estimated, by, times))
        print_mark(console, times)
    for note in profile.notes:
        console.print(Text(f"  {plain(note)}", style="yellow"), soft_wrap=True)


def si(value: float | None, unit: str) -> str:
    """A number with its unit's prefix, ``3.2 GB/s``; "-" for None."""
    if value is None:
        return "-"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def time_text(ns: float) -> str:
    """A time with its unit."""
    return seconds(ns / 1e9)


def print_mark(console: Console, times: RunTimes, whose: str = "") -> None:
    """Say what the mark behind figures means, where the profiler distorts them."""
    from rich.text import Text

    if times.is_distorted:
        text = (
            f"{times.mark.strip()}: {whose}measured under a profiler that adds so much to a run. "
            "Such times rank the operations of this run; they are not what an operation takes without it."
        )
        console.print(Text(text, style="yellow"), soft_wrap=True)


@dataclass(frozen=True)
class Column:
    """A column of numbers.

    Attributes:
        title, cells: what stands in it.
        rank: where it does not fit, the columns of the highest ranks are left out.
    """

    title: str
    cells: Sequence[RenderableType]
    rank: int


def named_table(
    console: Console, title: str, names: Sequence[Text], columns: Sequence[Column], *, sections: int = 0
) -> Table:
    """A table of names and numbers that fits the console: numbers are left out before a name is.

    Args:
        console: where it will be printed.
        title: of the names.
        names: a row each.
        columns: their numbers.
        sections: so many first rows, where there are more, have a line below them.
    """
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    def width(cells: Sequence[RenderableType]) -> int:
        return max((Measurement.get(console, console.options, cell).maximum for cell in cells), default=0)

    least = min(width([title, *names]), _NAME_LEAST)
    shown = list(columns)
    while shown and least + sum(1 + width([column.title, *column.cells]) for column in shown) > console.width:
        shown.remove(max(shown, key=lambda column: column.rank))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    table.add_column(title, overflow="fold", min_width=least)
    for column in shown:
        table.add_column(column.title, justify="right", no_wrap=True)
    for number, name in enumerate(names):
        cells = [column.cells[number] for column in shown]
        table.add_row(name, *cells, end_section=number < sections and len(names) > sections)
    return table


def _top_table(console: Console, found: Sequence[Total], by: str, times: RunTimes) -> Table:
    from rich.bar import Bar
    from rich.text import Text

    short = shortener(found)
    runs = max(times.iterations, 1)
    most = max(total.share for total in found) or 1
    width = _BAR if console.width < _WIDE else 2 * _BAR
    names = []
    for total in found:
        others = total.onnx_nodes if by == "op" else total.ops
        names.append(
            Text.assemble(short(total.name), *(("\n" + ", ".join(map(short, others)), "dim") for _ in others[:1]))
        )
    return named_table(
        console,
        TITLES[by],
        names,
        [
            Column("time/run", [time_text(total.run_ns) + times.mark for total in found], 1),
            Column("share", [f"{total.share:.1%}" for total in found], 2),
            Column("", [Bar(most, 0, total.share, width=width, color="cyan") for total in found], 7),
            Column("calls", [f"{total.calls / runs:.3g}" for total in found], 4),
            Column("mean", [time_text(total.mean_ns) + times.mark for total in found], 5),
            Column("p50", [time_text(total.p50_ns) + times.mark for total in found], 3),
            Column("threads", ["-" if total.parallelism is None else f"{total.parallelism:.2f}" for total in found], 6),
        ],
    )


def _roofline_table(console: Console, found: Sequence[Total], by: str, times: RunTimes) -> Table:
    from rich.text import Text

    short = shortener(found)
    return named_table(
        console,
        TITLES[by],
        [Text(short(total.name)) for total in found],
        [
            Column("speed", [si(total.flops_per_s, "op/s") + times.mark for total in found], 1),
            Column("memory", [si(total.bytes_per_s, "B/s") + times.mark for total in found], 2),
            Column("op/byte", ["-" if total.intensity is None else f"{total.intensity:.3g}" for total in found], 4),
            Column("bound by", [total.bound_estimate or "-" for total in found], 3),
        ],
    )
