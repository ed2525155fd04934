"""Time a probe on a board: with a bench, or on the clock of a GPU with a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.analysis.bench.job import run_bench
from hil.controller.analysis.bench.stats import BenchJob
from hil.controller.analysis.profile.store import read_profile
from hil.controller.analysis.roofline.probes import Probe, write_probe
from hil.controller.devices.measuring.time_statistics import compute_median_interval
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.base import Interval, read_record
from hil.controller.records.measurements.bench import SideRecord
from hil.controller.records.measurements.roofline import PeakClock, PeakPoint
from hil.controller.records.run import RunRecord, StoredProvenance
from hil.controller.storage.run_context import Progress
from hil.controller.workloads.run_job import run_job
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.core.scratch import make_temporary_folder
from hil.errors import BoardError, RunFailed, StageError

# Programs with more memory have a fixed number of iterations: a time limit could end the bench after a few iterations,
# which have no interval.
_LARGE_BYTES, _LARGE_ITERATIONS = 8 << 20, 20
# Number of iterations that time a probe on a device's clock. The interval of a median needs at least 18.
_DEVICE_ITERATIONS = 30


@dataclass(frozen=True)
class TimedProbe:
    """Measured probe, with the board that ran it."""

    point: PeakPoint
    clock: PeakClock
    info: dict[str, Any]  # description of the board
    provenance: StoredProvenance
    flags: tuple[str, ...]
    parallelism: float | None = None  # mean number of busy cores; None if unknown


# Function that measures a probe. Raises StageError if the board cannot run it, and BoardError if the board failed.
Timer = Callable[[Probe], TimedProbe]


def time_with_bench(probe: Probe, job: Job, min_time_s: float, screen: Progress) -> TimedProbe:
    """Measure a probe as `hil bench` measures a model.

    Raises:
        StageError: the board's compiler or runtime does not support the probe.
        BoardError: the board failed.
        UsageError: the board or an option is invalid.
    """
    with make_temporary_folder("hil-peak-") as scratch:
        folder = Path(scratch)
        own = replace(job, models=(write_probe(probe, folder),), out=folder / "runs")
        iterations = _LARGE_ITERATIONS if probe.memory_bytes > _LARGE_BYTES else None
        bench = BenchJob(own, iterations=iterations, min_time_s=min_time_s, check=False, energy=False)
        record = run_bench(bench, screen=screen)
        side = record.sides[0]
        counts = side.instructions
        if side.times is None and (counts is None or counts.median is None):
            raise_outcome(side.outcome, side.reason, side.hint, side.board or "")
        run = read_record(Path(record.folder) / "run.json", RunRecord)
    if side.times is not None:
        point = _make_timed_point(probe, side)
    else:
        assert counts is not None
        assert counts.median is not None
        times = [float(counts.median)] * 3
        point = _make_point(probe, counts.iterations, (times[0], times[1], times[2]), None)
    return _describe_probe(point, "instructions" if side.times is None else "board", run, parallelism=side.parallelism)


def time_on_device(probe: Probe, job: Job, screen: Progress) -> TimedProbe:
    """Measure a probe with the runtime's profiler, on the clock of the device.

    Raises:
        StageError: the runtime does not support the probe, or the device does not report times.
        BoardError: the board failed.
        UsageError: the board or an option is invalid.
    """
    with make_temporary_folder("hil-peak-") as scratch:
        folder = Path(scratch)
        place = folder / "profile"
        own = replace(
            job,
            models=(write_probe(probe, folder),),
            out=folder / "runs",
            profile=place,
            iterations=_DEVICE_ITERATIONS,
            warmup=2,
            energy=False,
        )
        run = run_job(own, screen=screen)
        case = run.cases[0]
        if case.provenance is None:
            raise_outcome(case.outcome, case.reason, "", job.board)
        profile = read_profile(place)
        spent: dict[int, int] = defaultdict(int)
        for row in profile.rows:
            if row.kind == "compute":
                spent[row.iteration] += row.duration_ns
    if not profile.device or not spent:
        reason = "; ".join(profile.notes) or "the profile has no times of the device"
        raise RunFailed(f"cannot time {probe.name} on the device: {reason}")
    durations = np.array([spent[number] for number in sorted(spent)], np.int64)
    p10, p50, p90 = (float(value) for value in np.percentile(durations, (10, 50, 90)))
    point = _make_point(probe, durations.size, (p10, p50, p90), compute_median_interval(durations))
    point.conditions, point.grade = case.conditions, case.grade
    return _describe_probe(point, "device", run)


def raise_outcome(outcome: Outcome | None, reason: str, hint: str, board: str) -> None:
    """Raise the error of a case that did not run: BoardError if the board failed, otherwise StageError."""
    text = reason or "the board reported no times"
    if outcome in BOARD_OUTCOMES:
        kind = next((one for one in BoardError.__subclasses__() if one.outcome == outcome), BoardError)
        raise kind(text, hint=hint, board=board)
    raise StageError(f"{outcome.value}: {text}" if outcome else text, hint=hint, board=board)


def _make_timed_point(probe: Probe, side: SideRecord) -> PeakPoint:
    times = side.times
    assert times is not None
    point = _make_point(probe, times.iterations, (times.p10_ns, times.p50_ns, times.p90_ns), times.median)
    point.grade, point.conditions = side.grade, side.conditions
    return point


def _make_point(
    probe: Probe, iterations: int, percentiles: tuple[float, float, float], median: Interval | None
) -> PeakPoint:
    """Return a point. The percentiles are p10, p50 and p90, in nanoseconds or instructions."""
    p10, p50, p90 = percentiles
    return PeakPoint(
        kernel=probe.kernel,
        dtype=probe.dtype,
        size=probe.size,
        work=probe.work,
        iterations=iterations,
        p10=p10,
        p50=p50,
        p90=p90,
        rate=probe.work / max(p50, 1.0),
        interval=None
        if median is None
        else Interval(
            low=probe.work / max(median.high, 1.0), high=probe.work / max(median.low, 1.0), level=median.level
        ),
    )


def _describe_probe(
    point: PeakPoint, clock: PeakClock, run: RunRecord, *, parallelism: float | None = None
) -> TimedProbe:
    """Return the probe with its board. Convert a rate per nanosecond to a rate per second."""
    if clock != "instructions":
        point.rate *= 1e9
        if point.interval is not None:
            point.interval = Interval(
                low=point.interval.low * 1e9, high=point.interval.high * 1e9, level=point.interval.level
            )
    case = run.cases[0]
    return TimedProbe(
        point,
        clock,
        run.board.info if run.board else {},
        case.provenance or StoredProvenance(),
        tuple(case.artifact.flags) if case.artifact else (),
        parallelism,
    )
