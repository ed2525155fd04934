"""Two runs side by side, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hil.controller.storage.texts import counted, seconds
from hil.controller.workloads.suites.reports.diff import ITERATIONS, Changed, Moved, RunDiff
from hil.controller.workloads.suites.reports.markdown import as_name, as_text
from hil.controller.workloads.suites.reports.terminal import COLOURS
from hil.controller.workloads.suites.reports.totals import is_failing, kind_of

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 20
_LISTED = 200
_TITLES = {
    "broke": "broke",
    "mended": "mended",
    "still_failing": "still failing",
    "new": "new",
    "gone": "gone",
}
_CHANGES = {
    "device_p50_ns": "device time",
    "artifact_bytes": "artifact size",
    "max_abs": "largest error",
    "sqnr_db": "SQNR",
}


def print_diff(console: Console, diff: RunDiff) -> None:
    """What broke first, with the command that repeats it; at most 20 lines of a kind."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Text(f"{diff.before.folder} -> {diff.after.folder}", style="bold"), soft_wrap=True)
    for note in diff.notes:
        console.print(Text(f"  {note}", style="yellow"))
    console.print(Text(_counts(diff)))
    for name, title in _TITLES.items():
        moved: Sequence[Moved] = getattr(diff, name)
        if moved:
            console.print(Text(f"{title} ({len(moved)})", style="bold"))
        for one in moved[:_SHOWN]:
            after = (one.after, COLOURS["quiet" if name == "gone" else kind_of(one.after)])
            console.print(Text.assemble("  ", one.id, f"  {one.before} -> ", after))
            if name in ("broke", "new") and is_failing(one.after):
                console.print(Padding(Text(one.message), (0, 0, 0, 4), expand=False))
                console.print(Text(f"    {one.repeat}", style="cyan"), soft_wrap=True)
        if len(moved) > _SHOWN:
            console.print(Text(f"  and {len(moved) - _SHOWN} more", style="dim"))
    for what, title in _CHANGES.items():
        changed = [one for one in diff.changed if one.what == what]
        if changed:
            console.print(Text(f"{title} changed ({_better_worse(changed)})", style="bold"))
        for change in changed[:_SHOWN]:
            console.print(
                Text(f"  {change.id}{_others(change)}  {_change(change)}", style="red" if change.worse else "green")
            )
        if len(changed) > _SHOWN:
            console.print(Text(f"  and {len(changed) - _SHOWN} more", style="dim"))


def diff_markdown(diff: RunDiff) -> str:
    """The same for a CI job's summary; at most 200 lines of a kind."""
    lines = [
        f"## {as_text(diff.before.id)} → {as_text(diff.after.id)}\n",
        *(f"- {as_text(note)}" for note in diff.notes),
    ]
    lines += ["", _counts(diff) + "\n"]
    for name, title in _TITLES.items():
        moved: Sequence[Moved] = getattr(diff, name)
        if moved:
            lines += [
                f"### {title.capitalize()} ({len(moved)})\n",
                "| case | before | after | message |\n|---|---|---|---|",
            ]
            lines += [
                f"| {as_name(one.id)} | {as_text(one.before)} | {as_text(one.after)} | {as_text(one.message)} |"
                for one in moved[:_LISTED]
            ]
            lines += ["", *_more(len(moved))]
    for what, title in _CHANGES.items():
        changed = [one for one in diff.changed if one.what == what]
        if changed:
            head = f"<details><summary>{title.capitalize()} changed ({_better_worse(changed)})</summary>\n"
            lines += [head, "| case | change |\n|---|---|"]
            lines += [f"| {as_name(one.id)}{_others(one)} | {as_text(_change(one))} |" for one in changed[:_LISTED]]
            lines += ["", *_more(len(changed)), "</details>\n"]
    return "\n".join(lines)


def _more(count: int) -> list[str]:
    return [f"... and {count - _LISTED} more.\n"] if count > _LISTED else []


def _counts(diff: RunDiff) -> str:
    told = [f"{len(getattr(diff, name))} {title}" for name, title in _TITLES.items()]
    if diff.device_ratio is not None:
        over = counted(diff.device_cases, "case")
        told.append(f"device time {diff.device_ratio:.2f}x (geometric mean over {over})")
    if diff.device_few:
        told.append(f"device times of {counted(diff.device_few, 'case')} not compared: under {ITERATIONS} iterations")
    return ", ".join(told)


def _better_worse(changed: Sequence[Changed]) -> str:
    worse = sum(one.worse for one in changed)
    return f"{worse} worse, {len(changed) - worse} better"


def _others(change: Changed) -> str:
    return f" and {change.cases - 1} more in one program" if change.cases > 1 else ""


def _change(change: Changed) -> str:
    if change.what == "device_p50_ns":
        values = [seconds(value / 1e9) for value in (change.before, change.after)]
    elif change.what == "artifact_bytes":
        values = [f"{value / 1024:.1f} KiB" for value in (change.before, change.after)]
    else:
        unit = " dB" if change.what == "sqnr_db" else ""
        values = [f"{value:.4g}{unit}" for value in (change.before, change.after)]
    ratio = "" if change.ratio is None else f" ({change.ratio:.2f}x)"
    return f"{values[0]} -> {values[1]}{ratio}"
