"""Measure the energy of a bench's sides, after the times: idle power, windows of several iterations, idle power."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hil.controller.analysis.bench.measure import BenchSide, SideProgram
from hil.controller.analysis.bench.prompts import split_batch
from hil.controller.analysis.bench.stats import Batch
from hil.controller.devices.board import Board
from hil.controller.devices.metering.energy import (
    EnergyRefused,
    EnergyWindow,
    TimeRange,
    add_tokens,
    evaluate_energy,
    select_gpio_windows,
)
from hil.controller.devices.metering.meter_factory import make_meter
from hil.controller.devices.metering.samples import Meter
from hil.controller.devices.metering.simulated_meter import SimulatedMeter
from hil.controller.pipeline.settings.options import MAX_RUNS
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.core.cancellation import LOOK_SECONDS, check_cancelled
from hil.core.clock import ClockFit, get_time_ns
from hil.core.steps import StepCall

# Number of windows. Fewer make the interval wide.
WINDOWS = 10
# Planned number of samples in a window, above the required minimum.
_PLANNED_SAMPLES = 50
_MIN_WINDOW_SECONDS = 0.2
# Untimed iterations before a window, relative to it, so that the power is steady when it starts.
_WARMUP_SHARE = 0.1
# Part of the call's timeout that a window may take.
_TIMEOUT_SHARE = 0.4
# Pause after a program, before the idle power is steady.
_SETTLE_SECONDS = 0.2
# An idle interval takes at most this many times as long as the config says, to get enough samples of a slow meter.
_LONGEST_IDLE = 60.0


def measure_energy(side: BenchSide, report: Callable[[float], None]) -> EnergyMeasurement:
    """Measure the energy of a side, whose times are known, with the meter of its board.

    Args:
        report: receives the finished share.

    Raises:
        UsageError: the meter cannot be opened.
        HilError: the program failed. The error is the outcome of the side's case.
    """
    kind = side.board.meter.kind
    if side.clock != "board" or not side.board.config.has_time:
        reason = "the board does not report times of iterations on its own clock"
        return EnergyMeasurement(meter=kind, refused="clock not fitted", reason=reason)
    meter = make_meter(side.board.meter)
    begun_ns = get_time_ns()
    meter.start()
    try:
        if not _wait_for_samples(meter, side.board.meter.start_s):
            problem = meter.read().problem or f"no sample within {side.board.meter.start_s:g} s"
            return EnergyMeasurement(meter=kind, refused="meter failed", reason=problem)
        run = _run_windows(side, meter, report)
    finally:
        meter.stop()
    return _evaluate(side, meter, run, begun_ns)


@dataclass(frozen=True)
class _EnergyRun:
    """Batches of the windows, and the idle intervals before and after, on the host's clock."""

    batches: Sequence[Batch]
    warmup: int
    idle: tuple[TimeRange, TimeRange]


def _run_windows(side: BenchSide, meter: Meter, report: Callable[[float], None]) -> _EnergyRun:
    with SideProgram(side) as program:
        _wait(_SETTLE_SECONDS)
        before = _stay_idle(meter, side.board)
        size, warmup = _plan_window(side, meter.read().period_ns)
        batches = []
        for number in range(WINDOWS):
            batches.append(program.measure_batch(size, warmup))
            report((number + 1) / WINDOWS)
        _observe_runs(side, meter, batches)
        _wait(_SETTLE_SECONDS)
        after = _stay_idle(meter, side.board)
    _wait_until(meter, after[1], side.board.meter.start_s)
    return _EnergyRun(batches, warmup, (before, after))


def _plan_window(side: BenchSide, period_ns: float) -> tuple[int, int]:
    """Return the number of iterations in a window, and of untimed iterations before it."""
    each_ns = max(float(np.median(np.concatenate([batch.duration_ns for batch in side.batches]))), 1.0)
    length_ns = max(_PLANNED_SAMPLES * period_ns, _MIN_WINDOW_SECONDS * 1e9)
    length_ns = min(length_ns, _TIMEOUT_SHARE * side.case.options.timeout * 1e9)
    size = min(max(math.ceil(length_ns / each_ns), 1), MAX_RUNS)
    return size, max(round(_WARMUP_SHARE * size), 1)


def _observe_runs(side: BenchSide, meter: Meter, batches: Sequence[Batch]) -> None:
    """Tell a simulated meter when the program ran."""
    if isinstance(meter, SimulatedMeter) and (fit := side.board.clock_fit(batches[0].host_ns[0])):
        for batch in batches:
            _, end = _find_range(batch)
            # The untimed iterations begin after the call was sent.
            meter.observe_run(batch.host_ns[0], fit.to_host(end))


def _evaluate(side: BenchSide, meter: Meter, run: _EnergyRun, begun_ns: int) -> EnergyMeasurement:
    config = side.board.meter
    samples = meter.read()
    side.board.ping()
    fit = side.board.clock_fit(begun_ns)
    try:
        if config.windows == "gpio":
            calls = [batch.host_ns for batch in run.batches]
            windows = select_gpio_windows(samples, calls, run.batches[0].start_ns.size, run.warmup)
            return evaluate_energy(samples, windows, run.idle, meter=config.kind)
        if fit is None or fit.jumped_ns:
            reason = "the board's clock jumped" if fit else "the board does not report its clock"
            raise EnergyRefused("clock not fitted", reason)
    except EnergyRefused as error:
        return EnergyMeasurement(meter=config.kind, refused=error.kind, reason=error.reason)
    is_on_board = samples.clock == "board"
    idle = run.idle
    if is_on_board:
        idle = (_to_board(fit, idle[0]), _to_board(fit, idle[1]))

    def convert(part: TimeRange) -> TimeRange:
        return part if is_on_board else (fit.to_host(part[0]), fit.to_host(part[1]))

    windows = [EnergyWindow((convert(_find_range(batch)),), int(batch.start_ns.size)) for batch in run.batches]
    found = evaluate_energy(
        samples, windows, idle, meter=config.kind, clock_error_ns=0.0 if is_on_board else fit.error_ns
    )
    if side.case.decoder is None:
        return found
    prompts, steps = _split_tokens(side, run.batches, convert)
    return add_tokens(found, samples, prompts, steps, idle)


def _to_board(fit: ClockFit, part: TimeRange) -> TimeRange:
    return fit.to_board(part[0]), fit.to_board(part[1])


def _find_range(batch: Batch) -> TimeRange:
    """Return the time from the first start to the last end, on the board's clock."""
    return int(batch.start_ns[0]), int(batch.start_ns[-1] + batch.duration_ns[-1])


def _split_tokens(
    side: BenchSide, batches: Sequence[Batch], convert: Callable[[TimeRange], TimeRange]
) -> tuple[list[EnergyWindow], list[EnergyWindow]]:
    """Return the windows of the prompt's calls and of the steps' calls, one of each per batch."""
    found: tuple[list[EnergyWindow], list[EnergyWindow]] = ([], [])
    for batch in batches:
        iterations = split_batch(side, batch)
        calls = [(0, call) for one in iterations for call in one.prompt]
        calls += [(1, call) for one in iterations for call in one.steps]
        calls.sort(key=lambda pair: pair[1].start_ns)
        ranges: tuple[list[TimeRange], list[TimeRange]] = ([], [])
        for kind, group in itertools.groupby(calls, key=lambda pair: pair[0]):
            ranges[kind].append(convert(_join_calls([call for _, call in group])))
        for kind in (0, 1):
            tokens = sum(call.tokens for its, call in calls if its == kind)
            if ranges[kind] and tokens:
                found[kind].append(EnergyWindow(tuple(ranges[kind]), tokens))
    return found


def _join_calls(calls: Sequence[StepCall]) -> TimeRange:
    return calls[0].start_ns, calls[-1].end_ns


def _wait_for_samples(meter: Meter, limit_s: float) -> bool:
    """Wait for two samples. Return False if the meter delivers none in time."""
    for _ in _iter_looks(limit_s):
        found = meter.read()
        if found.times_ns.size > 1 or found.problem:
            break
    return meter.read().times_ns.size > 1


def _wait_until(meter: Meter, end_ns: int, limit_s: float) -> None:
    """Wait until the samples reach a host time: they may arrive late, for example from a file."""
    for _ in _iter_looks(limit_s):
        found = meter.read()
        if found.problem or found.clock == "board" or (found.times_ns.size and found.times_ns[-1] >= end_ns):
            break


def _stay_idle(meter: Meter, board: Board) -> TimeRange:
    """Wait without a program for the idle time of the config, and until the meter has enough samples."""
    board.ping()
    start = get_time_ns()
    for _ in _iter_looks(_LONGEST_IDLE):
        elapsed_s = (get_time_ns() - start) / 1e9
        samples = meter.read()
        if elapsed_s >= max(board.meter.idle_s, _PLANNED_SAMPLES * samples.period_ns / 1e9) or samples.problem:
            break
    return start, get_time_ns()


def _iter_looks(limit_s: float) -> Iterator[None]:
    """Yield until the time is over, with pauses."""
    end = get_time_ns() + limit_s * 1e9
    while get_time_ns() < end:
        yield
        _wait(LOOK_SECONDS)


def _wait(seconds: float) -> None:
    check_cancelled()
    threading.Event().wait(seconds)
