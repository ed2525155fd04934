"""Write a profile as a Perfetto trace."""

from __future__ import annotations

import contextlib
import functools
import gzip
import heapq
import io
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hil.controller.analysis.profile.rows import join_list
from hil.controller.analysis.profile.totals import run_times, type_of
from hil.controller.analysis.profile.trace_file import Argument, Lanes, Stream, TraceFile
from hil.core.clock import ClockFit
from hil.core.files import replace_file
from hil.core.timeline import OpRow, Profile, Sample, Span
from hil.errors import HilError, StorageError

_MONOTONIC = 3  # Perfetto's BUILTIN_CLOCK_MONOTONIC
_FIRST_CLOCK = 128  # the first clock id that is global to the trace
_GZIP_LEVEL = 1  # twice as fast as the default level, for a tenth more bytes
_BUFFER = 1 << 20

_LINK_COUNTERS = {"bytes_out": "bytes to the board", "bytes_in": "bytes from the board"}

# Maximum deviation of the trace's times from the clock fit, in ns.
STEP_NS = 100
# With more rows, the trace omits the second set of tracks, by type.
BY_TYPE_LIMIT = 200_000

# Track order on the screen.
_CALLS, _ITERATIONS, _OPERATIONS, _THREADS, _BY_TYPE, _COUNTERS = range(6)


@dataclass(frozen=True)
class TraceCost:
    """The cost of writing a trace."""

    events: int  # slice starts and ends, and counter values
    bytes: int
    seconds: float  # on this machine's clock


@dataclass(frozen=True)
class _Part:
    """A profile in a trace, with a prefix for process names and an offset to subtract from host times."""

    profile: Profile
    before: str
    zero: int


def write_trace(
    profiles: Sequence[Profile], path: Path, *, compilations: Mapping[str, Sequence[Span]] | None = None
) -> TraceCost:
    """Write profiles from any number of boards as a trace, on the controller's clock.

    Args:
        profiles: profiles from this machine since its last boot, so that host times have the same clock.
        path: ``.pftrace``, or ``.pftrace.gz`` for compression.
        compilations: track -> compilation spans to include.

    Raises:
        HilError: a time precedes the clock's zero, or a number exceeds 64 bits.
        StorageError: the file cannot be written.
    """
    starts = [_find_start(profile) for profile in profiles]
    zero = min([0, *starts])
    return _write_file([_Part(profile, "", zero) for profile in profiles], compilations or {}, path)


def write_comparison(a: Profile, b: Profile, path: Path) -> TraceCost:
    """Write two profiles as a single trace, with process names that start with ``A`` and ``B``.

    The profiles are aligned at their first operations, and the earlier start is at 0. If a profile has no operations,
    both profiles start at 0.
    """
    zeros = starts = [_find_start(one) for one in (a, b)]
    if a.rows and b.rows:
        firsts = [one.clock.to_host(one.rows[0].start_ns) for one in (a, b)]
        before = max(first - start for first, start in zip(firsts, starts, strict=True))
        zeros = [first - before for first in firsts]
    return _write_file(
        [_Part(one, f"{letter} ", zero) for one, letter, zero in zip((a, b), "AB", zeros, strict=True)], {}, path
    )


def _write_file(parts: Sequence[_Part], compilations: Mapping[str, Sequence[Span]], path: Path) -> TraceCost:
    begun = time.perf_counter()
    try:
        with _open_trace(path) as file:
            trace = TraceFile(file)
            # Every board gets a separate host clock. The snapshots of a clock must be in time order, but the boards are
            # written one after the other.
            clocks = range(_FIRST_CLOCK, _FIRST_CLOCK + 2 * len(parts), 2)
            trace.write_clocks({_MONOTONIC: 0, **{clock + 1: 0 for clock in clocks}}, primary=_MONOTONIC)
            _TraceWriter(trace, parts).write(compilations, clocks)
        size = path.stat().st_size
    except ValueError as error:
        hint = "a clock reading is invalid: see the operation table for the recorded times"
        raise HilError(
            f"cannot write a trace of this profile: time or number out of range: {error}", hint=hint
        ) from error
    except OSError as error:
        hint = "free disk space or choose a different file"
        raise StorageError(f"{path} cannot be written: {error.strerror or error}", hint=hint) from error
    return TraceCost(trace.events, size, time.perf_counter() - begun)


class _TraceWriter:
    def __init__(self, trace: TraceFile, parts: Sequence[_Part]) -> None:
        self._trace = trace
        self._parts = parts
        self._controllers: dict[str, int] = {}
        self._flows = itertools.count(1)

    def write(self, compilations: Mapping[str, Sequence[Span]], clocks: Sequence[int]) -> None:
        calls = [self._write_controller(part) for part in self._parts]
        if compilations:
            process = self._trace.process("compiler")
            zero = self._parts[0].zero if self._parts else 0
            for name, spans in compilations.items():
                self._write_slices(process, name, [(span, "compile", []) for span in spans], zero)
        for part, clock, flows in zip(self._parts, clocks, calls, strict=True):
            self._write_link(part)
            self._write_console(part)
            self._write_board(part, clock, flows)

    def _format_board_name(self, part: _Part) -> str:
        """Return the board's name, with the model and run if multiple profiles have this board."""
        profile = part.profile
        here = [other.profile for other in self._parts if other.before == part.before]
        of_board = [other for other in here if other.board == profile.board]
        more = [
            getattr(profile, name) for name in ("model", "run") if len({getattr(other, name) for other in of_board}) > 1
        ]
        return ", ".join([profile.board, *more])

    def _write_controller(self, part: _Part) -> list[int]:
        """Write the controller's stages and calls; return ids for the flow arrows that start at the calls."""
        process = self._controllers.get(part.before)
        if process is None:
            process = self._controllers[part.before] = self._trace.process(f"{part.before}controller")
        alone = sum(other.before == part.before for other in self._parts) == 1
        name = "stages" if alone else f"stages: {self._format_board_name(part)}"
        flows = [next(self._flows) for _ in part.profile.calls]
        spans: list[tuple[Span, str, list[int]]] = [(span, "stage", []) for span in part.profile.stages]
        spans += [(call.host, "invoke", [flow]) for call, flow in zip(part.profile.calls, flows, strict=True)]
        self._write_slices(process, name, spans, part.zero)
        return flows

    def _write_link(self, part: _Part) -> None:
        process = self._trace.process(f"{part.before}link: {self._format_board_name(part)}")
        transfers = part.profile.transfers
        stream = self._write_slices(process, "transfers", [(span, "transfer", []) for span in transfers], part.zero)
        for arg, name in _LINK_COUNTERS.items():
            moved = sorted((span.end_ns, int(span.args.get(arg, 0))) for span in transfers)
            if moved:
                track = self._trace.add_counter(process, name, "bytes")
                stream.count(min(span.start_ns for span in transfers), track, 0)
                for (at, _), so_far in zip(moved, itertools.accumulate(size for _, size in moved), strict=True):
                    stream.count(at, track, so_far)

    def _write_console(self, part: _Part) -> None:
        if lines := part.profile.console:
            process = self._trace.process(f"{part.before}console: {self._format_board_name(part)}")
            self._write_slices(process, "lines", [(span, "console", []) for span in lines], part.zero)

    def _write_board(self, part: _Part, clock: int, flows: Sequence[int]) -> None:
        profile = part.profile
        name = f"{part.before}board: {self._format_board_name(part)} - agent"
        labels = [profile.model, profile.runtime, f"clock accurate to {profile.clock.error_ns} ns"]
        if (times := run_times(profile)).is_distorted:
            labels.append(f"the profiler adds {times.overhead:.0%}")
        if profile.ticks is not None:
            labels.append("emulated: its operations have ticks, which are not times")
        labels += profile.energy
        if profile.clock.jumped_ns:
            labels.append(f"the clock jumped by {profile.clock.jumped_ns} ns")
        process = self._trace.process(name, labels)
        stream, pairs = Stream(self._trace, clock), TraceClock(self._trace, profile.clock, clock, clock + 1, part.zero)
        BoardTracks(self._trace, profile, process, stream=stream, clock=pairs, flows=flows).write()

    def _write_slices(self, process: int, name: str, spans: Sequence[tuple[Span, str, list[int]]], zero: int) -> Stream:
        """Write slices with host times on tracks of the same name, nested slices below their parents."""
        stream = Stream(self._trace, _MONOTONIC, zero)
        lanes = Lanes(lambda: self._trace.track(process, name))
        for span, category, flows in sorted(spans, key=lambda each: (each[0].start_ns, -each[0].end_ns)):
            track = lanes.place(span.start_ns, span.end_ns)
            stream.begin(span.start_ns, track, span.name, category=category, args=span.args, flows=flows)
            stream.end(max(span.start_ns, span.end_ns), track)
        return stream


def _find_start(profile: Profile) -> int:
    """Return the host time of a profile's first event; 0 if the profile has no events."""
    host = [span.start_ns for span in (*profile.stages, *profile.transfers, *profile.console)]
    host += [call.host.start_ns for call in profile.calls]
    board = [call.board.start_ns for call in profile.calls]
    board += [start for call in profile.calls for start, _ in call.iterations_ns]
    board += [one.start_ns for one in profile.rows[:1]] + [sample.at_ns for sample in profile.counters[:1]]
    return min([*host, *map(profile.clock.to_host, board)], default=0)


@contextlib.contextmanager
def _open_trace(path: Path) -> Iterator[IO[bytes]]:
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(stack.enter_context(replace_file(path)).open("wb"))
        if path.suffix == ".gz":
            # Omit the name and time, so that the same profile gives the same file.
            file = stack.enter_context(gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0))
        yield stack.enter_context(io.BufferedWriter(file, _BUFFER))


class TraceClock:
    """Clock of a board in a trace. The clock is paired with the host clock as often as the drift requires.

    For each time, trace readers use the latest pairing before it, and assume that both clocks run at the same rate from
    there. When the error would exceed :data:`STEP_NS`, a new pairing is written just before the next event. A pairing
    never moves the time before the previous event, because a slice could otherwise end before it starts.

    Args:
        board, host: clock ids in the trace.
        zero: offset to subtract from host times.
    """

    def __init__(self, trace: TraceFile, fit: ClockFit, board: int, host: int, zero: int) -> None:
        self._trace = trace
        self._fit = fit
        self._board_id = board
        self._host = host
        self._zero = zero
        self._lasts = STEP_NS * (1 + fit.drift) / abs(fit.drift) if fit.drift else float("inf")
        self._ahead: int | None = None
        self._latest = 0
        self._due = 0.0

    def reach(self, at: int) -> None:
        """Pair the clocks if needed for an event at a board time. Events must be in time order."""
        if at >= self._due or self._ahead is None:
            self._pair_clocks(at)
        self._latest = at

    def _pair_clocks(self, at: int) -> None:
        host = self._fit.to_host(at)
        self._due = at + self._lasts
        if self._ahead is not None and host < self._latest - self._ahead:
            host = self._latest - self._ahead
            self._due = at + 1
        self._ahead = at - host
        self._trace.write_clocks({self._host: host - self._zero, self._board_id: at})


class BoardTracks:
    """Writes the board's part of a profile. ``flows`` contains the id of the arrow to each call."""

    def __init__(
        self,
        trace: TraceFile,
        profile: Profile,
        process: int,
        *,
        stream: Stream,
        clock: TraceClock,
        flows: Sequence[int],
    ) -> None:
        self._trace = trace
        self._profile = profile
        self._process = process
        self._stream = stream
        self._clock = clock
        self._flows = flows
        self._calls = self._create_lanes(process, "calls", _CALLS)
        self._iterations = self._create_lanes(process, "iterations", _ITERATIONS)
        self._operations = self._create_lanes(
            process, f"device: {profile.device}" if profile.device else "operations", _OPERATIONS
        )
        self._types: dict[str, Lanes] = {}
        self._by_type: int | None = None
        if 0 < len(profile.rows) <= BY_TYPE_LIMIT:
            self._by_type = trace.track(process, "operations by type", _BY_TYPE)
        # Heap with open slices: end, track, and threads in thousandths.
        self._open: list[tuple[int, int, int]] = []
        self._slice_end = functools.lru_cache(256)(stream.slice_end)
        self._threads: int | None = None  # the counter's track
        self._cached_thread_count = functools.lru_cache(4096)(self._encode_thread_count)
        self._at_work = 0  # number of running threads in thousandths, over the operations that report it

    def write(self) -> None:
        """Write everything in time order, merging calls and counters with the streamed rows."""
        known = deque(sorted([*self._iter_spans(), *self._iter_samples()], key=lambda event: (event[0], -event[1])))
        for row in self._add_iterations(self._profile.rows):
            while known and known[0][0] <= row.start_ns:
                known.popleft()[2]()
            self._write_row(row)
        for _, _, write in known:
            write()
        self._flush_until(None)

    def _iter_spans(self) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """Yield start, end and writer for every call and iteration."""
        counts = {call.kind: itertools.count() for call in self._profile.calls}
        for flow, call in zip(self._flows, self._profile.calls, strict=True):
            board, kind = call.board, {"kind": call.kind}
            args = {**board.args, **kind, "clock_error_ns": self._profile.clock.error_ns}
            yield self._make_span_writer(self._calls, board, "call", args, [flow])
            if call.warmup_ns > 0:
                warmup = Span("warm-up", board.start_ns, board.start_ns + call.warmup_ns)
                yield self._make_span_writer(self._iterations, warmup, "warm-up", kind)
            for start, end in call.iterations_ns:
                number = next(counts[call.kind])
                span = Span(f"iteration {number}", start, end)
                yield self._make_span_writer(self._iterations, span, "iteration", {**kind, "iteration": number})

    def _make_span_writer(
        self, lanes: Lanes, span: Span, category: str, args: Mapping[str, Argument], arriving: Sequence[int] = ()
    ) -> tuple[int, int, Callable[[], None]]:
        def write() -> None:
            self._flush_until(span.start_ns)
            track = lanes.place(span.start_ns, span.end_ns)
            self._stream.begin(span.start_ns, track, span.name, category=category, args=args, arriving=arriving)
            self._schedule_end(max(span.start_ns, span.end_ns), track)

        return span.start_ns, span.end_ns, write

    def _iter_samples(self) -> Iterator[tuple[int, int, Callable[[], None]]]:
        """Yield the time (as start and end) and writer for every counter value."""
        if not self._profile.counters:
            return
        parent = self._trace.track(self._process, "counters", _COUNTERS)
        tracks: dict[tuple[str, str], int] = {}
        for sample in self._profile.counters:
            what = sample.name, sample.unit
            if what not in tracks:
                tracks[what] = self._trace.add_counter(parent, sample.name, sample.unit, len(tracks))
            yield sample.at_ns, sample.at_ns, functools.partial(self._write_sample, sample, tracks[what])

    def _write_sample(self, sample: Sample, track: int) -> None:
        self._flush_until(sample.at_ns)
        self._stream.count(sample.at_ns, track, sample.value)

    def _add_iterations(self, rows: Sequence[OpRow]) -> Iterator[OpRow]:
        """Yield the rows. If the times of iterations are unknown, write each iteration after its last row."""
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
                args: dict[str, Argument] = {"kind": "profiled", "iteration": number}
                self._stream.begin(start, track, f"iteration {number}", category="iteration", args=args)
                self._stream.end(end, track)

    def _write_row(self, row: OpRow) -> None:
        stream, start, end = self._stream, row.start_ns, row.start_ns + max(row.duration_ns, 0)
        self._flush_until(start)
        stream.renew()
        of_this, threads = stream.encode_argument("iteration", row.iteration), 0
        if row.tile_time_ns is not None:
            of_this += stream.encode_argument("tile_time_ns", row.tile_time_ns)
            threads = round(1000 * row.tile_time_ns / row.duration_ns) if row.duration_ns > 0 else 0
        self._write_operation(row, self._operations.place(start, end), end, of_this, threads)
        if self._by_type is not None:
            name = type_of(row)
            if name not in self._types:
                self._types[name] = self._create_lanes(self._by_type, name, len(self._types))
            self._write_operation(row, self._types[name].place(start, end), end, of_this, 0, "by type")

    def _write_operation(
        self, row: OpRow, track: int, end: int, of_this: bytes, threads: int, category: str | None = None
    ) -> None:
        of_all = (track, row.op, row.kind, row.onnx_nodes, row.op_types, row.tiles, row.shapes, row.bytes, row.flops)
        event = self._stream.remember(
            (*of_all, row.bound_estimate),
            lambda: self._stream.slice(track, row.op, category or type_of(row), _build_arguments(row)),
        )
        self._at_work += threads
        self._stream.put(row.start_ns, event + of_this + (self._cached_thread_count(self._at_work) if threads else b""))
        self._schedule_end(end, track, threads)

    def _flush_until(self, at: int | None) -> None:
        """Write slice ends up to a time; None means all."""
        while self._open and (at is None or self._open[0][0] <= at):
            end, track, threads = heapq.heappop(self._open)
            self._clock.reach(end)
            self._at_work -= threads
            event = self._slice_end(track)
            self._stream.put(end, event + self._cached_thread_count(self._at_work) if threads else event)
        if at is not None:
            self._clock.reach(at)

    def _schedule_end(self, end: int, track: int, threads: int = 0) -> None:
        heapq.heappush(self._open, (end, track, threads))

    def _encode_thread_count(self, thousandths: int) -> bytes:
        if self._threads is None:
            self._threads = self._trace.add_counter(self._process, "threads at work", "threads", _THREADS)
        return self._stream.encode_counter(self._threads, thousandths / 1000)

    def _create_lanes(self, parent: int, name: str, rank: int) -> Lanes:
        return Lanes(lambda: self._trace.track(parent, name, rank))


def _build_arguments(row: OpRow) -> dict[str, Argument]:
    """Return the arguments that are the same for all executions of an operation."""
    names = ("shapes", "tiles", "bytes", "flops", "bound_estimate")
    arguments = {"onnx_nodes": join_list(row.onnx_nodes), **{name: getattr(row, name) for name in names}}
    return {name: value for name, value in arguments.items() if value is not None and value != ""}
