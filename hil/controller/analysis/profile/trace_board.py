"""A board's side of a trace: its calls, iterations, operations and counters, by its own clock."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from hil.controller.analysis.profile.rows import join_list
from hil.controller.analysis.profile.trace_file import Argument, Lanes, Stream, TraceFile
from hil.core.clock import ClockFit
from hil.core.timeline import OpRow, Profile

# How far a time in the trace may be from what the fit of the clocks says, ns.
STEP_NS = 100
# A trace with more rows than this does not show them a second time, by type.
BY_TYPE_LIMIT = 200_000

# In which order they are shown.
_CALLS, _ITERATIONS, _OPERATIONS, _THREADS, _BY_TYPE, _COUNTERS = range(6)


class BoardClock:
    """A board's clock in a trace, paired with the host's as often as its drift asks for.

    A reader of the trace takes the latest pairing before a time, and from there on lets both clocks run alike. So a new
    one is due once that is wrong by :data:`STEP_NS`. It is written just before an event and never sets time back behind
    the event before, so that no slice is turned inside out.

    Args:
        trace: where it is written.
        fit: the board's clock beside the host's.
        board, host: ids of the two clocks in the trace.
        zero: what to take from every time of the host's.
    """

    def __init__(self, trace: TraceFile, fit: ClockFit, board: int, host: int, zero: int) -> None:
        self._trace = trace
        self._fit = fit
        self._board = board
        self._host = host
        self._zero = zero
        self._lasts = STEP_NS * (1 + fit.drift) / abs(fit.drift) if fit.drift else float("inf")
        self._ahead: int | None = None
        self._latest = 0
        self._due = 0.0

    def reach(self, at: int) -> None:
        """The next event will be at this time of the board's; no earlier than the one before."""
        if at >= self._due or self._ahead is None:
            self._pair(at)
        self._latest = at

    def _pair(self, at: int) -> None:
        host = self._fit.to_host(at)
        self._due = at + self._lasts
        if self._ahead is not None and host < self._latest - self._ahead:
            host = self._latest - self._ahead
            self._due = at + 1
        self._ahead = at - host
        self._trace.clocks({self._host: host - self._zero, self._board: at})


class BoardTracks:
    """Writes what a profile knows of the board's side.

    Args:
        trace: where it is written.
        profile: the profile.
        process: the track of the agent's process.
        stream: of the board's clock.
        clock: that clock.
        flows: for each call, the number of the arrow that arrives there.
    """

    def __init__(
        self,
        trace: TraceFile,
        profile: Profile,
        process: int,
        *,
        stream: Stream,
        clock: BoardClock,
        flows: Sequence[int],
    ) -> None:
        self._trace = trace
        self._profile = profile
        self._process = process
        self._stream = stream
        self._clock = clock
        self._flows = flows
        self._calls = self._lanes(process, "calls", _CALLS)
        self._iterations = self._lanes(process, "iterations", _ITERATIONS)
        self._operations = self._lanes(process, "operations", _OPERATIONS)
        self._types: dict[str, Lanes] = {}
        self._by_type: int | None = None
        if 0 < len(profile.rows) <= BY_TYPE_LIMIT:
            self._by_type = trace.track(process, "operations by type", _BY_TYPE)
        # The slices that have begun, as a heap: end, track, thousandths of threads.
        self._open: list[tuple[int, int, int]] = []
        self._slice_end = functools.lru_cache(256)(stream.slice_end)
        self._threads: int | None = None  # the counter's track
        self._now_at_work = functools.lru_cache(4096)(self._told_at_work)
        self._at_work = 0  # thousandths of threads, of the operations that tell

    def write(self) -> None:
        """Write all of it, in the order of time: what is known at once, and the rows as they come."""
        known = sorted([*self._spans(), *self._samples()], key=lambda event: (event[0], -event[1]))
        waiting = iter(known)
        event = next(waiting, None)
        for row in self._with_iterations(self._profile.rows):
            while event is not None and event[0] <= row.start_ns:
                event[2]()
                event = next(waiting, None)
            self._row(row)
        while event is not None:
            event[2]()
            event = next(waiting, None)
        self._reach(None)

    def _spans(self) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """Start, end and writer of calls and iterations."""
        counts = {call.kind: itertools.count() for call in self._profile.calls}
        for flow, call in zip(self._flows, self._profile.calls, strict=True):
            said = {**call.board.args, "kind": call.kind, "clock_error_ns": self._profile.clock.error_ns}
            board = call.board
            yield self._span(self._calls, board.name, board.start_ns, board.end_ns, "call", said, [flow])
            if call.warmup_ns > 0:
                end = call.board.start_ns + call.warmup_ns
                yield self._span(self._iterations, "warm-up", call.board.start_ns, end, "warm-up", {"kind": call.kind})
            for start, end in call.iterations_ns:
                number = next(counts[call.kind])
                said = {"kind": call.kind, "iteration": number}
                yield self._span(self._iterations, f"iteration {number}", start, end, "iteration", said)

    def _span(
        self,
        lanes: Lanes,
        name: str,
        start: int,
        end: int,
        category: str,
        args: Mapping[str, Argument],
        arriving: Sequence[int] = (),
    ) -> tuple[int, int, Callable[[], None]]:
        def write() -> None:
            self._reach(start)
            track = lanes.place(start, end)
            self._stream.begin(start, track, name, category=category, args=args, arriving=arriving)
            self._will_end(max(start, end), track)

        return start, end, write

    def _samples(self) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """Time and writer of the counters' values."""
        if not self._profile.counters:
            return
        parent = self._trace.track(self._process, "counters", _COUNTERS)
        tracks: dict[tuple[str, str], int] = {}

        def writer(at: int, track: int, value: float) -> Callable[[], None]:
            def write() -> None:
                self._reach(at)
                self._stream.count(at, track, value)

            return write

        for sample in self._profile.counters:
            what = sample.name, sample.unit
            if what not in tracks:
                tracks[what] = self._trace.counter(parent, sample.name, sample.unit, len(tracks))
            yield sample.at_ns, sample.at_ns, writer(sample.at_ns, tracks[what], sample.value)

    def _with_iterations(self, rows: Sequence[OpRow]) -> Iterator[OpRow]:
        """The rows; where only they tell when iterations were, those are written once they are over."""
        if any(call.iterations_ns for call in self._profile.calls if call.kind == "profiled"):
            yield from rows
            return
        for number, group in itertools.groupby(rows, key=lambda row: row.iteration):
            start = end = None
            for row in group:
                start = row.start_ns if start is None else start
                end = max(end or 0, row.start_ns + row.duration_ns)
                yield row
            if start is not None and end is not None:
                track = self._iterations.place(start, end)
                said: dict[str, Argument] = {"kind": "profiled", "iteration": number}
                self._stream.begin(start, track, f"iteration {number}", category="iteration", args=said)
                self._stream.end(end, track)

    def _row(self, row: OpRow) -> None:
        stream, start, end = self._stream, row.start_ns, row.start_ns + max(row.duration_ns, 0)
        self._reach(start)
        stream.renew()
        of_this, threads = stream.argument("iteration", row.iteration), 0
        if row.tile_time_ns is not None:
            of_this += stream.argument("tile_time_ns", row.tile_time_ns)
            threads = round(1000 * row.tile_time_ns / row.duration_ns) if row.duration_ns > 0 else 0
        self._operation(row, self._operations.place(start, end), end, of_this, threads)
        if self._by_type is not None:
            name = _type(row)
            if name not in self._types:
                self._types[name] = self._lanes(self._by_type, name, len(self._types))
            self._operation(row, self._types[name].place(start, end), end, of_this, 0, "by type")

    def _operation(
        self, row: OpRow, track: int, end: int, of_this: bytes, threads: int, category: str | None = None
    ) -> None:
        of_all = (track, row.op, row.kind, row.onnx_nodes, row.op_types, row.tiles, row.shapes, row.bytes, row.flops)
        event = self._stream.remember(
            (*of_all, row.bound_estimate),
            lambda: self._stream.slice(track, row.op, category or _type(row), _said(row)),
        )
        self._at_work += threads
        self._stream.put(row.start_ns, event + of_this + (self._now_at_work(self._at_work) if threads else b""))
        self._will_end(end, track, threads)

    def _reach(self, at: int | None) -> None:
        """Go on to a time, or to the end: what ends until then does."""
        while self._open and (at is None or self._open[0][0] <= at):
            end, track, threads = heapq.heappop(self._open)
            self._clock.reach(end)
            self._at_work -= threads
            event = self._slice_end(track)
            self._stream.put(end, event + self._now_at_work(self._at_work) if threads else event)
        if at is not None:
            self._clock.reach(at)

    def _will_end(self, end: int, track: int, threads: int = 0) -> None:
        heapq.heappush(self._open, (end, track, threads))

    def _told_at_work(self, thousandths: int) -> bytes:
        if self._threads is None:
            self._threads = self._trace.counter(self._process, "threads at work", "threads", _THREADS)
        return self._stream.also(self._threads, thousandths / 1000)

    def _lanes(self, parent: int, name: str, rank: int) -> Lanes:
        return Lanes(lambda: self._trace.track(parent, name, rank))


def _type(row: OpRow) -> str:
    return "+".join(row.op_types) or row.kind


def _said(row: OpRow) -> dict[str, Argument]:
    """The arguments of an operation that are the same whenever it runs."""
    said = {
        "onnx_nodes": join_list(row.onnx_nodes),
        "shapes": row.shapes,
        "tiles": row.tiles,
        "bytes": row.bytes,
        "flops": row.flops,
        "bound_estimate": row.bound_estimate,
    }
    return {name: value for name, value in said.items() if value is not None and value != ""}
