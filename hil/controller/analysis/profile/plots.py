"""Draw profiles: where the time goes, and what changed from one to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hil.controller.analysis.profile.diff import OpDiff, ProfileDiff
from hil.controller.analysis.profile.show import TITLES
from hil.controller.analysis.profile.totals import RunTimes, Total, run_times, shortener, totals, typical_iteration
from hil.controller.storage.pictures import new_figure, save_figure
from hil.controller.storage.texts import line, seconds
from hil.core.timeline import OpRow, Profile
from hil.errors import UsageError

_NAME_LONGEST = 60
_POINTS_NAMED = 5
_LANES = ("runtime", "compute")
_LABELLED_FROM = 0.06  # of the time line: narrower operations have no room for a name
_MEMORY, _COMPUTE, _UNKNOWN = "#3b6fb6", "#d9822b", "#9a9a9a"
_SLOWER, _FASTER = "#c0392b", "#2e8b57"
_BOUNDS = {"memory": _MEMORY, "compute": _COMPUTE, "": _UNKNOWN}


def plot_profile(path: Path, profile: Profile, *, by: str = "op", top: int = 20) -> None:
    """Draw the top totals as bars, one iteration as a time line, and the estimates as a roofline's points.

    Args:
        path: the file to write, PNG, SVG or PDF by its suffix.
        profile: with rows.
        by: a key of :data:`hil.controller.analysis.profile.totals.GROUPS`.
        top: number of bars.

    Raises:
        UsageError: matplotlib is not installed, the profile has no rows, or the suffix is unknown.
        StorageError: the file cannot be written.
    """
    found, iteration = totals(profile.rows, by), typical_iteration(profile.rows)
    if not found:
        hint = "; ".join(profile.notes)
        raise UsageError(f"the profile of {profile.model} has no operation to draw", hint=hint)
    points = [one for one in found if one.kind == "compute" and one.intensity and one.flops_per_s]
    shown = found[:top]
    height = 2.6 + 0.26 * len(shown)
    figure = new_figure(14, height + 2.2)
    panels = figure.add_gridspec(2, 2, height_ratios=(height, 2.2), width_ratios=(1.6, 1) if points else (1, 0.001))
    times = run_times(profile)
    timed = "" if times.timed_p50_ns is None else f", timed p50 {_time(times.timed_p50_ns)}"
    figure.suptitle(_text(f"{profile.model} on {profile.board}, {profile.runtime}{timed}", 150), fontsize=11)
    _draw_bars(figure.add_subplot(panels[0, 0]), shown, by, times)
    if points:
        _draw_roofline(figure.add_subplot(panels[0, 1]), points, times.mark)
    _draw_timeline(figure.add_subplot(panels[1, :]), iteration, times.mark)
    save_figure(figure, path)


def plot_diff(path: Path, diff: ProfileDiff, *, top: int = 20) -> None:
    """Draw the change of each operation's time, the largest first; if incomparable, each operation's share of its run.

    Args:
        path: the file to write, PNG, SVG or PDF by its suffix.
        diff: with operations.
        top: number of bars.

    Raises:
        UsageError: matplotlib is not installed, there is nothing to draw, or the suffix is unknown.
        StorageError: the file cannot be written.
    """
    shown = list(diff.ops)[:top]
    if not shown:
        raise UsageError(f"{diff.a} and {diff.b} have no operation to draw")
    figure = new_figure(11, 1.6 + 0.3 * len(shown))
    axes = figure.subplots()
    axes.set_title(f"{_text(f'{diff.a} -> {diff.b}', 120)}\n{diff.verdict}", fontsize=10)
    if diff.incomparable:
        for label, offset, costs in (("A", -0.2, [one.a for one in shown]), ("B", 0.2, [one.b for one in shown])):
            shares = [100 * cost.share if cost else 0.0 for cost in costs]
            axes.barh([row + offset for row in range(len(shown))], shares, 0.4, label=label)
        _name_bars(axes, [line(one.name, _NAME_LONGEST - 10) for one in shown])
        axes.set_xlabel(_text(f"% of its own run; times are not comparable: {diff.incomparable}", 120))
        axes.legend()
        save_figure(figure, path)
        return
    unit, size = _unit(max(abs(one.change_ns) for one in shown))
    axes.barh(
        range(len(shown)),
        [one.change_ns / size for one in shown],
        color=[_UNKNOWN if not one.change else _SLOWER if one.change_ns > 0 else _FASTER for one in shown],
    )
    _name_bars(axes, [f"{line(one.name, _NAME_LONGEST - 10)} {_ratio(one)}" for one in shown])
    axes.axvline(0, color="#444", linewidth=0.8)
    axes.set_xlabel(f"change in {unit} an iteration (grey: no change was shown)")
    save_figure(figure, path)


def _time(ns: float) -> str:
    return seconds(ns / 1e9)


def _unit(most_ns: float) -> tuple[str, float]:
    return next((one for one in (("s", 1e9), ("ms", 1e6), ("us", 1e3)) if most_ns >= one[1]), ("ns", 1.0))


def _ratio(one: OpDiff) -> str:
    return one.change if one.ratio is None else f"x{one.ratio:.3g}"


def _text(text: str, longest: int = _NAME_LONGEST) -> str:
    # matplotlib takes text between dollar signs for mathematics.
    return line(text, longest).replace("$", r"\$")


def _name_bars(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_text(name) for name in names], fontsize=8)
    axes.invert_yaxis()


def _draw_bars(axes: Any, shown: Sequence[Total], by: str, times: RunTimes) -> None:
    runs = max(times.iterations, 1)
    unit, size = _unit(shown[0].total_ns / runs)
    bars = axes.barh(
        range(len(shown)),
        [one.total_ns / runs / size for one in shown],
        color=[_BOUNDS.get(one.bound_estimate, _UNKNOWN) for one in shown],
    )
    axes.bar_label(bars, [f"{one.share:.1%}" for one in shown], padding=3, fontsize=8)
    axes.margins(x=0.12)
    short = shortener(shown)
    nodes = [f" ({', '.join(one.onnx_nodes)})" if by == "op" and one.onnx_nodes else "" for one in shown]
    _name_bars(axes, [f"{short(one.name)}{of}" for one, of in zip(shown, nodes, strict=True)])
    axes.set_xlabel(f"{unit} a run{times.mark and f' under the profiler{times.mark}'}")
    axes.set_title(f"time by {TITLES[by]} (blue: bound by memory, orange: by arithmetic, estimated)", fontsize=9)


def _draw_roofline(axes: Any, points: Sequence[Total], mark: str) -> None:
    most = max(one.share for one in points)
    axes.scatter(
        [one.intensity for one in points],
        [one.flops_per_s for one in points],
        s=[20 + 300 * one.share / (most or 1) for one in points],
        color=[_BOUNDS.get(one.bound_estimate, _UNKNOWN) for one in points],
        alpha=0.7,
    )
    short = shortener(points)
    for one in points[:_POINTS_NAMED]:
        axes.annotate(
            _text(", ".join(one.onnx_nodes) or short(one.name), 24),
            (one.intensity, one.flops_per_s),
            (6, 4),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.2)
    axes.grid(True, which="both", linewidth=0.3)
    axes.set_xlabel("operations a byte")
    axes.set_ylabel("operations a second")
    axes.set_title(f"work (estimated) by time (measured{mark})", fontsize=9)


def _type(row: OpRow) -> str:
    return "+".join(row.op_types) or row.kind


def _draw_timeline(axes: Any, rows: Sequence[OpRow], mark: str) -> None:
    import matplotlib

    start = rows[0].start_ns
    end = max(row.start_ns + row.duration_ns for row in rows)
    unit, size = _unit(end - start)
    types = list(dict.fromkeys(map(_type, rows)))
    colours = {name: matplotlib.colormaps["tab20"](number % 20) for number, name in enumerate(types)}
    for name in types:
        lanes = [(row, _LANES.index(row.kind)) for row in rows if _type(row) == name]
        spans = [((row.start_ns - start) / size, row.duration_ns / size) for row, _ in lanes]
        axes.broken_barh(
            spans, (lanes[0][1], 1), color=colours[name], edgecolor="white", linewidth=0.3, label=_text(name)
        )
    for row in rows:
        if row.duration_ns >= _LABELLED_FROM * (end - start):
            middle = (row.start_ns - start + row.duration_ns / 2) / size
            upright = 90 if row.kind == "compute" else 0
            name = _text(", ".join(row.onnx_nodes) or row.op, 24)
            lane = _LANES.index(row.kind) + 0.5
            axes.text(middle, lane, name, ha="center", va="center", rotation=upright, fontsize=7, clip_on=True)
    axes.set_yticks([0.5, 1.5], _LANES)
    axes.set_ylim(0, 2)
    axes.set_xlim(0, (end - start) / size or 1)
    axes.set_xlabel(f"{unit} of one iteration (the one in the middle){mark}")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
