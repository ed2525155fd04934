"""Tables of a bench: a row per side, and a row per iteration."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from hil.controller.pipeline.records.energy_text import ENERGY_COLUMNS, list_energy
from hil.controller.records.measurements.bench import BenchRecord, SideRecord
from hil.controller.storage.line_file import read_lines
from hil.controller.workloads.suites.reports.tables import ResultTable
from hil.errors import UsageError

_ITERATION = ("prompt", "side", "round", "batch", "copy", "start_ns", "duration_ns", "instructions")
_IDENTITY = ("label", "name", "model", "board", "runtime", "runtime_version", "device", "outcome", "reason", "clock")
_TIMES = ("p10", "p50", "p90", "p99", "min", "max", "mean", "stdev")
_TIMINGS = ("import_s", "compile_s", "push_s", "load_s", "first_run_s", "warmup_s", "steady_s", "fetch_s")


def make_side_table(record: BenchRecord) -> ResultTable:
    """Make a row per side of a bench. Times of iterations are in ms, times of steps in s."""
    rows = [_describe_side(side) for side in record.sides]
    return ResultTable(list(rows[0]), [list(row.values()) for row in rows])


def _describe_side(side: SideRecord) -> dict[str, Any]:
    times, timings = side.times, asdict(side.timings)
    median = times.median if times is not None else None
    return {
        **{name: getattr(side, name) for name in _IDENTITY},
        "outcome": None if side.outcome is None else side.outcome.value,
        "grade": None if side.grade is None else side.grade.grade,
        "prompt": None if side.generation is None else side.generation.prompt,
        "loads": side.loads,
        "warmup": side.warmup,
        "iterations": None if times is None else times.iterations,
        **{f"{name}_ms": None if times is None else getattr(times, f"{name}_ns") / 1e6 for name in _TIMES},
        "median_low_ms": None if median is None else median.low / 1e6,
        "median_high_ms": None if median is None else median.high / 1e6,
        "outliers": None if times is None else times.outliers,
        "drift": None if times is None or times.drift is None else times.drift.change,
        "iterations_per_s": side.iterations_per_s,
        **dict(zip(ENERGY_COLUMNS, list_energy(side.energy), strict=True)),
        "energy_refused": None if side.energy is None else side.energy.refused,
        "peak_memory_bytes": side.peak_memory_bytes,
        "peak_device_memory_bytes": side.peak_device_memory_bytes,
        "parallelism": side.parallelism,
        **{name: timings[name] for name in _TIMINGS},
    }


def make_iteration_table(folder: Path) -> ResultTable:
    """Make a row per measured iteration: the columns of samples.csv, and the prompt of a generation.

    An incomplete last line is ignored. Raises UsageError if a file is missing or damaged.
    """
    rows: list[list[Any]] = []
    for path in sorted(folder.glob("samples*.csv")):
        prompt = path.stem.removeprefix("samples").removeprefix("-")
        lines = csv.reader(line.decode(errors="replace") for line in read_lines(path)[1:])
        try:
            found = [[prompt, side, *(int(text) if text else None for text in rest)] for side, *rest in lines]
        except (ValueError, csv.Error) as error:
            raise UsageError(f"{path} is damaged: {error}") from error
        if any(len(row) != len(_ITERATION) for row in found):
            raise UsageError(f"{path} is damaged: expected {len(_ITERATION) - 1} values per line")
        rows += found
    if not rows:
        raise UsageError(f"{folder} has no samples.csv with measured iterations")
    return ResultTable(_ITERATION, rows)
