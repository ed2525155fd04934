"""Measure one side in batches, or two sides in turns. Each batch is passed to the caller immediately."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from hil.controller.analysis.bench.stats import (
    Batch,
    BenchJob,
    compare_rounds,
    is_precise,
    round_log_ratios,
)
from hil.controller.analysis.bench.sustained import (
    BatchSummary,
    find_stride,
    measure_elapsed,
    summarise_batch,
    thin_batch,
)
from hil.controller.devices.board import Board
from hil.controller.devices.health import list_changes
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.devices.measuring.time_statistics import Nanoseconds
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.decoding.generation import check_generation
from hil.controller.pipeline.repeated import load_arguments, make_steps_arguments
from hil.controller.records.measurements.bench import SpeedComparison
from hil.controller.records.measurements.conditions import Conditions, Settling
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.core import clock
from hil.core.instructions import InstructionCounts
from hil.core.mcu_config import MCU_RUNTIME
from hil.core.repetition import Repetition, merge_known
from hil.core.results import RunResult, Stage
from hil.core.timeline import Sample
from hil.errors import HilError, RunFailed, UsageError

# Number of rounds in a comparison. Fewer rounds make the interval wide, more rounds cost loading time.
ROUNDS = 20
MIN_ROUNDS = 10
# Number of batches for a side that is measured separately. A killed bench loses at most the current batch.
_BATCHES = 20
# Minimum number of batches, however long they take.
_MIN_BATCHES = 5
# Maximum batch length, for responsive Ctrl-C and progress, and for regular checks of the board's clock.
_MAX_BATCH_SECONDS = 0.5
# Minimum number of batches of a sustained measurement.
_SUSTAINED_BATCHES = 40
# A sustained measurement takes at most this many times as long by the host's clock.
_STOPPED_CLOCK = 2
# Turns are short, so that other load on the machine affects both sides equally.
_TURN_SECONDS = 0.02
# If the ratio is not yet known to within the smallest effect, a comparison may take this many times as long.
_LONGER = 3
_MAX_ITERATIONS = 100_000
_MIN_ITERATIONS = 10
# The first iterations after a load execute more instructions.
_COUNTING_WARMUP = 5
_WARMUP_SECONDS = 0.05
_CALIBRATION_NS = 20_000_000
_MAX_CALIBRATION_NS = 1_000_000_000
_CALIBRATIONS = 4
# A batch starts with a tenth as many untimed iterations.
_REWARM = 10
# Sides with times within this factor get equally large batches, so that both are equally warm.
_ALIKE = 4.0


@dataclass
class BenchSide:
    """A program to measure, and the measurements so far."""

    label: str
    case: Case  # with artifact and inputs
    board: Board
    first_run_ns: int | None = None  # the first, cold iteration; None if the board does not report it
    batches: list[Batch] = field(default_factory=list)
    result: RunResult | None = None
    # ``host`` if the board does not report device times; ``icount`` if the board's clock counts instructions.
    clock: Literal["board", "host", "icount"] = "board"
    warmup: int = 0  # untimed iterations after loading, before measuring
    warmup_s: float = 0.0  # total warm-up time in seconds
    loads: int = 0  # how often the program was loaded for measuring
    peak_memory_bytes: int | None = None
    peak_device_memory_bytes: int | None = None
    cpu_ns: int = 0  # worker threads' CPU time in all iterations, if the board reports it
    ran_ns: int = 0  # duration of these iterations; 0 if the board does not report CPU time
    counter: str = ""  # of the instructions in the batches; "" if not counted
    counter_problem: str | None = None  # why the board did not count; None if not requested
    # output comparison over all iterations, including warm-ups and the case's first run; None if not compared.
    repetition: Repetition | None = None
    settling: Settling | None = None  # the wait for a steady board, with --settle
    conditions: Conditions | None = None  # conditions of the board; None before the end of the measurement
    # With --sustained: statistics of each batch. ``batches`` then contains only some iterations of each batch.
    summaries: list[BatchSummary] = field(default_factory=list)
    counters: Sequence[Sample] = ()  # with --sustained: frequencies and temperatures; empty before the end
    energy: EnergyMeasurement | None = None  # None without a meter, or before the end

    def __post_init__(self) -> None:
        """Copy the results of the case's first run, if any."""
        self.result = self.case.result
        if self.result is not None:
            self.repetition = self.result.repetition
        if self.result is not None and self.result.device_ns:
            self.first_run_ns = self.result.device_ns[0]
            self.peak_memory_bytes = self.result.peak_memory_bytes
            self.peak_device_memory_bytes = self.result.peak_device_memory_bytes


# Callback for every finished batch. Arguments: the side, the batch, and the progress (a share, or a number of rounds).
Keep = Callable[[BenchSide, Batch, float], None]


def measure(sides: Sequence[BenchSide], bench: BenchJob, keep: Keep, order: random.Random) -> None:
    """Measure one side, or two sides in turns.

    The function stores results in the sides and passes them to ``keep``, even if an error ends the measurement. The
    error becomes the outcome of the side's case. ``order`` decides which side is first.
    """
    if bench.sustained_s is not None:
        _measure_sustained(sides[0], bench, bench.sustained_s, keep)
    elif len(sides) == 1:
        _measure_one(sides[0], bench, keep)
    else:
        _measure_turns(sides, bench, keep, order)


def _measure_one(side: BenchSide, bench: BenchJob, keep: Keep) -> None:
    with contextlib.ExitStack() as stack:
        meters = [stack.enter_context(SideProgram(side, copy=copy)) for copy in range(bench.concurrency)]
        each_s = meters[0].calibrate(bench)
        total = _count_iterations(bench, each_s)
        # Concurrent copies start some milliseconds apart, so use maximum-length batches.
        least = _BATCHES if len(meters) == 1 else 1
        sizes = _split_evenly(total, min(max(least, _count_batches(total, each_s, _MAX_BATCH_SECONDS)), total))
        for meter in meters:
            meter.warm()
        pool = stack.enter_context(ThreadPoolExecutor(len(meters), thread_name_prefix="bench"))
        for number, size in enumerate(sizes, 1):
            for batch in _measure_copies(pool, meters, size):
                side.batches.append(batch)
                keep(side, batch, number / len(sizes))
            # The planned counts assume undisturbed iterations. On a busy machine these take longer.
            spent_ns = sum(int(batch.duration_ns.sum()) for batch in side.batches) / len(meters)
            if bench.iterations is None and number >= _MIN_BATCHES and spent_ns >= bench.min_time_s * 1e9:
                break


def _measure_sustained(side: BenchSide, bench: BenchJob, sustained_s: float, keep: Keep) -> None:
    """Measure a side without pauses for ``sustained_s`` seconds."""
    with SideProgram(side) as meter:
        each_s = meter.calibrate(bench)
        stride = find_stride(sustained_s, each_s)
        batch_s = min(_MAX_BATCH_SECONDS, sustained_s / _SUSTAINED_BATCHES)
        meter.warm()
        begun, elapsed_s = clock.get_time_ns(), 0.0
        while elapsed_s < sustained_s:
            size = min(max(round(min(batch_s, sustained_s - elapsed_s) / each_s), 1), _MAX_ITERATIONS)
            before = side.board.info
            batch = meter.measure_batch(size)
            summary, thinned = summarise_batch(batch, list_changes(before, side.board.info)), thin_batch(batch, stride)
            side.summaries.append(summary)
            side.batches.append(thinned)
            # If the board's clock stops, the host's clock ends the measurement.
            elapsed_s = max(measure_elapsed(side.summaries), (clock.get_time_ns() - begun) / 1e9 / _STOPPED_CLOCK)
            keep(side, thinned, min(elapsed_s / sustained_s, 1.0))
            # Throttled iterations take longer.
            each_s = max(summary.end_ns - summary.start_ns, 1) / size / 1e9


def _measure_copies(pool: ThreadPoolExecutor, meters: Sequence[SideProgram], size: int) -> list[Batch]:
    """Run a batch of each program at the same time, in separate threads with a common start."""
    if len(meters) == 1:
        return [meters[0].measure_batch(size)]
    together = threading.Barrier(len(meters))

    def measure_one(meter: SideProgram) -> Batch:
        together.wait()
        return meter.measure_batch(size)

    return list(pool.map(measure_one, meters))


def _measure_turns(sides: Sequence[BenchSide], bench: BenchJob, keep: Keep, order: random.Random) -> None:
    """Measure in rounds until the result is precise enough, up to a limit."""
    rounds = most = _count_rounds(sides, bench)
    if bench.iterations is None and not is_alone(sides[0]):
        most = _LONGER * ROUNDS

    def keep_share(side: BenchSide, batch: Batch, done: float) -> None:
        keep(side, batch, done / rounds)

    for number in measure_rounds(sides, bench, keep_share, order):
        if number < rounds:
            continue
        if any(side.clock == "icount" for side in sides):
            break  # more rounds do not change the counts
        found = compare_sides(sides, bench)
        if number >= most or (found and is_precise(found)):
            break
        rounds += MIN_ROUNDS


def measure_rounds(sides: Sequence[BenchSide], bench: BenchJob, keep: Keep, order: random.Random) -> Iterator[int]:
    """Measure rounds until the caller stops. Yield the number of complete rounds after each.

    Every round reloads both sides. The sides then take turns in the order A B B A or B A A B. If a board holds only one
    program, a round measures one side after the other. ``keep`` receives each batch with the number of rounds so far,
    including the finished part of the current round.
    """
    if is_alone(sides[0]):
        yield from _measure_alone(sides, bench, keep, order)
        return
    sizes: dict[str, list[list[int]]] = {}
    for number in itertools.count():
        with contextlib.ExitStack() as stack:
            # Randomise the loading order: the side loaded first may get the better memory layout.
            loading = order.sample(list(sides), 2)
            meters = {side.label: stack.enter_context(SideProgram(side, round=number)) for side in loading}
            sizes = sizes or _plan_batches(meters, bench, _count_rounds(sides, bench))
            for meter in meters.values():
                meter.warm()
            planned = {label: rows[number % len(rows)] for label, rows in sizes.items()}
            turns = len(planned["A"]) // 2
            for turn in range(turns):
                first, second = order.sample(list(sides), 2)
                for side, at in ((first, 0), (second, 0), (second, 1), (first, 1)):
                    batch = meters[side.label].measure_batch(planned[side.label][2 * turn + at])
                    side.batches.append(batch)
                    keep(side, batch, number + (turn + 1) / turns)
        yield number + 1


def is_alone(side: BenchSide) -> bool:
    """Return True if the board holds only one program: firmware of a microcontroller."""
    return side.case.artifact is not None and side.case.artifact.runtime == MCU_RUNTIME


def _measure_alone(sides: Sequence[BenchSide], bench: BenchJob, keep: Keep, order: random.Random) -> Iterator[int]:
    """Measure rounds as :func:`measure_rounds`, with one loaded program at a time."""
    sizes: dict[str, list[list[int]]] = {}
    for number in itertools.count():
        for place, side in enumerate(order.sample(list(sides), 2)):
            with SideProgram(side, round=number) as meter:
                if side.label not in sizes:
                    sizes |= _plan_batches({side.label: meter}, bench, _count_rounds(sides, bench))
                meter.warm()
                rows = sizes[side.label]
                row = rows[number % len(rows)]
                for done, size in enumerate(row, 1):
                    batch = meter.measure_batch(size)
                    side.batches.append(batch)
                    keep(side, batch, number + (place + done / len(row)) / 2)
        yield number + 1


def _count_rounds(sides: Sequence[BenchSide], bench: BenchJob) -> int:
    """Return the number of rounds in a comparison."""
    most = ROUNDS
    if is_alone(sides[0]):
        # Each round flashes both programs. Counts of instructions do not vary between rounds.
        most = MIN_ROUNDS if sides[0].board.config.has_time else 1
    return most if bench.iterations is None else min(most, bench.iterations // 2)


def compare_sides(sides: Sequence[BenchSide], bench: BenchJob) -> SpeedComparison | None:
    """Compare B with A; None without two sides, or with too few rounds."""
    if len(sides) < 2 or any(side.clock == "icount" for side in sides):
        return None
    batches = [batch for side in sides for batch in side.batches]
    return compare_rounds(round_log_ratios(batches), min_effect=bench.min_effect)


def _plan_batches(meters: dict[str, SideProgram], bench: BenchJob, rounds: int) -> dict[str, list[list[int]]]:
    """Return label -> batch sizes per round. An A B B A turn uses two batches per side."""
    each_s = {label: meter.calibrate(bench) for label, meter in meters.items()}
    if max(each_s.values()) <= _ALIKE * min(each_s.values()):
        each_s = dict.fromkeys(each_s, min(each_s.values()))
    totals = {label: max(_count_iterations(bench, one_s), 2 * rounds) for label, one_s in each_s.items()}
    # A batch has at least one iteration.
    parts = {label: min(_count_batches(total, each_s[label], _TURN_SECONDS), total) for label, total in totals.items()}
    turns = max(1, min(parts.values()) // (2 * rounds))
    plan = {}
    for label, total in totals.items():
        sizes = _split_evenly(max(total, 2 * turns * rounds), 2 * turns * rounds)
        plan[label] = [sizes[2 * turns * number : 2 * turns * (number + 1)] for number in range(rounds)]
    return plan


def _count_iterations(bench: BenchJob, each_s: float) -> int:
    """Return a side's total iteration count."""
    return bench.iterations or max(round(bench.min_time_s / each_s), _MIN_ITERATIONS)


def _count_batches(iterations: int, each_s: float, most_s: float) -> int:
    """Return a batch count for these iterations so that no batch takes longer than ``most_s``."""
    return max(-int(-iterations * each_s // most_s), -(-iterations // _MAX_ITERATIONS))


def _split_evenly(total: int, parts: int) -> list[int]:
    """Split ``total`` iterations into ``parts`` batches that differ by at most one."""
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]


def count_instructions(sides: Sequence[BenchSide], *, loads: int, iterations: int) -> None:
    """Measure a few iterations of each side, without times. Each program is loaded multiple times.

    The counts are in the sides' batches if their options request them.
    """
    for number in range(loads):
        for side in sides:
            side.warmup = _COUNTING_WARMUP
            with SideProgram(side, round=number) as meter:
                meter.warm()
                side.batches.append(meter.measure_batch(iterations))


def count_batches(side: BenchSide, batches: Sequence[Batch]) -> InstructionCounts | None:
    """Return the instructions of the batches that the board counted; None if not requested."""
    if side.counter_problem is None:
        return None
    counts = tuple(count for batch in batches for count in batch.instructions)
    return InstructionCounts(side.counter, counts) if counts else InstructionCounts(problem=side.counter_problem)


class SideProgram:
    """Context manager for a side's loaded program."""

    def __init__(self, side: BenchSide, *, round: int = 0, copy: int = 0) -> None:
        self._side = side
        self._round = round
        self._copy = copy
        self._program: LoadedProgram | None = None
        self._repetition: Repetition | None = None  # of this meter only; a concurrent meter has another

    def __enter__(self) -> SideProgram:
        artifact = self._side.case.artifact
        assert artifact is not None
        with _record_error(self._side, Stage.LOAD):
            self._program = self._side.board.load(artifact, **load_arguments(self._side.case.options))
        self._side.loads += 1
        return self

    def __exit__(self, *_: object) -> None:
        assert self._program is not None
        self._side.repetition = merge_known(self._side.repetition, self._repetition)
        self._program.unload()

    def calibrate(self, bench: BenchJob) -> float:
        """Return an iteration's time in seconds, and set the side's number of warm-up iterations."""
        # Other load only increases times, so use the shortest of several medians.
        each_ns, size, begun = math.inf, 1, clock.get_time_ns()
        while each_ns == math.inf or (size * each_ns < _CALIBRATION_NS and size <= _MAX_ITERATIONS):
            for _ in range(_CALIBRATIONS):
                each_ns = min(each_ns, float(np.median(self._run_iterations(size).duration_ns)))
                if clock.get_time_ns() - begun > _MAX_CALIBRATION_NS:
                    break
            size *= 10
        each_s = max(each_ns, 1.0) / 1e9
        self._side.warmup = max(1, int(_WARMUP_SECONDS / each_s)) if bench.warmup is None else bench.warmup
        return each_s

    def warm(self) -> None:
        """Run the side's warm-up iterations, untimed."""
        if self._side.warmup:
            self._side.warmup_s += self._run_iterations(self._side.warmup).duration_ns.sum() / 1e9

    def measure_batch(self, size: int, warmup: int | None = None) -> Batch:
        """Measure ``size`` iterations.

        Args:
            warmup: untimed iterations before; None runs a few to refill the caches, because the other side used them.
        """
        return self._run_iterations(size, min(size // _REWARM, self._side.warmup) if warmup is None else warmup)

    def _run_iterations(self, iterations: int, warmup: int = 0) -> Batch:
        """Run iterations. The times are on the board's clock or the host's."""
        side, case = self._side, self._side.case
        assert self._program is not None and case.inputs is not None and case.artifact is not None
        names = {"names": case.artifact.output_names, **make_steps_arguments(case)}
        begun = clock.get_time_ns()
        with _record_error(side, Stage.RUN):
            result, call = self._program.run(
                case.inputs, iterations=iterations, timeout=case.options.timeout, **{**names, "warmup": warmup}
            )
            if case.decoder is not None:
                check_generation(replace(case, result=result))
        side.warmup_s += call.warmup_ns / 1e9
        # The case has the compared outputs. Drop these outputs: memory may be too small for the outputs of all prompts.
        side.result = result if case.decoder is None else replace(result, outputs={}, repetition=None)
        self._repetition = merge_known(self._repetition, result.repetition)
        counted = result.instructions
        if counted is not None:
            side.counter, side.counter_problem = counted.counter or side.counter, counted.problem
        counts = counted.counts if counted is not None else ()

        def make_batch(starts: Nanoseconds, durations: Nanoseconds, *, is_timed: bool = True) -> Batch:
            return Batch(
                side.label, self._round, self._copy, starts, durations, call.calls, counts, is_timed, call.host_ns
            )

        if result.peak_memory_bytes is not None:
            side.peak_memory_bytes = max(side.peak_memory_bytes or 0, result.peak_memory_bytes)
        if (device_bytes := result.peak_device_memory_bytes) is not None:
            side.peak_device_memory_bytes = max(side.peak_device_memory_bytes or 0, device_bytes)
        if result.iterations_ns:
            stamps = np.array(result.iterations_ns, np.int64)
            if call.cpu_ns:
                side.cpu_ns += call.cpu_ns
                side.ran_ns += int((stamps[:, 1] - stamps[:, 0]).sum())
            # Command runs report no start times: only the iteration order is known.
            base = 0 if call.board_ns else begun
            return make_batch(base + stamps[:, 0], stamps[:, 1] - stamps[:, 0])
        if not side.board.config.has_time:
            side.clock = "icount"
            each_ns = max((call.host_ns[1] - call.host_ns[0]) // (iterations + warmup), 1)
            return make_batch(begun + each_ns * np.arange(iterations), np.full(iterations, each_ns), is_timed=False)
        # The board's command reports only durations, which include a process start.
        side.clock = "host"
        walls = np.round(np.array(result.provenance["command"]["wall_s"]) * 1e9).astype(np.int64)
        if len(walls) != iterations:
            with _record_error(side, Stage.RUN):
                raise RunFailed(
                    "; ".join(result.provenance["notes"]), hint="a bench requires the time of every iteration"
                )
        return make_batch(begun + np.cumsum(walls) - walls, walls)


@contextlib.contextmanager
def _record_error(side: BenchSide, stage: Stage) -> Iterator[None]:
    """Record an error as the measured case's outcome, except for usage errors."""
    try:
        yield
    except UsageError:
        raise
    except HilError as error:
        side.case = side.case.with_error(error, stage)
        raise
