"""Compare two runs of a suite: which cases broke or were fixed, and which numbers changed by how much."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.records.commands.models import DiffedNumber, DiffedRun, OutcomeChange, SuiteDiff
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.outcomes import ABSENT, NOT_RUN, classify_outcome, is_failing
from hil.controller.storage.screen.texts import format_count, format_joules, format_seconds, line
from hil.controller.workloads.suites.reports.changes import (
    ITERATIONS,
    Numbers,
    is_measured,
    iter_changes,
    measure_change,
    move_of,
)
from hil.controller.workloads.suites.reports.results import SuiteResults, load_run
from hil.controller.workloads.suites.reports.summary import COLOURS, escape_text, format_markdown_table, format_name
from hil.errors import EXIT_FAIL, EXIT_OK

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 20
_LISTED = 200
_MOVED = ("broke", "fixed", "still_failing", "new", "gone")
# Number -> title and format.
_CHANGES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "device_p50_ns": ("device time", lambda value: format_seconds(value / 1e9)),
    "artifact_bytes": ("artifact size", lambda value: f"{value / 1024:.1f} KiB"),
    "joules": ("energy", format_joules),
    "max_abs": ("largest error", "{:.4g}".format),
    "sqnr_db": ("SQNR", "{:.4g} dB".format),
}


@dataclass(frozen=True)
class CaseNumberChange:
    """A number of a case that changed by more than noise."""

    id: str
    # ``device_p50_ns``, ``artifact_bytes``, ``joules``, ``max_abs`` or ``sqnr_db`` (the last two for ``output``).
    # Device times are compared if both runs timed enough iterations. A change also requires that the slower median
    # exceeds 90 % of the faster run's times.
    what: str
    before: float
    after: float
    ratio: float | None  # after/before; None for SQNR (a logarithm) and for a division by zero
    worse: bool  # slower, larger, or further from the reference
    cases: int = 1  # cases that share this program; ``id`` is the first
    output: str = ""  # output with the largest change; regressions have priority


@dataclass(frozen=True)
class RunDiff:
    """Differences between two runs."""

    before: SuiteResults
    after: SuiteResults
    notes: tuple[str, ...]  # other differences: flow, boards, versions, cases that did not run
    broke: tuple[OutcomeChange, ...]  # passed before, fails now, whether expected or not
    fixed: tuple[OutcomeChange, ...]  # failed before, passes now
    still_failing: tuple[OutcomeChange, ...]  # fails in both
    new: tuple[OutcomeChange, ...]  # only in the later run; failing cases first
    gone: tuple[OutcomeChange, ...]  # only in the earlier run
    changed: tuple[CaseNumberChange, ...]  # numbers that changed by more than noise; the largest change per kind first
    # Geometric mean of the device time ratios, over the ``device_cases`` cases with comparable times in both
    # runs. None without such cases.
    device_ratio: float | None
    device_cases: int
    device_few: int  # cases without enough timed iterations, or with grade F

    @property
    def is_worse(self) -> bool:
        """Whether a case broke, or a new case fails."""
        return bool(self.broke) or any(is_failing(one.after) for one in self.new)


def compare_runs(a: Path, b: Path) -> RunDiff:
    """Compare an earlier run ``a`` with a later run ``b``. Raises UsageError if a directory is not a suite run."""
    before, after = load_run(a), load_run(b)
    old, new = ({record.id: record for record in run.records} for run in (before, after))
    both = [(old[record.id], record) for record in after.records if record.id in old]
    moved: defaultdict[str, list[OutcomeChange]] = defaultdict(list)
    for was, now in both:
        if kind := move_of(was.ended, now.ended):
            message = line(now.message or was.message)
            moved[kind].append(OutcomeChange(now.id, was.ended, now.ended, message, now.repeat))
    for one in sorted(after.records, key=lambda one: not is_failing(one.ended)):
        if one.id not in old:
            where = NOT_RUN if one.id in before.missing else ABSENT
            moved["new"].append(OutcomeChange(one.id, where, one.ended, line(one.message), one.repeat))
    for one in before.records:
        if one.id not in new:
            where = NOT_RUN if one.id in after.missing else ABSENT
            moved["gone"].append(OutcomeChange(one.id, one.ended, where, line(one.message), one.repeat))
    timed = [(was, now) for was, now in both if was.device_p50_ns and now.device_p50_ns]
    measured = [(was, now) for was, now in timed if is_measured(Numbers.of(was), Numbers.of(now))]
    ratios = [float(now.device_p50_ns or 0) / (was.device_p50_ns or 1) for was, now in measured]
    programs = _group_by_program(before), _group_by_program(after)
    changed = [change for was, now in both for change in _list_number_changes(was, now, *programs)]
    return RunDiff(
        before=before,
        after=after,
        notes=tuple(_list_setup_changes(before, after)),
        **{name: tuple(moved[name]) for name in _MOVED},
        changed=tuple(sorted(changed, key=lambda one: (one.what, not one.worse, -_measure_change(one)))),
        device_ratio=statistics.geometric_mean(ratios) if ratios else None,
        device_cases=len(ratios),
        device_few=len(timed) - len(ratios),
    )


def _list_setup_changes(a: SuiteResults, b: SuiteResults) -> Iterable[str]:
    """Yield differences between the runs other than results."""
    for what in ("suite", "flow", "runtime"):
        if (was := getattr(a, what)) != (now := getattr(b, what)):
            yield f"{what}: {was or '-'} before, {now or '-'} after"
    if set(a.boards) != set(b.boards):
        yield f"boards: {', '.join(a.boards) or '-'} before, {', '.join(b.boards) or '-'} after"
    for tool in sorted({*a.versions, *b.versions}):
        if (was := a.versions.get(tool, "-")) != (now := b.versions.get(tool, "-")):
            yield f"{tool}: {was} before, {now} after"
    for run, when in ((a, "before"), (b, "after")):
        yield from (f"{when}: {note}" for note in run.notes)


def _group_by_program(run: SuiteResults) -> Mapping[str, Sequence[str]]:
    """Return cases by program, in the suite's order."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for record in run.records:
        if record.program:
            found[record.program].append(record.id)
    return found


def _list_number_changes(
    was: CaseRecord, now: CaseRecord, before: Mapping[str, Sequence[str]], after: Mapping[str, Sequence[str]]
) -> Iterable[CaseNumberChange]:
    """Yield the changed numbers of a case. ``before`` and ``after`` are results from :func:`_group_by_program`."""
    users = after.get(now.program, [now.id])
    # Compare the sizes only if the programs contain the same cases, because each case affects the size.
    same = users[0] == now.id and set(users) == set(before.get(was.program, [was.id]))
    for one in iter_changes(Numbers.of(was), Numbers.of(now), size_counts=same):
        cases = len(users) if one.what == "artifact_bytes" else 1
        yield CaseNumberChange(now.id, one.what, one.before, one.after, one.ratio, one.worse, cases, one.output)


def _measure_change(change: CaseNumberChange) -> float:
    return measure_change(change.ratio, change.before, change.after)


def record_diff(diff: RunDiff) -> SuiteDiff:
    """Return the comparison as a record."""
    return SuiteDiff(
        before=_record_run(diff.before),
        after=_record_run(diff.after),
        notes=list(diff.notes),
        counts={name: len(getattr(diff, name)) for name in (*_MOVED, "changed")},
        **{name: list(getattr(diff, name)) for name in _MOVED},
        changed=[DiffedNumber(**vars(one)) for one in diff.changed],
        device_ratio=diff.device_ratio,
        device_cases=diff.device_cases,
        device_few=diff.device_few,
        exit_code=EXIT_FAIL if diff.is_worse else EXIT_OK,
    )


def _record_run(run: SuiteResults) -> DiffedRun:
    return DiffedRun(
        folder=str(run.folder),
        cases=len(run.records),
        id=run.id,
        suite=run.suite,
        flow=run.flow,
        runtime=run.runtime,
        boards=list(run.boards),
        started=run.started,
        finished=run.finished,
        exit_code=run.exit_code,
        versions=dict(run.versions),
    )


def print_diff(console: Console, diff: RunDiff) -> None:
    """Print the comparison, broken cases first, with the commands that repeat them.

    Print at most 20 lines of a kind.
    """
    from rich.padding import Padding
    from rich.text import Text

    console.print(Text(f"{diff.before.folder} -> {diff.after.folder}", style="bold"), soft_wrap=True)
    for note in diff.notes:
        console.print(Text(f"  {note}", style="yellow"))
    console.print(Text(_format_counts(diff)))
    for name, title, found in _group_differences(diff):
        console.print(Text(title, style="bold"))
        for one in found[:_SHOWN]:
            if isinstance(one, CaseNumberChange):
                style = "red" if one.worse else "green"
                console.print(Text(f"  {one.id}{_format_other_cases(one)}  {_format_change(one)}", style=style))
                continue
            after = (one.after, COLOURS["quiet" if name == "gone" else classify_outcome(one.after)])
            console.print(Text.assemble("  ", one.id, f"  {one.before} -> ", after))
            if name in ("broke", "new") and is_failing(one.after):
                console.print(Padding(Text(one.message), (0, 0, 0, 4), expand=False))
                console.print(Text(f"    {one.repeat}", style="cyan"), soft_wrap=True)
        if len(found) > _SHOWN:
            console.print(Text(f"  and {len(found) - _SHOWN} more", style="dim"))


def format_diff_markdown(diff: RunDiff) -> str:
    """Return the comparison as Markdown for a CI job's summary, with at most 200 lines of a kind."""
    lines = [f"## {escape_text(diff.before.id)} → {escape_text(diff.after.id)}\n"]
    lines += [*(f"- {escape_text(note)}" for note in diff.notes), "", _format_counts(diff) + "\n"]
    for name, title, found in _group_differences(diff):
        title, shown = title[:1].upper() + title[1:], found[:_LISTED]
        left = ["", *([f"... and {len(found) - _LISTED} more\n"] if len(found) > _LISTED else [])]
        if name in _MOVED:
            rows = [(format_name(one.id), *map(escape_text, (one.before, one.after, one.message))) for one in shown]
            lines += [f"### {title}\n", *format_markdown_table(["case", "before", "after", "message"], rows), *left]
        else:
            rows = [
                (f"{format_name(one.id)}{_format_other_cases(one)}", escape_text(_format_change(one))) for one in shown
            ]
            lines += [f"<details><summary>{title}</summary>\n", *format_markdown_table(["case", "change"], rows)]
            lines += [*left, "</details>\n"]
    return "\n".join(lines)


def _group_differences(diff: RunDiff) -> Iterable[tuple[str, str, Sequence[Any]]]:
    """Yield the nonempty kinds of differences: name, title and items."""
    for name in _MOVED:
        if moved := getattr(diff, name):
            yield name, f"{name.replace('_', ' ')} ({len(moved)})", moved
    for what, (title, _) in _CHANGES.items():
        if changed := [one for one in diff.changed if one.what == what]:
            worse = sum(one.worse for one in changed)
            yield what, f"{title} changed ({worse} worse, {len(changed) - worse} better)", changed


def _format_counts(diff: RunDiff) -> str:
    parts = [f"{len(getattr(diff, name))} {name.replace('_', ' ')}" for name in _MOVED]
    if diff.device_ratio is not None:
        over = format_count(diff.device_cases, "case")
        parts.append(f"device time {diff.device_ratio:.2f}x (geometric mean over {over})")
    if diff.device_few:
        parts.append(
            f"device times of {format_count(diff.device_few, 'case')} not compared: "
            f"fewer than {ITERATIONS} iterations, or grade F"
        )
    return ", ".join(parts)


def _format_other_cases(change: CaseNumberChange) -> str:
    return f" and {change.cases - 1} more in the same program" if change.cases > 1 else ""


def _format_change(change: CaseNumberChange) -> str:
    shown = _CHANGES[change.what][1]
    ratio = "" if change.ratio is None else f" ({change.ratio:.2f}x)"
    output = f"output {change.output}: " if change.output else ""
    return f"{output}{shown(change.before)} -> {shown(change.after)}{ratio}"
