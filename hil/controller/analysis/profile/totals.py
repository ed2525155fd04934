"""Sum a profile's rows up: by operation, by ONNX node or by its type; and the times of whole runs."""

from __future__ import annotations

import itertools
import re
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from hil.controller.storage.texts import plain
from hil.core.timeline import OpRow, Profile

NOT_THE_MODEL = "(runtime)"
# A profiler that adds more than this to a run distorts its times: they are shown with it, and judge nothing.
MOST_OVERHEAD = 0.2

_PREFIX_LEAST, _LEFT_LEAST = 10, 6


@dataclass(frozen=True)
class Total:
    """The rows of one group summed up. Times are nanoseconds of the board's clock."""

    name: str  # of the operation, the nodes or the types: the group's key in :data:`GROUPS`
    kind: str  # ``compute`` or ``runtime``, as in :class:`OpRow`
    # onnx_nodes, op_types, ops: of all rows, without duplicates, in the order of their first execution.
    onnx_nodes: tuple[str, ...]
    op_types: tuple[str, ...]
    ops: tuple[str, ...]
    calls: int  # number of rows, in all iterations
    # total_ns, mean_ns, p50_ns: of the rows' own times (:func:`own_times`).
    total_ns: int
    run_ns: float  # time of the group in an iteration, the median over the iterations
    mean_ns: float
    p50_ns: float
    share: float  # ``run_ns`` by the sum of all groups' ``run_ns``, 0 to 1
    # time of tiles by duration: the mean number of busy threads; None if the runtime does not report it.
    parallelism: float | None
    # flops_per_s, bytes_per_s: estimated work by measured time; None if any row has no estimate.
    flops_per_s: float | None
    bytes_per_s: float | None
    intensity: float | None  # estimated operations per byte; None if unknown
    bound_estimate: str  # ``compute`` or ``memory`` if all rows' estimates agree, else ""


@dataclass(frozen=True)
class RunTimes:
    """Durations of whole runs on the board, in nanoseconds; None if not measured."""

    timed_p50_ns: float | None  # median of the runs without a profiler, whose outputs are compared
    profiled_p50_ns: float | None  # median of the runs that the rows come from
    iterations: int

    @property
    def overhead(self) -> float | None:
        """Relative time that profiling adds: 0.05 for 5 %."""
        if not self.timed_p50_ns or self.profiled_p50_ns is None:
            return None
        return self.profiled_p50_ns / self.timed_p50_ns - 1

    @property
    def is_distorted(self) -> bool:
        """Whether the profiler adds more than :data:`MOST_OVERHEAD`."""
        return (self.overhead or 0.0) > MOST_OVERHEAD

    @property
    def mark(self) -> str:
        """The suffix of each figure that the profiler distorts; "" if it does not."""
        return f" ({self.overhead:+.0%})" if self.is_distorted else ""


def type_of(row: OpRow) -> str:
    """Return the types of an operation's nodes, or its kind without any."""
    return "+".join(row.op_types) or row.kind


# The choices of --by. The nodes of a fused operation form one group: their times cannot be separated.
GROUPS: dict[str, Callable[[OpRow], str]] = {
    "op": lambda row: row.op,
    "node": lambda row: ", ".join(row.onnx_nodes) or (NOT_THE_MODEL if row.kind == "runtime" else row.op),
    "type": lambda row: "+".join(row.op_types) or (NOT_THE_MODEL if row.kind == "runtime" else "(unknown)"),
}


def totals(rows: Iterable[OpRow], by: str = "op") -> list[Total]:
    """Sum rows up by a key of :data:`GROUPS`, the longest time first. The rows are read once and not kept."""
    groups: dict[tuple[str, str], _Group] = defaultdict(_Group)
    for row, own_ns in own_times(rows):
        groups[GROUPS[by](row), row.kind].add(row, own_ns)
    iterations = {iteration for group in groups.values() for iteration in group.runs}
    everything = sum(group.run_ns(iterations) for group in groups.values())
    found = [group.total(name, kind, iterations, everything) for (name, kind), group in groups.items()]
    return sorted(found, key=lambda total: (-total.run_ns, -total.total_ns))


def timed_runs(profile: Profile) -> list[int]:
    """Return the duration of each run without a profiler, in ns."""
    times: list[int] = []
    for call in profile.calls:
        if call.kind == "timed":
            board, iterations = call.board, [end - start for start, end in call.iterations_ns]
            times += iterations or [board.end_ns - board.start_ns - call.warmup_ns]
    return times


def run_times(profile: Profile) -> RunTimes:
    """Return the median durations of the timed and the profiled runs."""
    profiled = [call for call in profile.calls if call.kind == "profiled"]
    times = [end - start for call in profiled for start, end in call.iterations_ns]
    times = times or [end - start for start, end in _iterations(profile.rows).values()]
    return RunTimes(_p50(timed_runs(profile)), _p50(times), len(times))


def typical_iteration(rows: Iterable[OpRow]) -> list[OpRow]:
    """Return the rows of the iteration with the median duration, by start; none without rows. Reads them twice."""
    found = sorted(_iterations(rows).items(), key=lambda item: item[1][1] - item[1][0])
    wanted = found[len(found) // 2][0] if found else None
    return sorted((row for row in rows if row.iteration == wanted), key=lambda row: row.start_ns)


def shortener(found: Sequence[Total]) -> Callable[[str], str]:
    """Return a function that replaces the common prefix of the operations' names by "…".

    Compilers put the model's name before each.
    """
    ops = {op for total in found for op in total.ops if total.kind == "compute"}
    if len(ops) < 2:
        return plain
    pairs = zip(min(ops), max(ops), strict=False)
    common = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Cut at the end of a word, and leave some characters of each name.
    common = re.sub(r"[^\W_]*$", "", common[: max(min(map(len, ops)) - _LEFT_LEAST, 0)])
    if len(common) < _PREFIX_LEAST:
        return plain
    return lambda name: plain(f"…{name.removeprefix(common)}" if name.startswith(common) else name)


class _Group:
    """The sums of a group's rows so far."""

    def __init__(self) -> None:
        self.times = array("q")
        self.runs: dict[int, int] = defaultdict(int)
        self._tile_time = self._tiled = 0
        # None once a row has no estimate.
        self._flops: int | None = 0
        self._bytes: int | None = 0
        self._bounds: set[str] = set()
        # Dicts as ordered sets.
        self._nodes: dict[str, None] = {}
        self._types: dict[str, None] = {}
        self._ops: dict[str, None] = {}

    def add(self, row: OpRow, own_ns: int) -> None:
        self.times.append(own_ns)
        self.runs[row.iteration] += own_ns
        if row.tile_time_ns is not None:
            self._tile_time += row.tile_time_ns
            self._tiled += row.duration_ns
        self._flops = None if self._flops is None or row.flops is None else self._flops + row.flops
        self._bytes = None if self._bytes is None or row.bytes is None else self._bytes + row.bytes
        self._bounds.add(row.bound_estimate)
        for seen, names in ((self._nodes, row.onnx_nodes), (self._types, row.op_types), (self._ops, (row.op,))):
            seen.update(dict.fromkeys(names))

    def run_ns(self, iterations: Set[int]) -> float:
        """Return the group's median time in an iteration."""
        return float(statistics.median(self.runs.get(iteration, 0) for iteration in iterations))

    def total(self, name: str, kind: str, iterations: Set[int], everything: float) -> Total:
        time, typical = sum(self.times), float(statistics.median(self.times))
        run_ns, calls = self.run_ns(iterations), len(self.times)
        return Total(
            name=name,
            kind=kind,
            onnx_nodes=tuple(self._nodes),
            op_types=tuple(self._types),
            ops=tuple(self._ops),
            calls=calls,
            total_ns=time,
            run_ns=run_ns,
            mean_ns=time / calls,
            p50_ns=typical,
            share=run_ns / everything if everything else 0.0,
            parallelism=self._tile_time / self._tiled if self._tiled else None,
            flops_per_s=self._flops * 1e9 / calls / typical if self._flops is not None and typical else None,
            bytes_per_s=self._bytes * 1e9 / calls / typical if self._bytes is not None and typical else None,
            intensity=self._flops / self._bytes if self._flops is not None and self._bytes else None,
            bound_estimate=next(iter(self._bounds)) if len(self._bounds) == 1 else "",
        )


def _iterations(rows: Iterable[OpRow]) -> dict[int, tuple[int, int]]:
    """Return iteration -> (start of its first row, end of its last)."""
    found: dict[int, tuple[int, int]] = {}
    for row in rows:
        end = row.start_ns + row.duration_ns
        first, last = found.get(row.iteration, (row.start_ns, end))
        found[row.iteration] = (min(first, row.start_ns), max(last, end))
    return found


def _p50(times: Sequence[int]) -> float | None:
    return float(statistics.median(times)) if times else None


def own_times(rows: Iterable[OpRow]) -> Iterator[tuple[OpRow, int]]:
    """Yield each row with its own time in ns: its duration less that of the operations within it.

    A row that encloses others comes after them. The rows come by start.
    """
    open_rows: list[_Open] = []
    for row in rows:
        while open_rows and open_rows[-1].end_ns <= row.start_ns:
            yield open_rows.pop().closed()
        end = row.start_ns + row.duration_ns
        if open_rows and end <= open_rows[-1].end_ns:
            open_rows[-1].cover(row.start_ns, end)
        if row.kind == "runtime":
            open_rows.append(_Open(row, end, row.start_ns))
        else:
            yield row, row.duration_ns
    while open_rows:
        yield open_rows.pop().closed()


@dataclass
class _Open:
    """A row of the runtime which may enclose others."""

    row: OpRow
    end_ns: int
    covered_until: int
    covered_ns: int = 0

    def cover(self, start_ns: int, end_ns: int) -> None:
        """Subtract an enclosed interval; overlapping ones count once."""
        self.covered_ns += max(0, end_ns - max(start_ns, self.covered_until))
        self.covered_until = max(self.covered_until, end_ns)

    def closed(self) -> tuple[OpRow, int]:
        return self.row, self.row.duration_ns - self.covered_ns
