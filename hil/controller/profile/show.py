"""A profile for the terminal and as JSON: what ran where, what it cost, and which operations took the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hil.controller.profile.model import Profile
from hil.controller.profile.show_totals import Total, run_times, shortener, totals
from hil.controller.suite.reports.texts import counted, plain, seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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
        console.print(f"  timed run     p50 {_time(times.timed_p50_ns)}", highlight=False)
    if times.profiled_p50_ns is not None:
        over = "" if times.overhead is None else f", {times.overhead:+.1%} beside the timed run"
        text = f"  profiled run  p50 {_time(times.profiled_p50_ns)} of {counted(times.iterations, 'iteration')}{over}"
        console.print(text, highlight=False)
    if profile.calls and profile.clock.error_ns:
        text = f"  clock         the board's is known to {_time(profile.clock.error_ns)} beside the host's"
        console.print(text, highlight=False)
    if found:
        console.print()
        console.print(_top_table(found[:top], by, times.iterations, _BAR if console.width < _WIDE else 2 * _BAR))
        if len(found) > top:
            rest = sum(total.share for total in found[top:])
            console.print(Text(f"  and {len(found) - top} more with {rest:.1%} of the time", style="dim"))
        estimated = [
            one for one in found[:top] if one.kind == "compute" and None not in (one.flops_per_s, one.bytes_per_s)
        ]
        if estimated:
            console.print(Text(f"\nestimates: {_ESTIMATED}", style="dim"))
            console.print(_roofline_table(estimated, by))
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


def _time(ns: float) -> str:
    return seconds(ns / 1e9)


def new_table(names: str, *numbers: str) -> Table:
    """A table with a column of names, which may be long, and columns of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False)
    table.add_column(names, overflow="fold", min_width=_NAME_LEAST)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _top_table(found: Sequence[Total], by: str, iterations: int, bar: int) -> Table:
    from rich.bar import Bar
    from rich.text import Text

    short = shortener(found)
    table = new_table(TITLES[by], "time/run", "share", "", "calls", "mean", "p50", "threads")
    runs = max(iterations, 1)
    most = max(total.share for total in found) or 1
    for total in found:
        others = total.onnx_nodes if by == "op" else total.ops
        table.add_row(
            Text.assemble(short(total.name), *(("\n" + ", ".join(map(short, others)), "dim") for _ in others[:1])),
            _time(total.run_ns),
            f"{total.share:.1%}",
            Bar(most, 0, total.share, width=bar, color="cyan"),
            f"{total.calls / runs:.3g}",
            _time(total.mean_ns),
            _time(total.p50_ns),
            "-" if total.parallelism is None else f"{total.parallelism:.2f}",
        )
    return table


def _roofline_table(found: Sequence[Total], by: str) -> Table:
    from rich.text import Text

    short = shortener(found)
    table = new_table(TITLES[by], "speed", "memory", "op/byte", "bound by")
    for total in found:
        table.add_row(
            Text(short(total.name)),
            si(total.flops_per_s, "op/s"),
            si(total.bytes_per_s, "B/s"),
            "-" if total.intensity is None else f"{total.intensity:.3g}",
            total.bound_estimate or "-",
        )
    return table
