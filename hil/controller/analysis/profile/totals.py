"""Sum a profile's rows by operation, ONNX node or operator type, and measure whole runs."""

from __future__ import annotations

import itertools
import re
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from hil.controller.records.commands.stored import ProfileTotal
from hil.controller.storage.screen.texts import make_plain
from hil.core.timeline import OpRow, Profile
from hil.errors import UsageError

NOT_THE_MODEL = "(runtime)"
# Maximum relative overhead of a profiler. Above this value, times are marked as distorted and are not compared.
MAX_OVERHEAD = 0.2

_PREFIX_LEAST, _LEFT_LEAST = 10, 6


@dataclass(frozen=True)
class RunTimes:
    """Whole run durations on the board, in nanoseconds; None if not measured."""

    timed_p50_ns: float | None  # median for runs without a profiler
    profiled_p50_ns: float | None  # median for profiled runs
    iterations: int

    @property
    def overhead(self) -> float | None:
        """Relative time added by profiling: 0.05 for 5 %."""
        if not self.timed_p50_ns or self.profiled_p50_ns is None:
            return None
        return self.profiled_p50_ns / self.timed_p50_ns - 1

    @property
    def is_distorted(self) -> bool:
        """True if the profiler adds more than :data:`MAX_OVERHEAD`."""
        return (self.overhead or 0.0) > MAX_OVERHEAD

    @property
    def mark(self) -> str:
        """Suffix for figures that the profiler distorts, or ""."""
        return f" ({self.overhead:+.0%})" if self.is_distorted else ""


def type_of(row: OpRow) -> str:
    """Return an operation's node types, or its kind if it has no types."""
    return "+".join(row.op_types) or row.kind


# Choices of --by. The nodes of a fused operation form a group, because their times cannot be separated.
GROUPS: dict[str, Callable[[OpRow], str]] = {
    "op": lambda row: row.op,
    "node": lambda row: ", ".join(row.onnx_nodes) or (NOT_THE_MODEL if row.kind == "runtime" else row.op),
    "type": lambda row: "+".join(row.op_types) or (NOT_THE_MODEL if row.kind == "runtime" else "(unknown)"),
}


def sum_rows(rows: Iterable[OpRow], by: str = "op") -> list[ProfileTotal]:
    """Sum rows by a key in :data:`GROUPS`, the longest time first. Reads the rows once without storing them."""
    groups: dict[tuple[str, str], _Group] = defaultdict(_Group)
    for row, own_ns in own_times(rows):
        groups[GROUPS[by](row), row.kind].add(row, own_ns)
    iterations = {iteration for group in groups.values() for iteration in group.runs}
    everything = sum(group.run_ns(iterations) for group in groups.values())
    found = [group.total(name, kind, iterations, everything) for (name, kind), group in groups.items()]
    return sorted(found, key=lambda total: (-total.run_ns, -total.total_ns))


def require_times(profile: Profile) -> None:
    """Raise UsageError for a profile of an emulated board: it has ticks, which are not times."""
    if profile.ticks is not None:
        raise UsageError(
            f"the profile of {profile.model} on {profile.board} has ticks instead of times: the board is emulated",
            hint="hil profile show lists the ticks; hil bench compares the instructions of two programs",
        )


def list_timed_runs(profile: Profile) -> list[int]:
    """Return the duration of every run without a profiler, in ns."""
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
    times = times or [end - start for start, end in _find_iteration_spans(profile.rows).values()]
    return RunTimes(_compute_median(list_timed_runs(profile)), _compute_median(times), len(times))


def find_typical_iteration(rows: Iterable[OpRow]) -> list[OpRow]:
    """Return the rows of the iteration with the median duration, by start; empty without rows. Reads the rows twice."""
    found = sorted(_find_iteration_spans(rows).items(), key=lambda item: item[1][1] - item[1][0])
    wanted = found[len(found) // 2][0] if found else None
    return sorted((row for row in rows if row.iteration == wanted), key=lambda row: row.start_ns)


def make_shortener(found: Sequence[ProfileTotal]) -> Callable[[str], str]:
    """Return a function that replaces the operation names' common prefix by "…".

    Compilers prefix every name with the model's name.
    """
    return make_common_shortener({op for total in found for op in total.ops if total.kind == "compute"})


def make_common_shortener(names: Collection[str]) -> Callable[[str], str]:
    """Return a function that replaces the common prefix of names by "…"."""
    ops = set(names)
    if len(ops) < 2:
        return make_plain
    pairs = zip(min(ops), max(ops), strict=False)
    common = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    # Cut the prefix at a word boundary, and keep at least a few characters of each name.
    common = re.sub(r"[^\W_]*$", "", common[: max(min(map(len, ops)) - _LEFT_LEAST, 0)])
    if len(common) < _PREFIX_LEAST:
        return make_plain
    return lambda name: make_plain(f"…{name.removeprefix(common)}" if name.startswith(common) else name)


class _Group:
    """Sums over the rows of a group, updated row by row."""

    def __init__(self) -> None:
        self.times = array("q")
        self.runs: dict[int, int] = defaultdict(int)
        self._tile_time = self._tiled = 0
        # None if any estimate is missing.
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

    def total(self, name: str, kind: str, iterations: Set[int], everything: float) -> ProfileTotal:
        time, typical = sum(self.times), float(statistics.median(self.times))
        run_ns, calls = self.run_ns(iterations), len(self.times)
        return ProfileTotal(
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


def _find_iteration_spans(rows: Iterable[OpRow]) -> dict[int, tuple[int, int]]:
    """Return iteration -> (first row's start, last row's end)."""
    found: dict[int, tuple[int, int]] = {}
    for row in rows:
        end = row.start_ns + row.duration_ns
        first, last = found.get(row.iteration, (row.start_ns, end))
        found[row.iteration] = (min(first, row.start_ns), max(last, end))
    return found


def _compute_median(times: Sequence[int]) -> float | None:
    return float(statistics.median(times)) if times else None


def own_times(rows: Iterable[OpRow]) -> Iterator[tuple[OpRow, int]]:
    """Yield each row with its exclusive time in ns: the duration minus the nested operations.

    An enclosing row is yielded after the nested rows. Rows must be sorted by start.
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
    """Row of the runtime that may enclose later rows."""

    row: OpRow
    end_ns: int
    covered_until: int
    covered_ns: int = 0

    def cover(self, start_ns: int, end_ns: int) -> None:
        """Subtract a nested interval; overlapping intervals count once."""
        self.covered_ns += max(0, end_ns - max(start_ns, self.covered_until))
        self.covered_until = max(self.covered_until, end_ns)

    def closed(self) -> tuple[OpRow, int]:
        return self.row, self.row.duration_ns - self.covered_ns
