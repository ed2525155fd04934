"""Show profiles, comparisons and compilations: in the terminal, as JSON, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.analysis.profile.compilation.compile_totals import read_compilation
from hil.controller.analysis.profile.diff import OpDiff, ProfileDiff
from hil.controller.analysis.profile.rows import DISPATCHES
from hil.controller.analysis.profile.ticks.columns import TITLES, ProfileColumn, make_named_table
from hil.controller.analysis.profile.ticks.show_ticks import print_ticks
from hil.controller.analysis.profile.totals import (
    RunTimes,
    find_typical_iteration,
    make_shortener,
    require_times,
    run_times,
    sum_rows,
    type_of,
)
from hil.controller.records.commands.stored import OperationCost, ProfileSummary, ProfileTotal
from hil.controller.storage.screen.pictures import make_figure, save_figure
from hil.controller.storage.screen.texts import ROUNDS_UP, format_count, format_seconds, line, make_plain
from hil.core.timeline import OpRow, Profile
from hil.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


_BAR = 8
_WIDE = 110

_COLOURS = {"slower": "red", "faster": "green"}


def summarize_profile(profile: Profile, *, by: str, top: int, plot: Path | None = None) -> ProfileSummary:
    """Return the profile's run times, the ``top`` totals grouped by ``by``, and the number of groups."""
    times, found = run_times(profile), sum_rows(profile.rows, by)
    return ProfileSummary(
        run=profile.run,
        model=profile.model,
        board=profile.board,
        runtime=profile.runtime,
        **vars(times),
        overhead=times.overhead,
        rows=len(profile.rows),
        clock_error_ns=profile.clock.error_ns,
        by=by,
        groups=len(found),
        totals=found[:top],
        notes=list(profile.notes),
        plot=str(plot) if plot else None,
        ticks=profile.ticks,
    )


def print_profile(console: Console, profile: Profile, *, by: str, top: int) -> None:
    """Print the profile's run times, the top operations with bars, their estimated work, and the notes."""
    from rich.text import Text

    found, times = sum_rows(profile.rows, by), run_times(profile)
    where = ", ".join(filter(None, (make_plain(profile.board), make_plain(profile.runtime))))
    console.print(Text.assemble((make_plain(profile.model), "bold"), f" on {where}"), soft_wrap=True)
    # Print only the times that exist. If timed or profiled runs are missing, the notes contain the reason.
    if times.timed_p50_ns is not None:
        console.print(f"  timed run     p50 {time_text(times.timed_p50_ns)}", highlight=False)
    if times.profiled_p50_ns is not None:
        over = (
            "" if times.overhead is None or profile.device else f", {times.overhead:+.1%} compared with the timed run"
        )
        of = f"{time_text(times.profiled_p50_ns)} of {format_count(times.iterations, 'iteration')}"
        console.print(f"  profiled run  p50 {of}{over}", highlight=False)
    if profile.device:
        console.print(f"  timed by      {make_plain(profile.device)}", highlight=False, soft_wrap=True)
    if profile.calls and profile.clock.error_ns:
        within = f"board and host clocks aligned within {time_text(profile.clock.error_ns)}"
        console.print(f"  clock         {within}", highlight=False)
    if profile.ticks is not None:
        print_ticks(console, profile.ticks, by=by, top=top)
    if found:
        console.print()
        console.print(_build_top_table(console, found[:top], by, times))
        if len(found) > top:
            rest = sum(total.share for total in found[top:])
            console.print(Text(f"  and {len(found) - top} more with {rest:.1%} of the time", style="dim"))
        estimated = [
            one for one in found[:top] if one.kind == "compute" and None not in (one.flops_per_s, one.bytes_per_s)
        ]
        if estimated:
            console.print(Text("\nestimates: work computed from shapes, divided by the measured time", style="dim"))
            console.print(_build_roofline_table(console, estimated, by, times))
        print_mark(console, times)
    for note in profile.notes:
        console.print(Text(f"  {make_plain(note)}", style="yellow"), soft_wrap=True)


def format_si(value: float | None, unit: str) -> str:
    """Format a number with an SI prefix, such as ``3.2 GB/s``; "-" for None."""
    if value is None:
        return "-"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * ROUNDS_UP:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def time_text(ns: float) -> str:
    """Format a time with a unit."""
    return format_seconds(ns / 1e9)


def print_mark(console: Console, times: RunTimes, of: str = "") -> None:
    """If the profiler distorts the times, print an explanation of the mark after these times."""
    from rich.text import Text

    if times.is_distorted:
        text = (
            f"{times.mark.strip()}: the profiler adds this much to a run{of}; "
            "use the times only to compare operations: without the profiler, operations take less time"
        )
        console.print(Text(text, style="yellow"), soft_wrap=True)


def _build_top_table(console: Console, found: Sequence[ProfileTotal], by: str, times: RunTimes) -> Table:
    from rich.bar import Bar
    from rich.text import Text

    short, mark = make_shortener(found), times.mark
    runs = max(times.iterations, 1)
    most = max(total.share for total in found) or 1
    width = _BAR if console.width < _WIDE else 2 * _BAR
    names = [Text(short(total.name)) for total in found]
    for name, total in zip(names, found, strict=True):
        others = ", ".join(map(short, total.onnx_nodes if by == "op" else total.ops))
        name.append(f"\n{others}" if others else "", "dim")
    columns = [
        ProfileColumn("time/run", [time_text(total.run_ns) + mark for total in found], 1),
        ProfileColumn("share", [f"{total.share:.1%}" for total in found], 2),
        ProfileColumn("", [Bar(most, 0, total.share, width=width, color="cyan") for total in found], 7),
        ProfileColumn("calls", [f"{total.calls / runs:.3g}" for total in found], 4),
        ProfileColumn("mean", [time_text(total.mean_ns) + mark for total in found], 5),
        ProfileColumn("p50", [time_text(total.p50_ns) + mark for total in found], 3),
        ProfileColumn(
            "threads", ["-" if total.parallelism is None else f"{total.parallelism:.2f}" for total in found], 6
        ),
    ]
    return make_named_table(console, TITLES[by], names, columns)


def _build_roofline_table(console: Console, found: Sequence[ProfileTotal], by: str, times: RunTimes) -> Table:
    from rich.text import Text

    short, mark = make_shortener(found), times.mark
    columns = [
        ProfileColumn("speed", [format_si(total.flops_per_s, "op/s") + mark for total in found], 1),
        ProfileColumn("memory", [format_si(total.bytes_per_s, "B/s") + mark for total in found], 2),
        ProfileColumn("op/byte", ["-" if total.intensity is None else f"{total.intensity:.3g}" for total in found], 4),
        ProfileColumn("bound by", [total.bound_estimate or "-" for total in found], 3),
    ]
    return make_named_table(console, TITLES[by], [Text(short(total.name)) for total in found], columns)


def print_diff(console: Console, diff: ProfileDiff, *, top: int) -> None:
    """Print which run is faster, and the ``top`` operations.

    These are the operations with the largest changes or, if the profiled times cannot be compared, with the largest
    shares.
    """
    from rich.text import Text

    console.print(Text(f"{make_plain(diff.a)} -> {make_plain(diff.b)}", style="bold"), soft_wrap=True)
    console.print(Text(diff.verdict, style=_COLOURS.get(diff.timed.change, "")), soft_wrap=True)
    beyond = f"p50 of an iteration; changes below {diff.margin:.0%} are ignored, confidence {diff.confidence:.0%}"
    console.print(Text(beyond, style="dim"), soft_wrap=True)
    shown = list(diff.ops)[:top]
    if diff.incomparable:
        console.print(_build_changes_table(console, [diff.timed], diff))
        told = "operations by share of the run; times are not comparable"
        text = f"\n{told}: {diff.incomparable}"
        console.print(Text(text, style="yellow"), soft_wrap=True)
        shares = [
            ProfileColumn(f"of {name}", [f"{cost.share:.1%}" if cost else "-" for cost in costs], rank)
            for rank, (name, costs) in enumerate((("A", [one.a for one in shown]), ("B", [one.b for one in shown])), 1)
        ]
        console.print(
            make_named_table(
                console, "operation", list(map(_format_name, shown)), [*shares, *_build_cost_columns(shown, diff, 3)]
            )
        )
    else:
        console.print(_build_changes_table(console, [diff.timed, diff.total, *shown], diff))
    for name, times in (("A", diff.a_times), ("B", diff.b_times)):
        print_mark(console, times, f" of {name}")
    if len(diff.ops) > top:
        less = "have smaller shares" if diff.incomparable else "changed less"
        console.print(Text(f"  and {len(diff.ops) - top} more, which {less}", style="dim"))


def _build_changes_table(console: Console, shown: list[OpDiff], diff: ProfileDiff) -> Table:
    columns = [
        *_build_cost_columns(shown, diff, 1),
        ProfileColumn("B - A", [_format_change(one) for one in shown], 4),
        ProfileColumn("B / A", ["-" if one.ratio is None else f"{one.ratio:.3f}" for one in shown], 3),
        ProfileColumn("interval", [_format_interval(one) for one in shown], 5),
    ]
    return make_named_table(console, "operation", list(map(_format_name, shown)), columns, sections=2)


def _build_cost_columns(shown: list[OpDiff], diff: ProfileDiff, rank: int) -> list[ProfileColumn]:
    def format_cost(one: OpDiff, cost: OperationCost | None, mark: str) -> str:
        return time_text(cost.p50_ns) + ("" if one.kind == "timed" else mark) if cost else "-"

    return [
        ProfileColumn("A", [format_cost(one, one.a, diff.a_times.mark) for one in shown], rank),
        ProfileColumn("B", [format_cost(one, one.b, diff.b_times.mark) for one in shown], rank + 1),
    ]


def _format_name(one: OpDiff) -> Text:
    from rich.text import Text

    name = Text(make_plain(one.name), style="bold" if one.kind in ("timed", "total") else "")
    # Put the change first, because a narrow terminal omits the columns after the name.
    return Text.assemble((one.change, _COLOURS.get(one.change, "")), " ", name) if one.change else name


def _format_change(one: OpDiff) -> str:
    if one.kind == "timed" and one.ratio is None:
        return "-"
    return f"{'-' if one.change_ns <= -0.5 else '+'}{time_text(abs(one.change_ns))}"


def _format_interval(one: OpDiff) -> str:
    return "-" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"


def print_compile_profile(console: Console, folder: Path, *, top: int) -> None:
    """Print the phases, the ``top`` passes, the ``top`` operations by estimates, and the program's size.

    Raises:
        UsageError: a table in the profile is missing or damaged.
    """
    from rich.text import Text

    found = read_compilation(folder)
    console.print(Text(f"compiling took {format_seconds(found.seconds)}, in {len(found.phases)} phases", style="bold"))
    columns = [
        ProfileColumn("time", [format_seconds(one.seconds) for one in found.phases], 1),
        ProfileColumn("share", [f"{one.share:.1%}" for one in found.phases], 2),
    ]
    console.print()
    console.print(make_named_table(console, "phase", [Text(make_plain(one.name)) for one in found.phases], columns))
    longest = found.passes[:top]
    columns = [
        ProfileColumn("in phase", [Text(make_plain(one.phase)) for one in longest], 3),
        ProfileColumn("time", [format_seconds(one.seconds) for one in longest], 1),
        ProfileColumn("share", [f"{one.share:.1%}" for one in longest], 2),
        ProfileColumn("runs", [str(one.runs) for one in longest], 4),
    ]
    console.print()
    console.print(make_named_table(console, "pass", [Text(make_plain(one.name)) for one in longest], columns))
    if estimated := found.operations[:top]:
        console.print(Text("\nestimates: work computed from shapes, time on a nominal core", style="dim"))
        columns = [
            ProfileColumn("share", [f"{one.share:.1%}" for one in estimated], 1),
            ProfileColumn("time", [format_seconds(one.seconds) for one in estimated], 2),
            ProfileColumn("work", [format_si(one.flops, "op") for one in estimated], 3),
            ProfileColumn("moved", [format_si(one.bytes, "B") for one in estimated], 4),
            ProfileColumn("bound by", [one.bound or "-" for one in estimated], 5),
        ]
        console.print(
            make_named_table(console, "operation", [Text(make_plain(one.name)) for one in estimated], columns)
        )
    where = f"{found.dispatches} dispatches, a program of {found.program_bytes:,} bytes: {folder / DISPATCHES}"
    console.print(Text(f"\n{where}"))


_MAX_NAME_LENGTH = 60
_POINTS_NAMED = 5
_LANES = ("runtime", "compute")
_LABELLED_FROM = 0.06  # minimum share of the time line for a label
_MEMORY, _COMPUTE, _UNKNOWN = "#3b6fb6", "#d9822b", "#9a9a9a"
_SLOWER, _FASTER = "#c0392b", "#2e8b57"
_BOUNDS = {"memory": _MEMORY, "compute": _COMPUTE, "": _UNKNOWN}


def plot_profile(path: Path, profile: Profile, *, by: str = "op", top: int = 20) -> None:
    """Draw the top totals as bars, an iteration as a time line, and the estimates as roofline points.

    Raises:
        UsageError: the profile has no rows or no times; or as for any picture.
    """
    require_times(profile)
    found, iteration = sum_rows(profile.rows, by), find_typical_iteration(profile.rows)
    if not found:
        hint = "; ".join(profile.notes)
        raise UsageError(f"the profile of {profile.model} has no operations to draw", hint=hint)
    points = [one for one in found if one.kind == "compute" and one.intensity and one.flops_per_s]
    shown = found[:top]
    height = 2.6 + 0.26 * len(shown)
    figure = make_figure(14, height + 2.2)
    panels = figure.add_gridspec(2, 2, height_ratios=(height, 2.2), width_ratios=(1.6, 1) if points else (1, 0.001))
    times = run_times(profile)
    timed = "" if times.timed_p50_ns is None else f", timed p50 {time_text(times.timed_p50_ns)}"
    figure.suptitle(_escape_label(f"{profile.model} on {profile.board}, {profile.runtime}{timed}", 150), fontsize=11)
    _draw_bars(figure.add_subplot(panels[0, 0]), shown, by, times)
    if points:
        _draw_roofline(figure.add_subplot(panels[0, 1]), points, times.mark)
    _draw_timeline(figure.add_subplot(panels[1, :]), iteration, times.mark)
    save_figure(figure, path)


def plot_diff(path: Path, diff: ProfileDiff, *, top: int = 20) -> None:
    """Draw the changes of operation times, the largest first. If times are not comparable, draw shares of the run.

    Raises:
        UsageError: there are no operations to draw; or as for any picture.
    """
    shown = list(diff.ops)[:top]
    if not shown:
        raise UsageError(f"{diff.a} and {diff.b} have no operations to draw")
    figure = make_figure(11, 1.6 + 0.3 * len(shown))
    axes = figure.subplots()
    axes.set_title(f"{_escape_label(f'{diff.a} -> {diff.b}', 120)}\n{diff.verdict}", fontsize=10)
    if diff.incomparable:
        for label, offset, costs in (("A", -0.2, [one.a for one in shown]), ("B", 0.2, [one.b for one in shown])):
            shares = [100 * cost.share if cost else 0.0 for cost in costs]
            axes.barh([row + offset for row in range(len(shown))], shares, 0.4, label=label)
        _label_bars(axes, [line(one.name, _MAX_NAME_LENGTH - 10) for one in shown])
        axes.set_xlabel(_escape_label(f"% of the run's operations; times are not comparable: {diff.incomparable}", 120))
        axes.legend()
    else:
        unit, size = _choose_unit(max(abs(one.change_ns) for one in shown))
        colours = [_UNKNOWN if not one.change else _SLOWER if one.change_ns > 0 else _FASTER for one in shown]
        axes.barh(range(len(shown)), [one.change_ns / size for one in shown], color=colours)
        ratios = [one.change if one.ratio is None else f"x{one.ratio:.3g}" for one in shown]
        names = [line(one.name, _MAX_NAME_LENGTH - 10) for one in shown]
        _label_bars(axes, [f"{name} {ratio}" for name, ratio in zip(names, ratios, strict=True)])
        axes.axvline(0, color="#444", linewidth=0.8)
        axes.set_xlabel(f"change in {unit} per iteration (grey: no significant change)")
    save_figure(figure, path)


def _choose_unit(most_ns: float) -> tuple[str, float]:
    return next((one for one in (("s", 1e9), ("ms", 1e6), ("us", 1e3)) if most_ns >= one[1]), ("ns", 1.0))


def _escape_label(text: str, longest: int = _MAX_NAME_LENGTH) -> str:
    # Escape dollar signs, because matplotlib parses text between them as a formula.
    return line(text, longest).replace("$", r"\$")


def _label_bars(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_escape_label(name) for name in names], fontsize=8)
    axes.invert_yaxis()


def _draw_bars(axes: Any, shown: Sequence[ProfileTotal], by: str, times: RunTimes) -> None:
    runs = max(times.iterations, 1)
    unit, size = _choose_unit(shown[0].total_ns / runs)
    colours = [_BOUNDS.get(one.bound_estimate, _UNKNOWN) for one in shown]
    bars = axes.barh(range(len(shown)), [one.total_ns / runs / size for one in shown], color=colours)
    axes.bar_label(bars, [f"{one.share:.1%}" for one in shown], padding=3, fontsize=8)
    axes.margins(x=0.12)
    short = make_shortener(shown)
    nodes = [f" ({', '.join(one.onnx_nodes)})" if by == "op" and one.onnx_nodes else "" for one in shown]
    _label_bars(axes, [f"{short(one.name)}{of}" for one, of in zip(shown, nodes, strict=True)])
    axes.set_xlabel(f"{unit} per run{times.mark and f' under the profiler{times.mark}'}")
    axes.set_title(f"time by {TITLES[by]} (estimated limit: blue memory, orange arithmetic)", fontsize=9)


def _draw_roofline(axes: Any, points: Sequence[ProfileTotal], mark: str) -> None:
    most = max(one.share for one in points)
    axes.scatter(
        [one.intensity for one in points],
        [one.flops_per_s for one in points],
        s=[20 + 300 * one.share / (most or 1) for one in points],
        color=[_BOUNDS.get(one.bound_estimate, _UNKNOWN) for one in points],
        alpha=0.7,
    )
    short = make_shortener(points)
    for one in points[:_POINTS_NAMED]:
        name, point = _escape_label(", ".join(one.onnx_nodes) or short(one.name), 24), (one.intensity, one.flops_per_s)
        axes.annotate(name, point, (6, 4), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.2)
    axes.grid(True, which="both", linewidth=0.3)
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("operations per second")
    axes.set_title(f"estimated work by measured time{mark}", fontsize=9)


def _draw_timeline(axes: Any, rows: Sequence[OpRow], mark: str) -> None:
    import matplotlib

    start = rows[0].start_ns
    end = max(row.start_ns + row.duration_ns for row in rows)
    unit, size = _choose_unit(end - start)
    for number, name in enumerate(dict.fromkeys(map(type_of, rows))):
        own = [row for row in rows if type_of(row) == name]
        spans = [((row.start_ns - start) / size, row.duration_ns / size) for row in own]
        colour, lane = matplotlib.colormaps["tab20"](number % 20), (_LANES.index(own[0].kind), 1)
        axes.broken_barh(spans, lane, color=colour, edgecolor="white", linewidth=0.3, label=_escape_label(name))
    for row in rows:
        if row.duration_ns >= _LABELLED_FROM * (end - start):
            middle = (row.start_ns - start + row.duration_ns / 2) / size
            upright = 90 if row.kind == "compute" else 0
            name, height = _escape_label(", ".join(row.onnx_nodes) or row.op, 24), _LANES.index(row.kind) + 0.5
            axes.text(middle, height, name, ha="center", va="center", rotation=upright, fontsize=7, clip_on=True)
    axes.set_yticks([0.5, 1.5], _LANES)
    axes.set_ylim(0, 2)
    axes.set_xlim(0, (end - start) / size or 1)
    axes.set_xlabel(f"{unit} of the median iteration{mark}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
