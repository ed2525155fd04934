"""Compare two runs of a suite: which cases broke or were fixed, and which numbers changed by how much."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hil.controller.storage.texts import counted, line, seconds
from hil.controller.workloads.suites.reports.results import SuiteResults, is_failing, kind_of, load_run, number, worst
from hil.controller.workloads.suites.reports.summary import COLOURS, as_name, as_text
from hil.controller.workloads.suites.store import CaseRecord
from hil.core.text import jsonable

if TYPE_CHECKING:
    from rich.console import Console

# Smaller differences are noise. Device times must also exceed the variation within a run: of 314 cases with 20
# iterations each, run twice on a busy machine, 41 medians differed by more than the ratio, and 3 of them by more than
# that.
ITERATIONS = 5
_DEVICE_NS = 50_000.0
_DEVICE_RATIO = 1.2
_SQNR_DB = 1.0
_MAX_ABS_RATIO = 2.0
_BYTES_RATIO = 1.02

ABSENT, NOT_RUN = "absent", "not run"

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


@dataclass(frozen=True)
class Moved:
    """A case that is in one run only, or whose outcome is listed."""

    id: str
    # before, after: outcomes regardless of expectations; or ``absent``, ``not run``.
    before: str
    after: str
    message: str = ""  # of the later run, or else of the earlier one
    repeat: str = ""


@dataclass(frozen=True)
class Changed:
    """A number of a case that changed beyond noise."""

    id: str
    # ``device_p50_ns``, ``artifact_bytes``, ``max_abs`` or ``sqnr_db`` (the last two of the worst output). A device
    # time counts if both runs timed several iterations and the slower median exceeds 90 % of the faster run's times.
    what: str
    before: float
    after: float
    ratio: float | None  # after/before; None for SQNR, a logarithm, and for a division by zero
    worse: bool  # whether it is slower, larger, or further from the reference
    cases: int = 1  # number of cases that share the program whose size this is; the first of them is named


@dataclass(frozen=True)
class RunDiff:
    """The differences of two runs."""

    before: SuiteResults
    after: SuiteResults
    notes: tuple[str, ...]  # on differences besides the results: flow, boards, versions, cases that were not run
    broke: tuple[Moved, ...]  # passed before, fails now, whether expected or not
    mended: tuple[Moved, ...]  # failed before, passes now
    still_failing: tuple[Moved, ...]  # fails in both
    new: tuple[Moved, ...]  # in the later run only, those that fail first
    gone: tuple[Moved, ...]  # in the earlier run only
    changed: tuple[Changed, ...]  # numbers that changed beyond noise, the largest change of each kind first
    # geometric mean of the ratios of device times, over the ``device_cases`` for which both runs timed several
    # iterations; None without any.
    device_ratio: float | None
    device_cases: int
    device_few: int  # number of cases whose device times are not compared, since a run timed too few iterations

    @property
    def is_worse(self) -> bool:
        """Whether a case broke, or a new one fails."""
        return bool(self.broke) or any(is_failing(one.after) for one in self.new)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a JSON document."""
        parts = ("broke", "mended", "still_failing", "new", "gone", "changed")
        found: dict[str, Any] = {
            **{name: _run_json(run) for name, run in (("before", self.before), ("after", self.after))},
            "notes": list(self.notes),
            "counts": {name: len(getattr(self, name)) for name in parts},
            **{name: [asdict(one) for one in getattr(self, name)] for name in parts},
            "device_ratio": self.device_ratio,
            "device_cases": self.device_cases,
            "device_few": self.device_few,
        }
        return {key: jsonable(value) for key, value in found.items()}


def diff_runs(a: Path, b: Path) -> RunDiff:
    """Compare an earlier run ``a`` with a later one ``b``, case by case.

    Raises:
        UsageError: one of them holds no suite run.
    """
    before, after = load_run(a), load_run(b)
    old, new = ({record.id: record for record in run.records} for run in (before, after))
    both = [(old[record.id], record) for record in after.records if record.id in old]
    failing = {True: "still_failing", False: "broke"}
    sorted_out: dict[str, list[Moved]] = {"broke": [], "mended": [], "still_failing": []}
    for was, now in both:
        if is_failing(now.ended):
            sorted_out[failing[is_failing(was.ended)]].append(_moved(was, now))
        elif is_failing(was.ended) and now.ended != "SKIP":
            sorted_out["mended"].append(_moved(was, now))
    times = [(was.device_p50_ns, now.device_p50_ns, _measured(was, now)) for was, now in both]
    ratios = [b / a for a, b, measured in times if a and b and measured]
    return RunDiff(
        before=before,
        after=after,
        notes=tuple(_notes(before, after)),
        **{name: tuple(found) for name, found in sorted_out.items()},
        new=tuple(
            Moved(one.id, NOT_RUN if one.id in before.missing else ABSENT, one.ended, line(one.message), one.repeat)
            for one in sorted(after.records, key=lambda one: not is_failing(one.ended))
            if one.id not in old
        ),
        gone=tuple(
            Moved(one.id, one.ended, NOT_RUN if one.id in after.missing else ABSENT, line(one.message), one.repeat)
            for one in before.records
            if one.id not in new
        ),
        changed=tuple(_changes(before, after, both)),
        device_ratio=statistics.geometric_mean(ratios) if ratios else None,
        device_cases=len(ratios),
        device_few=sum(bool(a and b and not measured) for a, b, measured in times),
    )


def _moved(was: CaseRecord, now: CaseRecord) -> Moved:
    return Moved(now.id, was.ended, now.ended, line(now.message or was.message), now.repeat)


def _notes(a: SuiteResults, b: SuiteResults) -> Iterable[str]:
    """Yield differences of the runs besides their results."""
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


def _changes(a: SuiteResults, b: SuiteResults, both: Sequence[tuple[CaseRecord, CaseRecord]]) -> list[Changed]:
    found = [change for was, now in both for change in (*_slower_or_faster(was, now), *_nearer_or_further(was, now))]
    found += _larger_or_smaller(both, _users(a), _users(b))
    return sorted(found, key=lambda one: (one.what, not one.worse, -_size(one)))


def _measured(was: CaseRecord, now: CaseRecord) -> bool:
    return min(was.iterations, now.iterations) >= ITERATIONS


def _slower_or_faster(was: CaseRecord, now: CaseRecord) -> Iterable[Changed]:
    a, b = was.device_p50_ns, now.device_p50_ns
    if not a or not b or not _measured(was, now) or min(a, b) < _DEVICE_NS or not _beyond(a, b, _DEVICE_RATIO):
        return
    faster = was if a < b else now
    if max(a, b) > (faster.device_p90_ns or 0.0):
        yield Changed(now.id, "device_p50_ns", a, b, b / a, b > a)


def _users(run: SuiteResults) -> Mapping[str, Sequence[str]]:
    """Return program -> its cases, in the suite's order."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for record in run.records:
        if record.program:
            found[record.program].append(record.id)
    return found


def _larger_or_smaller(
    both: Iterable[tuple[CaseRecord, CaseRecord]],
    before: Mapping[str, Sequence[str]],
    after: Mapping[str, Sequence[str]],
) -> Iterable[Changed]:
    """Yield changed sizes of programs with the same cases: other cases in a program change its size."""
    for was, now in both:
        users = after.get(now.program, [now.id])
        if users[0] != now.id or set(users) != set(before.get(was.program, [was.id])):
            continue
        a, b = float(was.artifact_bytes or 0), float(now.artifact_bytes or 0)
        if a and b and _beyond(a, b, _BYTES_RATIO):
            yield Changed(now.id, "artifact_bytes", a, b, b / a, b > a, len(users))


def _nearer_or_further(was: CaseRecord, now: CaseRecord) -> Iterable[Changed]:
    old, new = (_statistics(record) for record in (was, now))
    a, b = (number(one.get("max_abs")) for one in (old, new))
    if a is not None and b is not None and a != b and (min(a, b) == 0 or _beyond(a, b, _MAX_ABS_RATIO)):
        yield Changed(now.id, "max_abs", a, b, b / a if a else None, b > a)
    a, b = (number(one.get("sqnr_db")) for one in (old, new))
    if a is not None and b is not None and a != b and not abs(a - b) < _SQNR_DB:
        yield Changed(now.id, "sqnr_db", a, b, None, b < a)


def _statistics(record: CaseRecord) -> Mapping[str, Any]:
    index = worst(record.outputs)
    return {} if index is None else record.outputs[index]


def _beyond(a: float, b: float, ratio: float) -> bool:
    return max(a, b) > ratio * min(a, b)


def _size(change: Changed) -> float:
    """Return how large a change is, to sort those of one kind."""
    if change.ratio:
        return abs(math.log(change.ratio)) if math.isfinite(change.ratio) else math.inf
    difference = abs(change.after - change.before)
    return math.inf if math.isnan(difference) else difference


def _run_json(run: SuiteResults) -> dict[str, Any]:
    names = ("id", "suite", "flow", "runtime", "boards", "started", "finished", "exit_code", "versions")
    return {"folder": str(run.folder), "cases": len(run.records), **{name: getattr(run, name) for name in names}}


def print_diff(console: Console, diff: RunDiff) -> None:
    """Print what broke first, with the commands that repeat it; at most 20 lines of a kind."""
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
    """Return the comparison for a CI job's summary; at most 200 lines of a kind."""
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
    parts = [f"{len(getattr(diff, name))} {title}" for name, title in _TITLES.items()]
    if diff.device_ratio is not None:
        over = counted(diff.device_cases, "case")
        parts.append(f"device time {diff.device_ratio:.2f}x (geometric mean over {over})")
    if diff.device_few:
        parts.append(f"device times of {counted(diff.device_few, 'case')} not compared: under {ITERATIONS} iterations")
    return ", ".join(parts)


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
