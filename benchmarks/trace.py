"""Write a million operations as a trace for Perfetto, relative to Chrome's JSON format of the same rows.

Both writers read the rows from a profile's table on disk, like hil, and write the same data for each operation. Each
writer runs in a separate process, whose peak memory is measured. The time for only reading the table is reported
separately. Run it as `python -m benchmarks.trace`.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from hil.controller.analysis.profile.rows import write_csv
from hil.controller.analysis.profile.store import StoredRows
from hil.controller.analysis.profile.trace import write_trace
from hil.core.clock import ClockFit
from hil.core.timeline import OpRow, Profile

OPS = 200  # number of different operations in the model
CLOCK = ClockFit(offset_ns=3_600_000_000_000, drift=200e-6, at_host_ns=10**12, error_ns=10_000)


@dataclass(frozen=True)
class Cost:
    """Cost of a writer: wall and CPU seconds, peak memory and file size in MB."""

    seconds: float
    cpu_seconds: float
    memory_mb: float
    file_mb: float


def made_rows(count: int) -> Iterator[OpRow]:
    """Yield operations of 2 to 100 us in sequence, each on up to four threads."""
    dice = random.Random(0)
    at = CLOCK.at_host_ns + CLOCK.offset_ns
    for number in range(count):
        iteration, op = divmod(number, OPS)
        took = dice.randint(2_000, 100_000)
        yield OpRow(
            run="made",
            iteration=iteration,
            board="rpi5",
            runtime="iree",
            op=f"main_dispatch_{op}_conv_1x56x56x64x3x3x64_f32",
            kind="compute",
            onnx_nodes=(f"/layer{op}/Conv", f"/layer{op}/Relu"),
            op_types=("Conv", "Relu"),
            start_ns=at,
            duration_ns=took,
            tiles=64,
            tile_time_ns=took * dice.randint(90, 390) // 100,
            shapes="1x56x56x64xf32, 3x3x64x64xf32 -> 1x56x56x64xf32",
            bytes=1_753_088 + op,
            flops=231_211_008,
            bound_estimate="compute",
        )
        at += took + dice.randint(0, 300)


def perfetto(table: Path, count: int, out: Path) -> None:
    """Write the trace with hil."""
    rows = StoredRows(table, count)
    empty = Profile("made", "m", "rpi5", "iree", rows, [], [], [], [], CLOCK)
    write_trace([empty], out)


def chrome_json(table: Path, count: int, out: Path) -> None:
    """Write the trace with only Python's json module."""
    with out.open("w") as file:
        file.write('{"traceEvents":[\n')
        for number, row in enumerate(StoredRows(table, count)):
            event = {
                "ph": "X",
                "name": row.op,
                "cat": "+".join(row.op_types),
                "ts": CLOCK.to_host(row.start_ns) / 1e3,
                "dur": row.duration_ns / 1e3,
                "pid": 1,
                "tid": 1,
                "args": {
                    "onnx_nodes": ";".join(row.onnx_nodes),
                    "shapes": row.shapes,
                    "tiles": row.tiles,
                    "tile_time_ns": row.tile_time_ns,
                    "bytes": row.bytes,
                    "flops": row.flops,
                    "bound_estimate": row.bound_estimate,
                    "iteration": row.iteration,
                },
            }
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


def reading(table: Path, count: int, out: Path) -> None:
    """Read the table without writing."""
    out.touch()
    assert sum(1 for _ in StoredRows(table, count)) == count


WRITERS: dict[str, tuple[Callable[[Path, int, Path], None], str]] = {
    "packed": (perfetto, "trace.pftrace.gz"),
    "plain": (perfetto, "trace.pftrace"),
    "json": (chrome_json, "trace.json"),
    "reading": (reading, "nothing"),
}


def cost(name: str, table: Path, count: int) -> Cost:
    """Run a writer and measure it. Call this in a new process."""
    write, file = WRITERS[name]
    out = table.with_name(file)
    start, cpu_start = time.perf_counter(), time.process_time()
    write(table, count, out)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    # ru_maxrss is in kilobytes, but in bytes on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Cost(seconds, cpu_seconds, peak / 1e6, out.stat().st_size / 1e6)


def alone(name: str, table: Path, count: int) -> Cost:
    """Run a writer in a new process and measure it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(cost, name, table, count).result()


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, slices=1_000_000, rounds=3)
    with tempfile.TemporaryDirectory(prefix="hil-bench-") as place:
        table = Path(place) / "ops.csv"
        write_csv(made_rows(asked.slices), table)
        got = [{name: alone(name, table, asked.slices) for name in WRITERS} for _ in range(asked.rounds)]

    def of(name: str, what: str) -> list[float]:
        return [getattr(turn[name], what) for turn in got]

    def median(name: str, what: str) -> float:
        return statistics.median(of(name, what))

    case = f"{asked.slices:,} slices"
    rows = []
    for name, file in (("packed", ".pftrace.gz"), ("plain", ".pftrace")):
        for said, what, unit, most in (("time", "seconds", "s", 20.0), ("memory", "memory_mb", "MB", 500.0)):
            value = median(name, what)
            rows.append(common.Row(f"{case}, {file}: {said}", value, unit, "the bar", most, value / most, "<= 1.0"))
    for said, what, unit, bar in (
        ("time", "seconds", "s", ""),
        ("processor's time", "cpu_seconds", "s", ""),
        ("memory", "memory_mb", "MB", ""),
        ("file", "file_mb", "MB", ""),
    ):
        rows.append(common.beside(f"{case}, .gz: {said}", of("packed", what), "json", of("json", what), 1, unit, bar))
    notes = [
        f"reading the table alone takes {median('reading', 'seconds'):.1f} s of each time",
        f"{median('packed', 'memory_mb') - median('reading', 'memory_mb'):.0f} MB of the memory belong to the "
        "writer and the packages that it requires",
    ]
    common.show("trace", rows, notes, as_json=asked.json)


if __name__ == "__main__":
    main()
