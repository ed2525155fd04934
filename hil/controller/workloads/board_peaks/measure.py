"""Measure the peaks of a board: the fastest matmul of each type, and the speed of the memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hil.controller.analysis.roofline.probes import ITEM_BYTES, Probe, round_size
from hil.controller.records.measurements.roofline import BoardPeaks, PeakPoint, PeakType, PeakValue
from hil.controller.workloads.board_peaks.timers import TimedProbe, Timer
from hil.core.text import TextSink
from hil.errors import BoardError, StageError, UsageError

# Sizes of matmuls, in order. A microcontroller has little memory.
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_SMALL_SIZES = (16, 32, 64)
# A larger matmul is measured only if the previous size improved the speed by this share.
_MIN_GAIN = 0.05
# A larger matmul is measured only if an iteration is expected to take less than this time, in ns.
_MAX_ITERATION_NS = 0.5e9
# Bytes of the first array program. If a program with four times the bytes is slower by more than _MAX_LOSS, the caches
# still hold a part of the arrays. STREAM requires arrays of four times the size of the caches.
_FIRST_BYTES = 48 << 20
_STEP = 4
_MAX_LOSS = 0.1
_MAX_BYTES = 768 << 20
# Maximum share of the board's memory for the arrays of a program.
_MEMORY_SHARE = 0.1


@dataclass
class PeakSearch:
    """Search of the peaks, with all measured points."""

    timer: Timer
    say: TextSink = lambda text: None
    is_small: bool = False  # True for a microcontroller: small matmuls, and no measurement of the memory
    memory_limit: int = _MAX_BYTES  # maximum bytes of the arrays; the board's memory also limits them
    points: list[PeakPoint] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    first: TimedProbe | None = None  # the first measured probe, which describes the board
    parallelism: float | None = None  # of the fastest matmul
    _best_rate: float = 0.0

    def measure(self, dtypes: Sequence[PeakType]) -> BoardPeaks:
        """Measure the peaks of these types, and of the memory.

        A type that the board does not support becomes a note.

        Raises:
            StageError: the board supports none of the types.
            BoardError: the board failed.
            UsageError: the board or an option is invalid.
        """
        compute: dict[str, PeakValue] = {}
        size, failure = 0, None
        chosen: list[PeakPoint] = []
        for dtype in dtypes:
            try:
                found = self._find_fastest_matmul(dtype, size)
            except StageError as error:
                failure = error
                self.notes.append(f"no peak for {dtype}: {error.message}")
                continue
            size = size or found.size
            chosen.append(found)
            compute[dtype] = _make_value(found)
        if not compute and failure is not None:
            raise failure
        memory = None
        if (fastest := self._measure_memory()) is not None:
            chosen.append(fastest)
            memory = _make_value(fastest)
        assert self.first is not None
        self._note_grades(chosen)
        return _describe_board(self, compute, memory)

    def _find_fastest_matmul(self, dtype: PeakType, size: int) -> PeakPoint:
        """Return the fastest matmul. Begin with ``size``, the best size of another type; 0 is the smallest size."""
        sizes = [one for one in (_SMALL_SIZES if self.is_small else _SIZES) if one >= size]
        best: PeakPoint | None = None
        for number, one in enumerate(sizes):
            probe = Probe("matmul", dtype, one)
            if best is not None and probe.memory_bytes > self._get_memory_limit():
                break
            try:
                timed = self._measure_point(probe)
            except (StageError, BoardError) as error:
                # Larger matrices may not fit into the memory, and may take too long for a serial line.
                if best is None or (isinstance(error, BoardError) and not self.is_small):
                    raise
                self.notes.append(f"matmul {dtype} {one} was not measured: {error.message}")
                break
            gain = timed.point.rate / best.rate - 1 if best is not None else 1.0
            if best is None or gain > 0:
                best = timed.point
                if best.rate > self._best_rate and dtype == "f32":
                    self._best_rate, self.parallelism = best.rate, timed.parallelism
            if number and gain < _MIN_GAIN:
                break
            if timed.clock != "instructions" and 8 * timed.point.p50 > _MAX_ITERATION_NS:
                break
        assert best is not None
        return best

    def _measure_memory(self) -> PeakPoint | None:
        """Return the faster kernel, for arrays that are larger than the caches; None if none can be measured."""
        if self.is_small:
            self.notes.append("no peak for the memory: hil does not measure it on a microcontroller")
            return None
        if self.first is not None and self.first.clock == "instructions":
            self.notes.append("no peak for the memory: the board's clock counts instructions")
            return None
        size, last, has_settled = min(_FIRST_BYTES, self._get_memory_limit()), None, False
        while last is None or size <= self._get_memory_limit():
            try:
                point = self._measure_point(_make_array_probe(size)).point
            except StageError as error:
                if last is None:
                    self.notes.append(f"no peak for the memory: {error.message}")
                    return None
                break
            # Compare undisturbed iterations: other load on the machine slows down the median.
            has_settled = last is not None and point.work / point.p10 >= last.work / last.p10 * (1 - _MAX_LOSS)
            if has_settled and last is not None:
                last = max(last, point, key=lambda one: one.rate)
                break
            last, size = point, size * _STEP
        assert last is not None
        if not has_settled:
            self.notes.append(
                "the speed of the memory may include caches: --memory or the memory of the board limits the arrays"
            )
        points = [last]
        try:
            points.append(self._measure_point(Probe("sum", "f32", last.size * 3)).point)
        except StageError as error:
            self.notes.append(f"the kernel `sum` was not measured: {error.message}")
        return max(points, key=lambda one: one.rate)

    def _measure_point(self, probe: Probe) -> TimedProbe:
        self.say(f"measuring {probe.kernel} {probe.dtype}, {_describe_size(probe.kernel, probe.size)}")
        timed = self.timer(probe)
        self.first = self.first or timed
        boards = [one.provenance.board for one in (self.first, timed)]
        if boards[0] != boards[1]:
            raise UsageError(
                f"the programs ran on different boards, {boards[0]} and {boards[1]}", hint="select a single board"
            )
        self.points.append(timed.point)
        return timed

    def _get_memory_limit(self) -> int:
        """Return the maximum bytes of the arrays: the user's limit, and a share of the board's memory if known."""
        info: dict[str, Any] = self.first.info if self.first else {}
        total = int(info.get("memory_limit_bytes") or 0) or int(info.get("machine", {}).get("memory_bytes", 0))
        return min(self.memory_limit, int(total * _MEMORY_SHARE)) if total else self.memory_limit

    def _note_grades(self, chosen: Sequence[PeakPoint]) -> None:
        """Add a note for every peak whose times are not comparable."""
        for point in chosen:
            if point.grade is not None and point.grade.grade == "F":
                kernel = f"{point.kernel} {point.dtype} {point.size}"
                self.notes.append(f"{kernel} has grade {point.grade.text}: measure again")


def _make_array_probe(size: int) -> Probe:
    return Probe("add", "f32", round_size(size / 3 / ITEM_BYTES["f32"]))


def _describe_size(kernel: str, size: int) -> str:
    return f"{size} x {size}" if kernel == "matmul" else f"arrays of {size * ITEM_BYTES['f32'] >> 20} MiB"


def _make_value(point: PeakPoint) -> PeakValue:
    return PeakValue(
        rate=point.rate,
        interval=point.interval,
        spread=(point.p90 - point.p10) / point.p50 if point.p50 else None,
        kernel=f"{point.kernel} {point.dtype}, {_describe_size(point.kernel, point.size)}",
    )


def _describe_board(search: PeakSearch, compute: dict[str, PeakValue], memory: PeakValue | None) -> BoardPeaks:
    assert search.first is not None
    source, info = search.first.provenance, search.first.info
    machine = source.machine or info.get("machine", {})
    cores = f"{machine['cores']} cores" if machine.get("cores") else ""
    placement = source.placement if isinstance(source.placement, list) else []
    software = next((part.software for part in placement if part.software), "")
    return BoardPeaks(
        schema=1,
        id="",
        source="measured",
        created=time.time(),
        board=source.board,
        runtime=source.runtime,
        runtime_version=source.runtime_version,
        device=source.device,
        software=software,
        cpu=", ".join(filter(None, (str(machine.get("cpu_model", "")), cores))),
        flags=list(search.first.flags),
        stack=source.stack,
        clock=search.first.clock,
        parallelism=search.parallelism,
        compute=compute,
        memory=memory,
        points=search.points,
        notes=search.notes,
    )
