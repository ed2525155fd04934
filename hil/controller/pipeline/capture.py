"""Collect the data for a run's profile: a second pass under the runtime's profiler, counters, and clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hil.controller.devices.board import Board
from hil.controller.devices.board_client import Invocation
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.devices.metering.power_watch import PowerWatch
from hil.controller.pipeline.case import Capture
from hil.controller.pipeline.settings.options import PROFILED_COUNTS
from hil.core.clock import get_time_ns
from hil.core.tensors import Array
from hil.core.timeline import InvokeTiming, Span
from hil.errors import HilError

# Period for counter samples: short enough to detect clock throttling, and takes 1 % of a slow core.
PERIOD_SECONDS = 0.05
TIMED, PROFILED = "timed", "profiled"
# Maximum iterations and nanoseconds to profile. IREE's profiler writes about 0.8 KB per dispatch, so the file stays
# under about 100 MB. The minimum number of iterations that distinguishes operations always runs.
_MOST_ITERATIONS, _MOST_NS = 1000, 1_000_000_000


def limit_iterations(asked: int, typical_ns: float) -> int:
    """Return the number of iterations to profile.

    Args:
        asked: Requested number of iterations.
        typical_ns: Duration of an iteration; 0 if unknown.
    """
    in_time = round(_MOST_NS / typical_ns) if typical_ns > 0 else _MOST_ITERATIONS
    return min(asked, _MOST_ITERATIONS, max(in_time, PROFILED_COUNTS["iterations"]))


class CaptureRecorder:
    """Recorder of the board's part of a profile.

    Use the recorder as a context manager around the run. An error in the recorder never fails the run.

    Attributes:
        capture: the data so far. The counters and the clock follow at the end of the run.
    """

    def __init__(self, board: Board) -> None:
        self.capture = Capture(board.name, icount_shift=board.config.icount_shift)
        self._board = board
        self._watch = board.watch_counters(PERIOD_SECONDS)
        self._power = PowerWatch(board)
        self._began_ns = 0

    def record_run(self, call: Invocation, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Record the run whose outputs are compared."""
        self._power.observe_run(call.host_ns)
        if call.board_ns is not None:
            host = _make_transfer_span("timed run", call.host_ns, _count_bytes(inputs), _count_bytes(outputs))
            self.capture.transfers.append(host)
            self.capture.calls.append(
                InvokeTiming(TIMED, host, Span("run", *call.board_ns), call.warmup_ns, call.iterations_ns)
            )

    def profile(
        self, program: LoadedProgram, inputs: Mapping[str, Array], *, warmup: int, iterations: int, timeout: float
    ) -> None:
        """Run the program under the profiler, for the requested iterations limited by :func:`limit_iterations`.

        Errors become notes, because the run itself already succeeded.
        """
        times = [end - start for call in self.capture.calls for start, end in call.iterations_ns]
        runs, cold = (
            limit_iterations(asked, float(np.median(times)) if times else 0.0) for asked in (iterations, warmup)
        )
        if (runs, cold) != (iterations, warmup):
            asked = f"{iterations} iterations after {warmup} warm-up iterations"
            self.capture.notes.append(
                f"hil profiled only {runs} iterations after {cold}, instead of {asked}, to limit the file size"
            )
        try:
            taken = program.profile(inputs, warmup=cold, iterations=runs, timeout=timeout)
        except HilError as error:
            hint = f" ({error.hint})" if error.hint else ""
            self.capture.notes.append(f"operations not profiled: {error.message}{hint}")
            return
        self.capture.taken = taken
        self._power.observe_run((taken.host.start_ns, taken.host.end_ns))
        size = sum(content.nbytes for content in taken.files.values())
        self.capture.transfers.append(
            _make_transfer_span("profiled run", (taken.host.start_ns, taken.host.end_ns), _count_bytes(inputs), size)
        )
        if taken.board is not None and self._board.config.has_time:
            self.capture.calls.append(InvokeTiming(PROFILED, taken.host, taken.board))

    def __enter__(self) -> CaptureRecorder:
        # The run itself reports a lost board.
        with contextlib.suppress(HilError):
            self._board.ping()
        self._began_ns = get_time_ns()
        self._watch.__enter__()
        self._power.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        self._power.__exit__()
        self._watch.__exit__()
        self.capture.notes += filter(None, [self._watch.problem, self._power.problem])
        if error is None:
            self._read_clock()
        self.capture.counters = [*self._watch.samples, *self._power.list_samples(self.capture.clock)]

    def _read_clock(self) -> None:
        try:
            self._board.ping()
            clock = self.capture.clock = self._board.clock_fit(self._began_ns)
        except HilError as error:
            self.capture.notes.append(f"the board's clock could not be read after the run: {error.message}")
            return
        if clock is not None and clock.jumped_ns:
            self.capture.notes.append(
                f"the board's clock jumped by {clock.jumped_ns / 1e9:+.6f} s during the run: "
                "board times may not align with host times"
            )


def _make_transfer_span(name: str, at: tuple[int, int], out: int, back: int) -> Span:
    return replace(Span(name, *at), args={"bytes_out": out, "bytes_in": back})


def _count_bytes(tensors: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in tensors.values())
