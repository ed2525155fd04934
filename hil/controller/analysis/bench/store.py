"""Store a bench in the run directory: samples, the document, and the data for a later measurement.

In addition to the files of a run, the directory contains ``bench.json`` (the document of ``hil bench --json``),
``samples.csv`` and ``<case>/program/``, the compiled program. ``samples.csv`` has a line per iteration. The file is
written after each batch, so a killed bench retains all earlier samples.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.controller.analysis.bench.conditions import list_incomparable
from hil.controller.analysis.bench.measure import BenchSide, compare_sides, count_batches
from hil.controller.analysis.bench.prompts import compare_prompts, describe_side, group_sides
from hil.controller.analysis.bench.stats import Batch, BenchJob
from hil.controller.analysis.bench.sustained import summarise_sustained
from hil.controller.devices.measuring.grading import grade_measurement
from hil.controller.devices.measuring.time_statistics import Nanoseconds, summarise
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.instructions import compare_counts, summarise_counts
from hil.controller.pipeline.records.energy_text import compare_energies
from hil.controller.pipeline.records.next_steps import make_case_hint
from hil.controller.pipeline.records.record import record_case, record_specs
from hil.controller.pipeline.records.restored import restore_artifact, restore_case
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.base import make_record, read_record
from hil.controller.records.measurements.bench import (
    BenchProgram,
    BenchRecord,
    SideLabel,
    SideRecord,
    SideTimings,
    SpeedComparison,
    SustainedTimes,
    TimeHistogram,
)
from hil.controller.records.run import StoredProvenance, StoredRepetition
from hil.controller.storage.runs import Run, convert_write_errors, write_file
from hil.core.files import copy_file
from hil.errors import EXIT_BOARD, EXIT_FAIL, EXIT_NOTHING_RAN, EXIT_OK, NotRun, UsageError


def read_bench(run: Run) -> BenchRecord:
    """Read bench.json.

    Raises:
        UsageError: the run is not a bench.
    """
    try:
        return read_record(run.folder / "bench.json", BenchRecord)
    except UsageError as error:
        raise UsageError(f"run {run.id} is not a bench", hint="choose a run stored by `hil bench`") from error


@contextlib.contextmanager
def sample_file(folder: Path, name: str = "samples.csv") -> Iterator[Callable[[Batch], None]]:
    """Create the file of samples; yield a function that appends a batch and flushes the file."""
    batches = itertools.count()
    with convert_write_errors(folder):
        file = (folder / name).open("w")

    def append(batch: Batch) -> None:
        head = f"{batch.side},{batch.round},{next(batches)},{batch.copy},"
        pairs = zip(batch.start_ns.tolist(), batch.duration_ns.tolist(), strict=True)
        times = [f"{start},{duration}" if batch.is_timed else "," for start, duration in pairs]
        counts = batch.instructions or [""] * len(times)
        write("".join(f"{head}{time},{count}\n" for time, count in zip(times, counts, strict=True)))

    def write(text: str) -> None:
        with convert_write_errors(folder):
            file.write(text)
            file.flush()

    with file:
        write("side,round,batch,copy,start_ns,duration_ns,instructions\n")
        yield append


def keep_program(run: Run, case: Case) -> BenchProgram:
    """Copy a case's program into the run, for a later ``--against``; return its record."""
    artifact = case.artifact
    assert artifact is not None
    folder = run.folder / case.name / "program"
    with convert_write_errors(folder):
        for name, path in artifact.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, target)
    return BenchProgram(
        runtime=artifact.runtime,
        main=artifact.main,
        digests=dict(artifact.digests),
        function=artifact.function,
        compiler=artifact.compiler,
        flags=list(artifact.flags),
        folder=str(folder.relative_to(run.folder)),
        outputs=None if artifact.outputs is None else record_specs(artifact.outputs),
    )


def restore_last_side(run: Run) -> tuple[Job, Case]:
    """Return a stored bench's last side for a new measurement: same program, inputs, references, options.

    Raises:
        UsageError: the run is not a bench, or ended before the program could run, or the program files are missing.
    """
    side, case = read_bench(run).sides[-1], run.record.cases[-1]
    program = side.program
    if side.generation is not None:
        raise UsageError(
            f"bench {run.id} measured prompts: hil cannot repeat it for a comparison",
            hint="measure both models: hil bench MODEL MODEL_B --generate SPEC",
        )
    job = Job.from_record(run.record.request)
    if program is None or not case.inputs:
        raise UsageError(f"bench {run.id} has no program to measure", hint="choose a bench that measured a program")
    place = Path(program.folder)
    artifact = restore_artifact(program, {name: run.own(str(place / name)) for name in program.digests})
    missing = [str(path) for path in artifact.files.values() if not path.is_file()]
    if missing:
        raise UsageError(f"bench {run.id} is missing program files: {', '.join(missing)}")
    return job, restore_case(run, case, job, artifact)


_BINS = 16
_COURSE = 16


def record_bench(
    run: Run,
    bench: BenchJob,
    cases: Sequence[tuple[SideLabel, Case]],
    sides: Sequence[BenchSide],
    programs: Mapping[str, BenchProgram],
    *,
    finished: bool,
    exit_code: int | None = None,
) -> BenchRecord:
    """Return a bench's current record.

    Args:
        sides: the sides that are ready to be measured.
        programs: case name -> record of the stored program.
        exit_code: None derives the exit code from the outcomes and the comparison.
    """
    by_name = {side.case.name: side for side in sides}
    in_turns = {label for label, _ in cases} == {"A", "B"}
    records = [
        _record_side(label, case, by_name.get(case.name), programs.get(case.name), bench, in_turns=in_turns)
        for label, case in cases
    ]
    incomparable = list_incomparable(records) if in_turns else []
    failed = {side.name for side in records if side.grade and side.grade.grade == "F"}
    # Compare both sides of a prompt, or neither.
    comparable = [
        side for group in group_sides(sides) if failed.isdisjoint(one.case.name for one in group) for side in group
    ]
    prompts = compare_prompts(comparable, bench)
    is_single = all(case.decoder is None for _, case in cases)
    compared = compare_sides(comparable, bench) if is_single else None
    if bench.against:
        records[0].from_run = bench.against
    compared_times = [compared, *(time for one in prompts for time in (one.ttft, one.tpot))]
    counted = [side.instructions for side in records]
    is_pair = in_turns and is_single and len(records) == 2
    return BenchRecord(
        schema=1,
        id=run.id,
        folder=str(run.folder),
        created=run.record.created,
        origin=run.record.origin,
        finished=finished,
        concurrency=bench.concurrency,
        sides=records,
        comparison=compared,
        instructions=compare_counts(*counted) if len(counted) == 2 else None,
        energy=compare_energies(records[0].energy, records[1].energy, bench.min_effect) if is_pair else None,
        not_comparable=incomparable,
        prompts=prompts,
        exit_code=_find_exit_code(
            [case for _, case in cases],
            compared_times,
            bench.fail_if_slower,
            bool(incomparable),
            is_refused=bool(bench.energy) and any(side.energy and side.energy.refused for side in sides),
        )
        if exit_code is None
        else exit_code,
    )


def select_under_load(batches: Sequence[Batch], copies: int) -> tuple[Nanoseconds, Nanoseconds, float]:
    """Return a side's iterations during which all copies ran.

    Returns:
        Starts and durations, int64 [n] in ns in time order, and iterations per second of all copies together.
    """
    starts, durations, window = [], [], 0
    for first in range(0, len(batches) - copies + 1, copies):
        group = batches[first : first + copies]
        begun = max(int(batch.start_ns[0]) for batch in group)
        ended = min(int(batch.start_ns[-1] + batch.duration_ns[-1]) for batch in group)
        window += max(ended - begun, 0)
        for batch in group:
            inside = (batch.start_ns >= begun) & (batch.start_ns + batch.duration_ns <= ended)
            starts.append(batch.start_ns[inside])
            durations.append(batch.duration_ns[inside])
    start_ns, duration_ns = (np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in (starts, durations))
    order = np.argsort(start_ns, kind="stable")
    return start_ns[order], duration_ns[order], start_ns.size / window * 1e9 if window else 0.0


def _record_side(
    label: SideLabel,
    case: Case,
    side: BenchSide | None,
    program: BenchProgram | None,
    bench: BenchJob,
    *,
    in_turns: bool,
) -> SideRecord:
    timings, artifact, result = case.timings, case.artifact, side.result if side else None
    timed = [batch for batch in side.batches if batch.is_timed] if side else []
    starts, durations, rate = select_under_load(timed, bench.concurrency)
    has_time = side is None or side.clock != "icount"
    measured = result or case.result
    provenance = make_record(measured.provenance, StoredProvenance) if measured else None
    sustained = None
    if side and bench.sustained_s is not None:
        sustained = summarise_sustained(
            side.summaries, side.batches, side.counters, requested_s=bench.sustained_s, min_effect=bench.min_effect
        )
    if sustained is not None:
        rate = sustained.iterations / max(sustained.measured_s, 1e-9)
    times = summarise(starts, durations, drift_share=bench.min_effect) if durations.size else None
    return SideRecord(
        label=label,
        name=case.name,
        model=str(case.path),
        from_run=None,
        board=side.board.name if side else None,
        runtime=artifact.runtime if artifact else None,
        runtime_version=provenance.runtime_version if provenance else None,
        device=provenance.device if provenance else None,
        placement=(provenance.placement or None) if provenance else None,
        elsewhere=(provenance.elsewhere or "") if provenance else "",
        outcome=case.outcome,
        reason=case.reason,
        hint=make_case_hint(record_case(case, {})),
        against=[verdict.against for verdict in case.verdicts],
        clock=side.clock if side else None,
        loads=side.loads if side else 0,
        warmup=side.warmup if side else 0,
        timings=SideTimings(
            import_s=timings.import_s,
            compile_s=timings.compile_s,
            push_s=timings.push_s,
            load_s=timings.load_s,
            first_run_s=side.first_run_ns / 1e9 if side and side.first_run_ns is not None else None,
            warmup_s=side.warmup_s if side and side.loads and has_time else None,
            steady_s=_measure_steady(durations, sustained),
            fetch_s=timings.fetch_s,
        ),
        compiled_from_cache=bool(artifact and artifact.cached),
        times=times,
        histogram=_build_histogram(durations) if durations.size else None,
        course_ns=[float(np.median(part)) for part in np.array_split(durations, _COURSE) if part.size],
        sustained=sustained,
        iterations_per_s=rate,
        instructions=summarise_counts(count_batches(side, side.batches)) if side and side.batches else None,
        repetition=make_record(side.repetition.record(), StoredRepetition) if side and side.repetition else None,
        peak_memory_bytes=side.peak_memory_bytes if side else None,
        peak_device_memory_bytes=side.peak_device_memory_bytes if side else None,
        parallelism=side.cpu_ns / side.ran_ns if side and side.ran_ns else None,
        settling=side.settling if side else None,
        conditions=side.conditions if side else None,
        grade=grade_measurement(side.conditions, times, clock=side.clock, in_turns=in_turns)
        if side and times and side.clock != "icount"
        else None,
        generation=describe_side(side) if side else None,
        energy=side.energy if side else None,
        program=program,
    )


def _measure_steady(durations: Nanoseconds, sustained: SustainedTimes | None) -> float | None:
    """Return the total time of the iterations in seconds; None without iterations."""
    if sustained is not None:
        return sustained.measured_s
    return float(durations.sum()) / 1e9 if durations.size else None


def _build_histogram(durations: Nanoseconds) -> TimeHistogram:
    """Count iterations in equally wide bins up to the 99th percentile. The last bin includes all longer iterations."""
    low, high = float(durations.min()), float(np.percentile(durations, 99))
    counts, _ = np.histogram(np.minimum(durations, high), bins=_BINS, range=(low, max(high, low + 1)))
    return TimeHistogram(low_ns=low, high_ns=high, counts=counts.tolist())


def _find_exit_code(
    cases: Sequence[Case],
    compared: Sequence[SpeedComparison | None],
    allowed: float | None,
    is_incomparable: bool,
    *,
    is_refused: bool,
) -> int:
    """Return the exit code of the most severe outcome.

    The code is 5 if a program could not be run. With a limit ``allowed``, the code is 4 if the board's conditions
    prevented a comparison, and 1 if B is slower by more than allowed. The code is also 4 if hil refuses to report a
    requested energy.
    """
    code = max((case.outcome.exit_code for case in cases if case.outcome is not None), default=EXIT_OK)
    if code == EXIT_OK and any(isinstance(case.error, NotRun) for case in cases):
        return EXIT_NOTHING_RAN
    slower = [one for one in compared if one is not None and one.verdict == "slower"]
    is_too_slow = allowed is not None and any(one.ratio - 1 > allowed for one in slower)
    if code == EXIT_OK and allowed is not None and is_incomparable:
        return EXIT_BOARD
    return code or (EXIT_FAIL if is_too_slow else EXIT_BOARD if is_refused else EXIT_OK)


def write_google(path: Path, record: BenchRecord, sides: Sequence[BenchSide]) -> None:
    """Write a bench in Google Benchmark's JSON format.

    ``cpu_time`` is the real time multiplied by the mean number of busy cores, or the real time if unknown.
    """
    context = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(record.created)),
        "host_name": platform.node(),
        "executable": "hil bench",
        "num_cpus": os.cpu_count() or 1,
        "mhz_per_cpu": 0,
        "cpu_scaling_enabled": False,
        "caches": [],
        "load_avg": list(os.getloadavg()),
        "library_build_type": "release",
        "json_schema_version": 1,
        "boards": ", ".join(dict.fromkeys(side.board.name for side in sides)),
        "run": record.id,
    }
    rows: list[dict[str, Any]] = []
    for family, side in enumerate(one for one in sides if one.batches):
        rows += _build_google_rows(side, family, record.concurrency)
    text = json.dumps({"context": context, "benchmarks": rows}, indent=2) + "\n"
    write_file(path, text, option="--benchmark-out", make_folder=True)


def _build_google_rows(side: BenchSide, family: int, threads: int) -> list[dict[str, Any]]:
    name = side.case.name
    busy = side.cpu_ns / side.ran_ns if side.ran_ns else 1.0
    means = [float(batch.duration_ns.mean()) for batch in side.batches]
    common = {
        "name": name,
        "family_index": family,
        "per_family_instance_index": 0,
        "run_name": name,
        "repetitions": len(means),
        "threads": threads,
        "time_unit": "ns",
    }
    rows = [
        {
            **common,
            "run_type": "iteration",
            "repetition_index": number,
            "iterations": int(batch.duration_ns.size),
            "real_time": mean,
            "cpu_time": mean * busy,
        }
        for number, (batch, mean) in enumerate(zip(side.batches, means, strict=True))
    ]
    middle = statistics.fmean(means)
    spread = statistics.stdev(means) if len(means) > 1 else 0.0
    aggregates = {"mean": middle, "median": statistics.median(means), "stddev": spread, "cv": spread / (middle or 1.0)}
    for word, value in aggregates.items():
        aggregate = {
            "name": f"{name}_{word}",
            "run_type": "aggregate",
            "aggregate_name": word,
            "aggregate_unit": "percentage" if word == "cv" else "time",
            "iterations": len(means),
            "real_time": value,
            "cpu_time": value if word == "cv" else value * busy,
        }
        rows.append({**common, **aggregate})
    return rows
