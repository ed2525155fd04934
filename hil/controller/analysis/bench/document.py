"""What a bench came to as one document: bench.json, and what ``hil bench --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from hil.controller.analysis.bench.measure import Side, compare_sides
from hil.controller.analysis.bench.model import Batch, BenchJob, Comparison, Nanoseconds
from hil.controller.analysis.bench.stats import summarise
from hil.controller.pipeline.case import Case
from hil.controller.storage.runs import Run
from hil.errors import EXIT_FAIL, EXIT_OK

SCHEMA = 1
_BINS = 16
_COURSE = 16


def bench_document(
    run: Run,
    bench: BenchJob,
    cases: Sequence[Case],
    sides: Sequence[Side],
    programs: Mapping[str, Mapping[str, Any]],
    *,
    finished: bool,
    exit_code: int | None = None,
) -> dict[str, Any]:
    """A bench's document, as things stand.

    Args:
        run: where it is stored.
        bench: what was asked for.
        cases: A, or A and B.
        sides: those that came as far as being measured.
        programs: case's name -> what was stored of its program.
        finished: whether all that was asked for was measured.
        exit_code: of the command; None is what the outcomes and the comparison come to.
    """
    by_name = {side.case.name: side for side in sides}
    compared = compare_sides(sides, bench)
    told = [
        _side(label, case, by_name.get(case.name), programs, bench) for label, case in zip("AB", cases, strict=False)
    ]
    if bench.against:
        told[0]["from_run"] = bench.against
    return {
        "schema": SCHEMA,
        "id": run.id,
        "folder": str(run.folder),
        "created": run.record["created"],
        "finished": finished,
        "concurrency": bench.concurrency,
        "sides": told,
        "comparison": compared and asdict(compared),
        "exit_code": _exit_code(cases, compared, bench.fail_if_slower) if exit_code is None else exit_code,
    }


def under_load(batches: Sequence[Batch], copies: int) -> tuple[Nanoseconds, Nanoseconds, float]:
    """The iterations during which all copies ran.

    Args:
        batches: of one side, those that were measured at the same time one after another.
        copies: how many that were.

    Returns:
        Starts and durations, int64 [n] nanoseconds in the order of time, and iterations a second of all together.
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


def _side(
    label: str, case: Case, side: Side | None, programs: Mapping[str, Mapping[str, Any]], bench: BenchJob
) -> dict[str, Any]:
    timings, artifact, result = case.timings, case.artifact, side.result if side else None
    starts, durations, rate = under_load(side.batches if side else (), bench.concurrency)
    measured = result or case.result
    provenance = measured.provenance if measured else {}
    return {
        "label": label,
        "name": case.name,
        "model": str(case.path),
        "from_run": None,
        "board": side.board.name if side else None,
        "runtime": artifact and artifact.runtime,
        "runtime_version": provenance.get("runtime_version"),
        "device": provenance.get("device"),
        "placement": provenance.get("placement"),
        "elsewhere": provenance.get("elsewhere", ""),
        "outcome": case.outcome and case.outcome.value,
        "reason": case.reason,
        "hint": case.error.hint if case.error else "",
        "against": [verdict.against for verdict in case.verdicts],
        "clock": side.clock if side else None,
        "loads": side.loads if side else 0,
        "warmup": side.warmup if side else 0,
        "timings": {
            "import_s": timings.import_s,
            "compile_s": timings.compile_s,
            "push_s": timings.push_s,
            "load_s": timings.load_s,
            "first_run_s": side.first_run_ns / 1e9 if side and side.first_run_ns is not None else None,
            "warmup_s": side.warmup_s if side and side.loads else None,
            "steady_s": float(durations.sum()) / 1e9 if durations.size else None,
            "fetch_s": timings.fetch_s,
        },
        "compiled_from_cache": bool(artifact and artifact.cached),
        "times": asdict(summarise(starts, durations, drift_share=bench.min_effect)) if durations.size else None,
        "histogram": _histogram(durations) if durations.size else None,
        "course_ns": [float(np.median(part)) for part in np.array_split(durations, min(_COURSE, durations.size))]
        if durations.size
        else [],
        "iterations_per_s": rate,
        "peak_memory_bytes": side.peak_memory_bytes if side else None,
        "parallelism": side.cpu_ns / side.ran_ns if side and side.ran_ns else None,
        "program": programs.get(case.name),
    }


def _histogram(durations: Nanoseconds) -> dict[str, Any]:
    """Counts of iterations in bins of equal width up to the 99th percentile, the last bin with all that is above."""
    low, high = float(durations.min()), float(np.percentile(durations, 99))
    counts, _ = np.histogram(np.minimum(durations, high), bins=_BINS, range=(low, max(high, low + 1)))
    return {"low_ns": low, "high_ns": high, "counts": counts.tolist()}


def _exit_code(cases: Sequence[Case], compared: Comparison | None, allowed: float | None) -> int:
    """The gravest outcome's, and 1 where B is slower by more than is allowed."""
    code = max((case.outcome.exit_code for case in cases if case.outcome is not None), default=EXIT_OK)
    too_slow = allowed is not None and compared is not None and compared.verdict == "slower"
    if too_slow and compared is not None and allowed is not None and compared.ratio - 1 > allowed:
        return code or EXIT_FAIL
    return code
