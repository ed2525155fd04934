"""Print a roofline and the work of a model, and draw the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.analysis.profile.show import format_si, time_text
from hil.controller.analysis.profile.ticks.columns import TITLES, ProfileColumn, make_named_table
from hil.controller.analysis.roofline.chart import RoofChart, build_chart
from hil.controller.analysis.roofline.show_peaks import describe_origin, format_peak
from hil.controller.records.measurements.roofline import ModelWork, RooflineReport, RooflineRow
from hil.controller.storage.screen.pictures import make_figure, save_figure
from hil.controller.storage.screen.texts import format_count, line, make_plain
from hil.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH, _HEIGHT = 9, 6
_NAME_LENGTH = 24
_POINTS_NAMED = 6


def print_roofline(console: Console, report: RooflineReport, *, top: int) -> None:
    """Print the peaks, the whole model, the ``top`` operations, and the warnings."""
    from rich.text import Text

    where = ", ".join(filter(None, (make_plain(report.board), make_plain(report.runtime))))
    console.print(Text.assemble((make_plain(report.model), "bold"), f" on {where}"), soft_wrap=True)
    for title, text in list_facts(report):
        console.print(f"  {title:9}  {text}", highlight=False, soft_wrap=True)
    if report.rows:
        console.print()
        console.print(_build_table(console, report.rows[:top], TITLES[report.by]))
        if len(report.rows) > top:
            rest = sum(row.share for row in report.rows[top:])
            console.print(Text(f"  and {len(report.rows) - top} more with {rest:.1%} of the time", style="dim"))
    for text in report.warnings:
        console.print(Text(f"  {make_plain(text)}", style="yellow"), soft_wrap=True)


def list_facts(report: RooflineReport) -> list[tuple[str, str]]:
    """Return the facts about the peaks and the whole model, each with a title. Further peaks have no title."""
    facts = []
    peaks, whole = report.peaks, report.whole
    if peaks is not None:
        facts.append(("peaks", describe_origin(peaks)))
        facts += [("", f"{name}  {format_peak(peaks, value, 'op')}") for name, value in peaks.compute.items()]
        if peaks.memory is not None:
            facts.append(("", f"memory  {format_peak(peaks, peaks.memory, 'B')}"))
    more = "at least " if report.uncounted.operators else ""
    if whole.flops is not None and whole.bytes is not None:
        each = f", {whole.intensity:.3g} op/byte" if whole.intensity is not None else ""
        facts.append(
            ("work", f"{more}{format_si(whole.flops, 'op')} and {format_si(whole.bytes, 'B')} per iteration{each}")
        )
    if whole.time_ns is not None:
        facts.append(("time", f"{time_text(whole.time_ns)} per iteration"))
    if whole.flops_per_s is not None:
        speed = f"{format_si(whole.flops_per_s, 'op/s')}, {format_si(whole.bytes_per_s, 'B/s')}"
        tick = peaks.tick_hz if peaks is not None else None
        facts.append(("speed", speed + (f", {whole.flops_per_s / tick:.3g} op per tick" if tick else "")))
    if whole.attained is not None and whole.shortest_ns is not None:
        bound = f", mainly limited by {_BOUND_TEXTS[whole.bound]}" if whole.bound else ""
        shortest = f"{time_text(whole.shortest_ns)} at the peaks{bound}"
        facts.append(("roofline", f"{more}{format_attained(whole)} of the roofline: {shortest}"))
    return facts


_BOUND_TEXTS = {"compute": "arithmetic", "memory": "memory", "": ""}


def format_attained(row: RooflineRow) -> str:
    """Return the attained share with its interval; "-" if unknown."""
    if row.attained is None:
        return "-"
    text = f"{row.attained:.1%}"
    if row.interval is not None:
        text += f" ({row.interval.level:.0%}: {row.interval.low:.1%} to {row.interval.high:.1%})"
    return text + " above the peak" * row.is_above


def _build_table(console: Console, rows: Sequence[RooflineRow], title: str) -> Any:
    from rich.text import Text

    def number(value: float | None, unit: str) -> str:
        return format_si(value, unit)

    def short_range(row: RooflineRow) -> str:
        return "-" if row.interval is None else f"{row.interval.low:.0%} to {row.interval.high:.0%}"

    names = [Text(make_plain(row.name)) for row in rows]
    for name, row in zip(names, rows, strict=True):
        others = ", ".join(make_plain(one) for one in row.onnx_nodes if one != row.name)
        name.append(f"\n{others}" if others else "", "dim")
    columns = [
        ProfileColumn("time", [time_text(row.time_ns) if row.time_ns is not None else "-" for row in rows], 2),
        ProfileColumn("share", [f"{row.share:.1%}" for row in rows], 5),
        ProfileColumn("work", [number(row.flops, "op") for row in rows], 6),
        ProfileColumn("moved", [number(row.bytes, "B") for row in rows], 7),
        ProfileColumn("op/byte", ["-" if row.intensity is None else f"{row.intensity:.3g}" for row in rows], 8),
        ProfileColumn("speed", [number(row.flops_per_s, "op/s") for row in rows], 3),
        ProfileColumn("bound by", [row.bound or "-" for row in rows], 4),
        ProfileColumn(
            "attained",
            [("-" if row.attained is None else f"{row.attained:.1%}") + " !" * row.is_above for row in rows],
            1,
        ),
        ProfileColumn("99 %", [short_range(row) for row in rows], 9),
    ]
    return make_named_table(console, title, names, columns)


def print_work(console: Console, work: ModelWork, *, top: int) -> None:
    """Print the work of a model, and the ``top`` operators with the most operations."""
    from rich.text import Text

    name = f"{make_plain(work.model)}, {make_plain(work.function)}" if work.function else make_plain(work.model)
    console.print(Text(name, style="bold"), soft_wrap=True)
    more = "at least " if work.not_counted else ""
    console.print(f"  work    {more}{work.flops:,} operations", highlight=False)
    console.print(
        f"  moved   {more}{work.bytes:,} bytes, if every operator reads and writes the memory", highlight=False
    )
    if work.model_bytes is not None:
        console.print(f"  model   {work.model_bytes:,} bytes of inputs, weights and outputs", highlight=False)
    shown = sorted(work.operators, key=lambda one: -(one.flops or 0))[:top]
    columns = [
        ProfileColumn("operator", [Text(make_plain(one.op_type)) for one in shown], 4),
        ProfileColumn("work", [format_si(one.flops, "op") for one in shown], 1),
        ProfileColumn("moved", [format_si(one.bytes, "B") for one in shown], 2),
        ProfileColumn(
            "op/byte",
            ["-" if one.flops is None or not one.bytes else f"{one.flops / one.bytes:.3g}" for one in shown],
            3,
        ),
    ]
    if shown:
        console.print()
        console.print(make_named_table(console, "node", [Text(make_plain(one.name)) for one in shown], columns))
    if len(work.operators) > len(shown):
        console.print(Text(f"  and {len(work.operators) - len(shown)} more", style="dim"))
    if text := describe_missing(work):
        console.print(Text(f"  {text}", style="yellow"), soft_wrap=True)


def describe_missing(work: ModelWork) -> str:
    """Return which operators are not counted; "" if all are counted."""
    if not work.not_counted:
        return ""
    count = format_count(sum(work.not_counted.values()), "operator")
    types = ", ".join(f"{make_plain(name)} ({count})" for name, count in work.not_counted.items())
    return f"not counted: {count} of {len(work.operators)}: {types}"


def plot_roofline(path: Path, report: RooflineReport) -> None:
    """Draw the roofs and the operations. Raises UsageError if there is nothing to draw, or as for any picture."""
    chart = build_chart(report)
    if chart is None:
        raise UsageError(
            f"the roofline of {report.model} has no points to draw",
            hint="; ".join(report.warnings) or "profile again: hil run MODEL --profile DIR",
        )
    figure = make_figure(_WIDTH, _HEIGHT)
    _draw_chart(figure.subplots(), chart, report)
    save_figure(figure, path)


def _draw_chart(axes: Any, chart: RoofChart, report: RooflineReport) -> None:
    for roof in chart.roofs:
        axes.plot([x for x, _ in roof.line], [y for _, y in roof.line], label=_escape(roof.name))
    for number, point in enumerate(chart.points):
        is_whole = point.row.kind == "model"
        size = 40 + 240 * (1.0 if is_whole else point.row.share)
        axes.scatter([point.x], [point.y], s=size, marker="s" if is_whole else "o", alpha=0.7)
        if is_whole or number < _POINTS_NAMED:
            axes.annotate(_escape(point.row.name), (point.x, point.y), (6, 4), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*chart.x_range)
    axes.set_ylim(*chart.y_range)
    axes.grid(True, which="both", linewidth=0.3)
    axes.set_xlabel("operations per byte")
    axes.set_ylabel("operations per second")
    axes.set_title(_escape(f"{report.model} on {report.board}, {report.runtime}", 100), fontsize=10)
    if chart.roofs:
        axes.legend(loc="lower right", fontsize=8)


def _escape(text: str, longest: int = _NAME_LENGTH) -> str:
    # Escape dollar signs, because matplotlib parses text between them as a formula.
    return line(text, longest).replace("$", r"\$")
