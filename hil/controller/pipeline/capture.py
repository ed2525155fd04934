"""What a run leaves behind for its profile: a second pass under the runtime's profiler, counters, and the clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hil.controller.devices.board_client import Invocation, ProfilePass
from hil.controller.pipeline.options import PROFILED_COUNTS
from hil.core.clock import ClockFit, now_ns
from hil.core.tensors import Array
from hil.core.timeline import Call, Sample, Span
from hil.errors import HilError

if TYPE_CHECKING:
    from hil.controller.devices.board import Board, LoadedProgram

# Often enough to see a clock being throttled; 1 % of a slow core's time.
PERIOD_S = 0.05
TIMED, PROFILED = "timed", "profiled"
# IREE's profiler writes some 0.8 KB whenever a dispatch runs. So many iterations, and a second of them, make a file of
# about 100 MB at the most; but those that it takes to tell one operation from another are always made.
_MOST_ITERATIONS, _MOST_NS = 1000, 1_000_000_000


def bounded(asked: int, typical_ns: float) -> int:
    """How many of the iterations that were asked for are profiled; each takes ``typical_ns``, 0 where nobody knows."""
    in_time = round(_MOST_NS / typical_ns) if typical_ns > 0 else _MOST_ITERATIONS
    return min(asked, _MOST_ITERATIONS, max(in_time, PROFILED_COUNTS["iterations"]))


class Capture:
    """The board's half of a profile, collected beside a run. A context manager around the run; it never fails it."""

    def __init__(self, board: Board) -> None:
        self.board = board.name
        self._board = board
        self._watch = board.watch_counters(PERIOD_S)
        # The timed run and the profiled one, as far as they took place and the board has a clock to tell.
        self.calls: list[Call] = []
        self.transfers: list[Span] = []  # what went over the link for them, host clock
        self.taken: ProfilePass | None = None  # what the profiled pass brought; None where there was none
        self.clock: ClockFit | None = None  # the board's beside the host's; None where it has none that can be asked
        self.notes: list[str] = []  # what went wrong, a line each
        self._began_ns = 0

    @property
    def counters(self) -> Sequence[Sample]:
        """What the board told of itself meanwhile."""
        return self._watch.samples

    def timed(self, call: Invocation, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Note the run whose answer is compared."""
        if call.board_ns is not None:
            host = _transfer("timed run", call.host_ns, _bytes(inputs), _bytes(outputs))
            self.transfers.append(host)
            self.calls.append(Call(TIMED, host, Span("run", *call.board_ns), call.warmup_ns, call.iterations_ns))

    def profile(
        self, program: LoadedProgram, inputs: Mapping[str, Array], *, warmup: int, iterations: int, timeout: float
    ) -> None:
        """Run once more, under the profiler: as often as asked for, to the bound of :func:`bounded`.

        What goes wrong is a note: the run before has its answer already.
        """
        times = [end - start for call in self.calls for start, end in call.iterations_ns]
        runs, cold = (bounded(asked, float(np.median(times)) if times else 0.0) for asked in (iterations, warmup))
        if (runs, cold) != (iterations, warmup):
            asked = f"{iterations} iterations after {warmup} of warm-up"
            self.notes.append(f"of the {asked}, {runs} after {cold} were profiled: more would make huge files")
        try:
            taken = program.profile(inputs, warmup=cold, iterations=runs, timeout=timeout)
        except HilError as error:
            hint = f" ({error.hint})" if error.hint else ""
            self.notes.append(f"no profile of the operations: {error.message}{hint}")
            return
        self.taken = taken
        size = sum(content.nbytes for content in taken.files.values())
        self.transfers.append(_transfer("profiled run", (taken.host.start_ns, taken.host.end_ns), _bytes(inputs), size))
        if taken.board is not None:
            self.calls.append(Call(PROFILED, taken.host, taken.board))

    def __enter__(self) -> Capture:
        # Of a board that is gone, the run itself tells.
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
                "where its times lie beside the host's is not sure"
            )


def _transfer(name: str, at: tuple[int, int], out: int, back: int) -> Span:
    return replace(Span(name, *at), args={"bytes_out": out, "bytes_in": back})


def _bytes(tensors: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in tensors.values())
