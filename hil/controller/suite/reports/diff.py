"""Two runs of a suite side by side: what broke, what was mended, what changed by how much."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hil.controller.runs import jsonable
from hil.controller.suite.record import CaseRecord
from hil.controller.suite.reports.load import SuiteResults, load_run
from hil.controller.suite.reports.texts import line
from hil.controller.suite.reports.totals import is_failing, number, worst

# Below these a difference is taken for noise.
_DEVICE_NS = 20_000.0
_DEVICE_RATIO = 1.2
_SQNR_DB = 1.0
_MAX_ABS_RATIO = 2.0
_BYTES_RATIO = 1.02

ABSENT, NOT_RUN = "absent", "not run"


@dataclass(frozen=True)
class Moved:
    """A case whose outcome is worth a line.

    Attributes:
        id: the case.
        before, after: outcomes without regard to what was expected; or ``absent``, ``not run``.
        message: of the later run, or of the earlier one where the later has none.
        repeat: the command that repeats it.
    """

    id: str
    before: str
    after: str
    message: str = ""
    repeat: str = ""


@dataclass(frozen=True)
class Changed:
    """A number of a case that changed beyond noise.

    Attributes:
        id: the case.
        what: ``device_p50_ns``, ``artifact_bytes``, ``max_abs`` or ``sqnr_db`` (the last two of the worst output).
        before, after: the values.
        ratio: after/before; None for SQNR, which is a logarithm, and where there is none.
        worse: slower, larger, further from the reference.
    """

    id: str
    what: str
    before: float
    after: float
    ratio: float | None
    worse: bool


@dataclass(frozen=True)
class RunDiff:
    """What lies between two runs.

    Attributes:
        before, after: the runs.
        notes: in what the two differ besides their results: flow, boards, versions, and what was not run.
        broke: passed before, fails now, expected or not.
        mended: failed before, passes now.
        still_failing: fails in both.
        new: in the later run only, those that fail first.
        gone: in the earlier run only.
        changed: numbers that changed beyond noise, the largest change of each kind first.
        device_ratio: geometric mean of the device times' ratios, over the
            ``device_cases`` that have both; None without.
    """

    before: SuiteResults
    after: SuiteResults
    notes: tuple[str, ...]
    broke: tuple[Moved, ...]
    mended: tuple[Moved, ...]
    still_failing: tuple[Moved, ...]
    new: tuple[Moved, ...]
    gone: tuple[Moved, ...]
    changed: tuple[Changed, ...]
    device_ratio: float | None
    device_cases: int

    @property
    def is_worse(self) -> bool:
        """Whether something fails that did not: a case broke, or a new one fails."""
        return bool(self.broke) or any(is_failing(one.after) for one in self.new)

    def to_json(self) -> dict[str, Any]:
        """What JSON can say of it."""
        parts = ("broke", "mended", "still_failing", "new", "gone", "changed")
        found: dict[str, Any] = {
            **{name: _run_json(run) for name, run in (("before", self.before), ("after", self.after))},
            "notes": list(self.notes),
            "counts": {name: len(getattr(self, name)) for name in parts},
            **{name: [asdict(one) for one in getattr(self, name)] for name in parts},
            "device_ratio": self.device_ratio,
            "device_cases": self.device_cases,
        }
        return {key: jsonable(value) for key, value in found.items()}


def diff_runs(a: Path, b: Path) -> RunDiff:
    """Compare two runs, case by case.

    Args:
        a: the earlier run's folder.
        b: the later one's.

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
    ratios = [now.device_p50_ns / was.device_p50_ns for was, now in both if was.device_p50_ns and now.device_p50_ns]
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
        changed=tuple(_changes(both)),
        device_ratio=statistics.geometric_mean(ratios) if ratios else None,
        device_cases=len(ratios),
    )


def _moved(was: CaseRecord, now: CaseRecord) -> Moved:
    return Moved(now.id, was.ended, now.ended, line(now.message or was.message), now.repeat)


def _notes(a: SuiteResults, b: SuiteResults) -> Iterable[str]:
    """In what the runs differ besides their results."""
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


def _changes(both: list[tuple[CaseRecord, CaseRecord]]) -> list[Changed]:
    found = [change for was, now in both for change in _changes_of(was, now)]
    return sorted(found, key=lambda one: (one.what, not one.worse, -_size(one)))


def _changes_of(was: CaseRecord, now: CaseRecord) -> Iterable[Changed]:
    a, b = was.device_p50_ns, now.device_p50_ns
    if a and b and min(a, b) >= _DEVICE_NS and _beyond(a, b, _DEVICE_RATIO):
        yield Changed(now.id, "device_p50_ns", a, b, b / a, b > a)
    if was.artifact_bytes and now.artifact_bytes and _beyond(was.artifact_bytes, now.artifact_bytes, _BYTES_RATIO):
        a, b = float(was.artifact_bytes), float(now.artifact_bytes)
        yield Changed(now.id, "artifact_bytes", a, b, b / a, b > a)
    old, new = (_statistics(record) for record in (was, now))
    a, b = (number(one.get("max_abs")) for one in (old, new))
    if a is not None and b is not None and a != b and (min(a, b) == 0 or _beyond(a, b, _MAX_ABS_RATIO)):
        yield Changed(now.id, "max_abs", a, b, b / a if a else None, b > a)
    a, b = (number(one.get("sqnr_db")) for one in (old, new))
    if a is not None and b is not None and a != b and not abs(a - b) < _SQNR_DB:
        yield Changed(now.id, "sqnr_db", a, b, None, b < a)


def _statistics(record: CaseRecord) -> Mapping[str, Any]:
    place = worst(record.outputs)
    return {} if place is None else record.outputs[place]


def _beyond(a: float, b: float, ratio: float) -> bool:
    return max(a, b) > ratio * min(a, b)


def _size(change: Changed) -> float:
    """How large a change is, to sort those of one kind."""
    if change.ratio:
        return abs(math.log(change.ratio)) if math.isfinite(change.ratio) else math.inf
    difference = abs(change.after - change.before)
    return math.inf if math.isnan(difference) else difference


def _run_json(run: SuiteResults) -> dict[str, Any]:
    names = ("id", "suite", "flow", "runtime", "boards", "started", "finished", "exit_code", "versions")
    return {"folder": str(run.folder), "cases": len(run.records), **{name: getattr(run, name) for name in names}}
