"""Measure the energy of a loaded program on a board with a meter: idle power, windows of iterations, idle power."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
from hil.controller.pipeline.records.generation import TokenTimes
from hil.controller.pipeline.settings.options import MAX_RUNS
from hil.controller.records.measurements.energy import EnergyMeasurement
from hil.core.cancellation import LOOK_SECONDS, check_cancelled
from hil.core.clock import ClockFit, get_time_ns
from hil.core.steps import StepCall
from hil.errors import BoardUnfit, UsageError

# Number of windows. Fewer make the interval wide.
WINDOWS = 10
# Planned number of samples in a window, above the required minimum.
_PLANNED_SAMPLES = 50
_MIN_WINDOW_SECONDS = 0.2
# Untimed iterations before a window, relative to it, so that the power is steady when it starts.
_WARMUP_SHARE = 0.1
# hil repeats a first window that is too short, with iterations for a longer one.
_TRIAL_MARGIN, _MAX_TRIALS, _MAX_GROWTH = 1.2, 6, 100
# Part of the call's timeout that a window may take.
_TIMEOUT_SHARE = 0.4
# Pause after a program, before the idle power is steady.
_SETTLE_SECONDS = 0.2
_GPIO_TOKENS = "the pulses of a gpio do not separate the prompt from the steps"
# Maximum seconds of an idle interval, to get enough samples of a slow meter.
_LONGEST_IDLE = 60.0


@dataclass(frozen=True)
class EnergyCall:
    """A call of the program that is a window.

    Attributes:
        board_ns: from the start of the first timed iteration to the end of the last one, on the board's clock.
        host_ns: from sending to the last byte received, on the host's clock.
        tokens: calls of each generation; empty without a decoder.
    """

    board_ns: TimeRange
    host_ns: TimeRange
    iterations: int
    tokens: Sequence[TokenTimes] = ()


# Run a number of timed iterations after a number of untimed ones.
RunWindow = Callable[[int, int], EnergyCall]


@dataclass(frozen=True)
class _EnergyRun:
    """Calls of the windows, and the idle intervals before and after, on the host's clock."""

    calls: Sequence[EnergyCall]
    warmup: int
    idle: tuple[TimeRange, TimeRange]


def refuse_energy(board: Board, reason: str) -> EnergyMeasurement:
    """Return a measurement that is refused because the times of a window are unknown."""
    return EnergyMeasurement(meter=board.meter.kind, refused="clock not fitted", reason=reason)


def measure_energy(
    board: Board, run: RunWindow, *, each_ns: float, timeout_s: float, report: Callable[[float], None]
) -> EnergyMeasurement:
    """Measure the energy of a loaded program with the meter of its board.

    Args:
        each_ns: typical duration of an iteration.
        timeout_s: time limit of a call of ``run``.
        report: receives the finished share.

    Raises:
        UsageError: a package's meter cannot be loaded.
        HilError: the program failed.
    """
    kind = board.meter.kind
    meter = make_meter(board)
    begun_ns = get_time_ns()
    try:
        meter.start()
    except (BoardUnfit, UsageError) as error:
        reason = f"{error.message}; {error.hint}" if error.hint else error.message
        return EnergyMeasurement(meter=kind, refused="meter failed", reason=reason)
    try:
        if not wait_for_samples(meter, board.meter.start_s):
            problem = meter.read().problem or f"no sample within {board.meter.start_s:g} s"
            return EnergyMeasurement(meter=kind, refused="meter failed", reason=problem)
        found = _run_windows(board, meter, run, max(each_ns, 1.0), timeout_s, report)
    finally:
        meter.stop()
    return _evaluate(board, meter, found, begun_ns)


def _run_windows(
    board: Board,
    meter: Meter,
    run: RunWindow,
    each_ns: float,
    timeout_s: float,
    report: Callable[[float], None],
) -> _EnergyRun:
    _wait(_SETTLE_SECONDS)
    before = _stay_idle(meter, board)
    first, warmup = run_first_window(run, each_ns=each_ns, period_ns=meter.read().period_ns, timeout_s=timeout_s)
    calls = [first]
    report(1 / WINDOWS)
    for number in range(1, WINDOWS):
        calls.append(run(first.iterations, warmup))
        report((number + 1) / WINDOWS)
    _observe_runs(board, meter, calls)
    _wait(_SETTLE_SECONDS)
    after = _stay_idle(meter, board)
    _wait_until(board, meter, after[1])
    return _EnergyRun(calls, warmup, (before, after))


def run_first_window(run: RunWindow, *, each_ns: float, period_ns: float, timeout_s: float) -> tuple[EnergyCall, int]:
    """Return the first window that is long enough, and the number of untimed iterations before it.

    The first iterations of a program are slow, so ``each_ns`` may give windows that are too short.

    Args:
        period_ns: time between two samples of the meter.
    """
    length_ns = max(_PLANNED_SAMPLES * period_ns, _MIN_WINDOW_SECONDS * 1e9)
    length_ns = min(length_ns, _TIMEOUT_SHARE * timeout_s * 1e9)
    size = _count_iterations(length_ns, each_ns)
    for _ in range(_MAX_TRIALS):
        warmup = max(round(_WARMUP_SHARE * size), 1)
        call = run(size, warmup)
        measured_ns = call.board_ns[1] - call.board_ns[0]
        # Without a clock of the board, the measured time is 0.
        if measured_ns >= length_ns or measured_ns <= 0 or size == MAX_RUNS:
            break
        wanted = _count_iterations(_TRIAL_MARGIN * length_ns, measured_ns / size)
        size = min(max(wanted, size + 1), _MAX_GROWTH * size, MAX_RUNS)
    return call, warmup


def _count_iterations(length_ns: float, each_ns: float) -> int:
    return min(max(math.ceil(length_ns / each_ns), 1), MAX_RUNS)


def _observe_runs(board: Board, meter: Meter, calls: Sequence[EnergyCall]) -> None:
    """Tell a simulated meter when the program ran."""
    if isinstance(meter, SimulatedMeter) and (fit := board.clock_fit(calls[0].host_ns[0])):
        for call in calls:
            # The untimed iterations begin after the call was sent.
            meter.observe_run(call.host_ns[0], fit.to_host(call.board_ns[1]))
            for prompt in (one for tokens in call.tokens for one in tokens.prompt):
                meter.observe_prompt(fit.to_host(prompt.start_ns), fit.to_host(prompt.end_ns))


def _evaluate(board: Board, meter: Meter, run: _EnergyRun, begun_ns: int) -> EnergyMeasurement:
    config = board.meter
    samples = meter.read()
    board.ping()
    fit = board.clock_fit(begun_ns)
    try:
        if config.windows == "gpio":
            calls = [call.host_ns for call in run.calls]
            windows = select_gpio_windows(samples, calls, run.calls[0].iterations, run.warmup)
            found = evaluate_energy(samples, windows, run.idle, meter=config.kind)
            has_tokens = any(call.tokens for call in run.calls) and found.refused is None
            return found.replace(token_reason=_GPIO_TOKENS) if has_tokens else found
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

    windows = [EnergyWindow((convert(call.board_ns),), call.iterations) for call in run.calls]
    error_ns = 0.0 if is_on_board else fit.error_ns
    found = evaluate_energy(samples, windows, idle, meter=config.kind, clock_error_ns=error_ns)
    if not any(call.tokens for call in run.calls):
        return found
    return add_tokens(found, samples, *_split_tokens(run.calls, convert), idle, clock_error_ns=error_ns)


def _to_board(fit: ClockFit, part: TimeRange) -> TimeRange:
    return fit.to_board(part[0]), fit.to_board(part[1])


def _split_tokens(
    windows: Sequence[EnergyCall], convert: Callable[[TimeRange], TimeRange]
) -> tuple[list[EnergyWindow], list[EnergyWindow]]:
    """Return the windows of the prompt's calls and of the steps' calls, one of each per call of the program."""
    found: tuple[list[EnergyWindow], list[EnergyWindow]] = ([], [])
    for window in windows:
        calls = [(0, call) for one in window.tokens for call in one.prompt]
        calls += [(1, call) for one in window.tokens for call in one.steps]
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


def wait_for_samples(meter: Meter, limit_s: float) -> bool:
    """Wait for two samples. Return False if the meter delivers none in time."""
    for _ in _iter_looks(limit_s):
        found = meter.read()
        if found.times_ns.size > 1 or found.problem:
            break
    return meter.read().times_ns.size > 1


def _wait_until(board: Board, meter: Meter, end_ns: int) -> None:
    """Wait until the samples reach a host time: they may arrive late, for example from a file or from the board."""
    if meter.read().clock == "board":
        board.ping()
        fit = board.clock_fit(end_ns)
        if fit is None:
            return
        end_ns = fit.to_board(end_ns)
    for _ in _iter_looks(board.meter.start_s):
        found = meter.read()
        if found.problem or (found.times_ns.size and found.times_ns[-1] >= end_ns):
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
