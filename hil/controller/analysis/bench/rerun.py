"""Repeat a stored bench on its board, and report what differs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hil.controller.analysis.bench.job import run_bench
from hil.controller.analysis.bench.stats import BenchJob, compare_medians
from hil.controller.analysis.bench.store import read_bench
from hil.controller.devices.choosing.board_resolver import BOARD_VARIABLE
from hil.controller.devices.measuring.grading import FREQUENCY_SHARE, LOAD_CORES, WARMING_DEGC, grade_measurement
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.measurements.bench import SideRecord
from hil.controller.records.measurements.conditions import ConditionReading, Conditions, MeasurementGrade
from hil.controller.records.measurements.rerun import RerunDifference, RerunMeasurement, RerunRecord
from hil.controller.records.run import StoredProvenance
from hil.controller.storage.run_context import Progress
from hil.controller.storage.runs import Run, RunStore, write_json
from hil.errors import UsageError

_FIELDS = ("board_id", "agent_version", "runtime", "runtime_version", "device")


def rerun_bench(name: str, job: Job, *, settle_s: float | None, min_effect: float, screen: Progress) -> RerunRecord:
    """Measure the last program of a stored bench again, with the same number of iterations, and compare the medians.

    Args:
        name: a bench's directory, ID or file bench.json.
        job: directory for the new run, and optionally a board that replaces the stored board.

    Raises:
        UsageError: the run is not a bench, or measured nothing.
        KeyboardInterrupt: Ctrl-C before anything was measured.
    """
    store = RunStore(job.out)
    stored = store.open(name.removesuffix("bench.json") or "." if name.endswith("bench.json") else name)
    bench = read_bench(stored)
    old = bench.sides[-1]
    if old.times is None:
        what = "instructions, but no times" if old.clock == "icount" else "no measurement"
        raise UsageError(f"bench {stored.id} has {what}", hint="choose a bench that measured times")
    if note := _explain_variable(stored.record.request.get("board"), job.board):
        screen.note(note)
    repeated = BenchJob(
        replace(job, models=()),
        iterations=None if old.sustained else max(old.times.iterations // bench.concurrency, 1),
        sustained_s=old.sustained.requested_s if old.sustained else None,
        warmup=old.warmup,
        concurrency=bench.concurrency,
        against=str(stored.folder),
        check=bool(old.against),
        min_effect=min_effect,
        settle_s=settle_s,
    )
    record = run_bench(repeated, screen=screen)
    run, new = store.open(record.folder or record.id), record.sides[-1]
    grades = [_grade_side(side) for side in (old, new)]
    reasons = [*_list_reasons("the stored measurement", grades[0]), *_list_reasons("the new measurement", grades[1])]
    if old.clock != new.clock and new.clock is not None:
        reasons.append(f"measured with the {old.clock}'s clock, now with the {new.clock}'s clock")
    is_comparable = not reasons and new.times is not None
    found = RerunRecord(
        schema=1,
        board=new.board or old.board or "",
        stored=_record_measurement(stored, old, grades[0]),
        now=_record_measurement(run, new, grades[1]),
        comparison=compare_medians(old.times, new.times, min_effect=min_effect)
        if is_comparable and new.times
        else None,
        not_comparable=reasons,
        differences=[*_compare_provenance(stored, run), *_compare_conditions(old.conditions, new.conditions)],
        exit_code=record.exit_code,
    )
    write_json(run.folder / "rerun.json", found.to_json())
    return found


def _explain_variable(stored: object, board: str) -> str:
    """Return a note if HIL_BOARD replaces the stored board, or "". A lease sets the variable for all its commands."""
    if not board or board == stored or board != os.environ.get(BOARD_VARIABLE):
        return ""
    return f"HIL_BOARD selects {board} instead of the stored board {stored or ''}".rstrip()


def _grade_side(side: SideRecord) -> MeasurementGrade | None:
    """Grade a side as a separate measurement, even if it was measured in turns with another side."""
    if side.times is None or side.clock == "icount":
        return None
    return grade_measurement(side.conditions, side.times, clock=side.clock or "board")


def _list_reasons(which: str, grade: MeasurementGrade | None) -> list[str]:
    return [f"{which}: {reason}" for reason in grade.reasons] if grade is not None and grade.grade == "F" else []


def _record_measurement(run: Run, side: SideRecord, grade: MeasurementGrade | None) -> RerunMeasurement:
    outcome = side.outcome.value if side.outcome else ""
    return RerunMeasurement(id=run.id, folder=str(run.folder), outcome=outcome, times=side.times, grade=grade)


def _compare_provenance(stored: Run, new: Run) -> Iterator[RerunDifference]:
    """Yield different versions and properties of the board. Without a new provenance, nothing is known to differ."""
    old, now = (run.record.cases[-1].provenance for run in (stored, new))
    if old is None or now is None:
        return
    before, after = _list_facts(old), _list_facts(now)
    for name in dict.fromkeys([*before, *after]):
        if before.get(name, "") != after.get(name, ""):
            yield RerunDifference(name=name, stored=before.get(name, ""), now=after.get(name, ""))


def _list_facts(found: StoredProvenance) -> Mapping[str, str]:
    values: dict[str, Any] = {name.replace("_", " "): getattr(found, name) for name in _FIELDS}
    values |= {f"machine {name}": value for name, value in found.machine.items() if not isinstance(value, list)}
    values |= {one["name"]: one["text"] for one in found.readings if one.get("text")}
    values["simulated"] = ", ".join(found.simulated)
    return {name: str(value) for name, value in values.items() if value}


def _compare_conditions(old: Conditions | None, new: Conditions | None) -> Iterator[RerunDifference]:
    """Yield readings that differ by more than a measurement's grade allows."""
    if old is None or new is None:
        return
    before, after = ({one.name: one for one in found.readings} for found in (old, new))
    for name in before.keys() & after.keys():
        was, now = _find_typical(before[name]), _find_typical(after[name])
        unit = after[name].unit
        if was is None or now is None:
            continue
        limit = {"degC": WARMING_DEGC, "MHz": FREQUENCY_SHARE * max(was, now)}.get(unit)
        if limit is not None and abs(now - was) > limit:
            yield RerunDifference(name=name, stored=f"{was:.0f} {unit}", now=f"{now:.0f} {unit}")
    loads = old.other_load, new.other_load
    if None not in loads and abs((loads[1] or 0.0) - (loads[0] or 0.0)) > LOAD_CORES:
        yield RerunDifference(name="other load", stored=f"{loads[0]:.1f} cores", now=f"{loads[1]:.1f} cores")


def _find_typical(reading: ConditionReading) -> float | None:
    values = [reading.median, reading.after, reading.before]
    return next((float(one) for one in values if isinstance(one, int | float)), None)
