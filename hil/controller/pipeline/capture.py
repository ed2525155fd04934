"""Collect the data for a run's profile: a second pass under the runtime's profiler, counters, and clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hil.controller.devices.board_client import Invocation, ProfilePass
from hil.controller.pipeline.settings.options import PROFILED_COUNTS
from hil.core.clock import ClockFit, now_ns
from hil.core.tensors import Array
from hil.core.timeline import InvokeTiming, Sample, Span
from hil.errors import HilError

if TYPE_CHECKING:
    from hil.controller.devices.board import Board, LoadedProgram

# Short enough to detect clock throttling; uses 1 % of a slow core.
PERIOD_S = 0.05
TIMED, PROFILED = "timed", "profiled"
# IREE's profiler writes about 0.8 KB per dispatch. These limits (iterations, nanoseconds) keep the file under about 100
# MB. The minimum number of iterations to distinguish operations is always run.
_MOST_ITERATIONS, _MOST_NS = 1000, 1_000_000_000


def bounded(asked: int, typical_ns: float) -> int:
    """Return the number of iterations to profile.

    Args:
        asked: Requested number of iterations.
        typical_ns: Duration of an iteration; 0 if unknown.
    """
    in_time = round(_MOST_NS / typical_ns) if typical_ns > 0 else _MOST_ITERATIONS
    return min(asked, _MOST_ITERATIONS, max(in_time, PROFILED_COUNTS["iterations"]))


class Capture:
    """Recorder of the board's part of a profile.

    Use the recorder as a context manager around the run. An error in the recorder never fails the run.
    """

    def __init__(self, board: Board) -> None:
        self.board = board.name
        self._board = board
        self._watch = board.watch_counters(PERIOD_S)
        # The timed and the profiled run, if they took place and the board has a readable clock.
        self.calls: list[InvokeTiming] = []
        self.transfers: list[Span] = []  # transfers over the link for these runs, host clock
        self.taken: ProfilePass | None = None  # result of the profiled pass; None without one
        self.clock: ClockFit | None = None  # the board's clock relative to the host's; None if not readable
        self.notes: list[str] = []  # problems, one per line
        self._began_ns = 0

    @property
    def counters(self) -> Sequence[Sample]:
        """Counter samples that the board reported during the run."""
        return self._watch.samples

    def timed(self, call: Invocation, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Record the run whose outputs are compared."""
        if call.board_ns is not None:
            host = _make_transfer_span("timed run", call.host_ns, _count_bytes(inputs), _count_bytes(outputs))
            self.transfers.append(host)
            self.calls.append(
                InvokeTiming(TIMED, host, Span("run", *call.board_ns), call.warmup_ns, call.iterations_ns)
            )

    def profile(
        self, program: LoadedProgram, inputs: Mapping[str, Array], *, warmup: int, iterations: int, timeout: float
    ) -> None:
        """Run the program under the profiler, for the requested iterations limited by :func:`bounded`.

        Errors become notes, because the run itself already succeeded.
        """
        times = [end - start for call in self.calls for start, end in call.iterations_ns]
        runs, cold = (bounded(asked, float(np.median(times)) if times else 0.0) for asked in (iterations, warmup))
        if (runs, cold) != (iterations, warmup):
            asked = f"{iterations} iterations after {warmup} warm-up iterations"
            self.notes.append(f"requested {asked}, profiled only {runs} after {cold} to limit the file size")
        try:
            taken = program.profile(inputs, warmup=cold, iterations=runs, timeout=timeout)
        except HilError as error:
            hint = f" ({error.hint})" if error.hint else ""
            self.notes.append(f"operations not profiled: {error.message}{hint}")
            return
        self.taken = taken
        size = sum(content.nbytes for content in taken.files.values())
        self.transfers.append(
            _make_transfer_span("profiled run", (taken.host.start_ns, taken.host.end_ns), _count_bytes(inputs), size)
        )
        if taken.board is not None:
            self.calls.append(InvokeTiming(PROFILED, taken.host, taken.board))

    def __enter__(self) -> Capture:
        # If the board is lost, the run reports it.
        with contextlib.suppress(HilError):
            self._board.ping()
        self._began_ns = now_ns()
        self._watch.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        self._watch.__exit__()
        self.notes += filter(None, [self._watch.problem])
        if error is None:
            self._read_clock()

    def _read_clock(self) -> None:
        try:
            self._board.ping()
            self.clock = self._board.clock_fit(self._began_ns)
        except HilError as error:
            self.notes.append(f"the board's clock could not be read after the run: {error.message}")
            return
        if self.clock is not None and self.clock.jumped_ns:
            self.notes.append(
                f"the board's clock jumped by {self.clock.jumped_ns / 1e9:+.6f} s during the run: "
                "board times may not align with host times"
            )


def _make_transfer_span(name: str, at: tuple[int, int], out: int, back: int) -> Span:
    return replace(Span(name, *at), args={"bytes_out": out, "bytes_in": back})


def _count_bytes(tensors: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in tensors.values())
