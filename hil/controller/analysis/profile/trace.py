"""Profiles as a trace that opens in Perfetto.

Its processes: the controller with its stages and calls, the compiler where it was profiled, and for each board the
link to it and its agent. Everything is told by the clock that stamped it: the controller's is the system's monotonic
one, and each board's has an id of its own and is paired with the controller's as its drift asks for, so that a time of
the board's is shown within :data:`hil.controller.analysis.profile.trace_board.STEP_NS` of what the fit of the clocks
says.
"""

from __future__ import annotations

import gzip
import io
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hil.controller.analysis.profile.compile_time import CompileProfile
from hil.controller.analysis.profile.rows import replacing
from hil.controller.analysis.profile.show_totals import run_times
from hil.controller.analysis.profile.trace_board import BoardClock, BoardTracks
from hil.controller.analysis.profile.trace_file import Lanes, Stream, TraceFile
from hil.core.timeline import Profile, Span
from hil.errors import HilError, StorageError

_MONOTONIC = 3  # Perfetto's BUILTIN_CLOCK_MONOTONIC
_FIRST_CLOCK = 128  # the first id that means one clock in the whole trace
_GZIP_LEVEL = 1  # twice as fast as the usual one, and the file is a tenth larger
_BUFFER = 1 << 20

_LINK_COUNTERS = {"bytes_out": "bytes to the board", "bytes_in": "bytes from the board"}


@dataclass(frozen=True)
class TraceCost:
    """What writing a trace cost.

    Attributes:
        events: begins and ends of slices, and values of counters.
        bytes: the file's.
        seconds: of this machine's clock.
    """

    events: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class _Part:
    """A profile in a trace: what is put before its processes' names, and what is taken from its times of the host's."""

    profile: Profile
    before: str
    zero: int


def write_trace(
    profiles: Sequence[Profile], path: Path, *, compile_profiles: Sequence[CompileProfile] = ()
) -> TraceCost:
    """Write profiles, of one board or of several, as one trace by the controller's clock.

    Args:
        profiles: of this machine since it was started: their times of the host's are of one clock.
        path: ``.pftrace``, or ``.pftrace.gz`` for a compressed one.
        compile_profiles: of compilations that are to be shown beside them.

    Raises:
        HilError: a time lies before its clock's zero, or a number has more than 64 bits.
        StorageError: the file cannot be written.
    """
    starts = [_start(profile) for profile in profiles]
    zero = min([0, *starts])
    return _write([_Part(profile, "", zero) for profile in profiles], compile_profiles, path)


def write_comparison(a: Profile, b: Profile, path: Path) -> TraceCost:
    """Write two profiles as one trace in which both start at 0; ``A`` and ``B`` stand before their processes' names.

    Raises:
        StorageError: the file cannot be written.
    """
    return _write([_Part(a, "A ", _start(a)), _Part(b, "B ", _start(b))], [], path)


def _write(parts: Sequence[_Part], compile_profiles: Sequence[CompileProfile], path: Path) -> TraceCost:
    begun = time.perf_counter()
    try:
        with _opened(path) as file:
            trace = TraceFile(file)
            # A host's clock for each board: the pairings of one clock have to be in the order of time, and boards are
            # written one after another.
            clocks = range(_FIRST_CLOCK, _FIRST_CLOCK + 2 * len(parts), 2)
            trace.clocks({_MONOTONIC: 0, **{clock + 1: 0 for clock in clocks}}, primary=_MONOTONIC)
            _Writer(trace, parts).write(compile_profiles, clocks)
        size = path.stat().st_size
    except ValueError as error:
        hint = "a clock was read wrongly: the table of operations holds its times as they were told"
        raise HilError(f"no trace can hold a time or a number of this profile: {error}", hint=hint) from error
    except OSError as error:
        hint = "free some space or name another file"
        raise StorageError(f"{path} cannot be written: {error.strerror or error}", hint=hint) from error
    return TraceCost(trace.events, size, time.perf_counter() - begun)


class _Writer:
    def __init__(self, trace: TraceFile, parts: Sequence[_Part]) -> None:
        self._trace = trace
        self._parts = parts
        self._controllers: dict[str, int] = {}
        self._flows = itertools.count(1)

    def write(self, compile_profiles: Sequence[CompileProfile], clocks: Sequence[int]) -> None:
        calls = [self._controller(part) for part in self._parts]
        self._compiler(compile_profiles)
        for part, clock, flows in zip(self._parts, clocks, calls, strict=True):
            self._link(part)
            self._board(part, clock, flows)

    def _name(self, part: _Part) -> str:
        """The board's, with the model's and the run's where several are of it."""
        profile = part.profile
        of_board = [
            other.profile
            for other in self._parts
            if (other.before, other.profile.board) == (part.before, profile.board)
        ]
        by_model, by_run = ({getattr(other, name) for other in of_board} for name in ("model", "run"))
        more = [profile.model] * (len(by_model) > 1) + [profile.run] * (len(by_run) > 1)
        return ", ".join([profile.board, *more])

    def _controller(self, part: _Part) -> list[int]:
        """The controller's stages and calls; the numbers of the arrows that lead from these."""
        process = self._controllers.get(part.before)
        if process is None:
            process = self._controllers[part.before] = self._trace.process(f"{part.before}controller")
        alone = sum(other.before == part.before for other in self._parts) == 1
        name = "stages" if alone else f"stages: {self._name(part)}"
        flows = [next(self._flows) for _ in part.profile.calls]
        spans: list[tuple[Span, str, list[int]]] = [(span, "stage", []) for span in part.profile.stages]
        spans += [(call.host, "invoke", [flow]) for call, flow in zip(part.profile.calls, flows, strict=True)]
        self._slices(process, name, spans, part.zero)
        return flows

    def _compiler(self, compile_profiles: Sequence[CompileProfile]) -> None:
        if not compile_profiles:
            return
        process = self._trace.process("compiler")
        zero = self._parts[0].zero if self._parts else 0
        for profile in compile_profiles:
            self._slices(process, profile.folder.name, [(span, "compile", []) for span in profile.spans], zero)

    def _link(self, part: _Part) -> None:
        process = self._trace.process(f"{part.before}link: {self._name(part)}")
        transfers = part.profile.transfers
        stream = self._slices(process, "transfers", [(span, "transfer", []) for span in transfers], part.zero)
        for arg, name in _LINK_COUNTERS.items():
            moved = sorted((span.end_ns, int(span.args.get(arg, 0))) for span in transfers)
            if moved:
                track = self._trace.counter(process, name, "bytes")
                stream.count(min(span.start_ns for span in transfers), track, 0)
                for (at, _), so_far in zip(moved, itertools.accumulate(size for _, size in moved), strict=True):
                    stream.count(at, track, so_far)

    def _board(self, part: _Part, clock: int, flows: Sequence[int]) -> None:
        profile = part.profile
        name = f"{part.before}board: {self._name(part)} - agent"
        labels = [profile.model, profile.runtime, f"clock known to {profile.clock.error_ns} ns"]
        if (times := run_times(profile)).is_distorted:
            labels.append(f"the profiler adds {times.overhead:.0%}")
        if profile.clock.jumped_ns:
            labels.append(f"the clock jumped by {profile.clock.jumped_ns} ns")
        process = self._trace.process(name, labels)
        BoardTracks(
            self._trace,
            profile,
            process,
            stream=Stream(self._trace, clock),
            clock=BoardClock(self._trace, profile.clock, clock, clock + 1, part.zero),
            flows=flows,
        ).write()

    def _slices(self, process: int, name: str, spans: Sequence[tuple[Span, str, list[int]]], zero: int) -> Stream:
        """Slices of the host's clock on tracks of one name, those within others below them."""
        stream = Stream(self._trace, _MONOTONIC, zero)
        lanes = Lanes(lambda: self._trace.track(process, name))
        for span, category, flows in sorted(spans, key=lambda each: (each[0].start_ns, -each[0].end_ns)):
            track = lanes.place(span.start_ns, span.end_ns)
            stream.begin(span.start_ns, track, span.name, category=category, args=span.args, flows=flows)
            stream.end(max(span.start_ns, span.end_ns), track)
        return stream


def _start(profile: Profile) -> int:
    """The host's time at which a profile's first event is; 0 where it has none."""
    host = [span.start_ns for span in (*profile.stages, *profile.transfers, *(call.host for call in profile.calls))]
    board = [call.board.start_ns for call in profile.calls]
    board += [start for call in profile.calls for start, _ in call.iterations_ns]
    board += [one.start_ns for one in profile.rows[:1]] + [sample.at_ns for sample in profile.counters[:1]]
    return min([*host, *map(profile.clock.to_host, board)], default=0)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    with replacing(path) as temporary, temporary.open("wb") as raw:
        if path.suffix != ".gz":
            with io.BufferedWriter(raw, _BUFFER) as file:
                yield file
            return
        # Without name and time: the same profile makes the same file.
        with (
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0) as packed,
            io.BufferedWriter(packed, _BUFFER) as file,
        ):
            yield file
