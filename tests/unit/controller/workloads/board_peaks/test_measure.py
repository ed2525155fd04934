"""Search for the peaks of a board, with a board whose times are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.schemas import check_document

from hil.controller.analysis.roofline.probes import Probe
from hil.controller.analysis.roofline.show_peaks import list_peak_lines
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.base import Interval
from hil.controller.records.measurements.conditions import MeasurementGrade
from hil.controller.records.measurements.roofline import BoardPeaks, PeakClock, PeakPoint, PeakReport
from hil.controller.records.run import StoredProvenance
from hil.controller.workloads.board_peaks import job
from hil.controller.workloads.board_peaks.job import PeakJob
from hil.controller.workloads.board_peaks.measure import PeakSearch
from hil.controller.workloads.board_peaks.timers import TimedProbe, raise_outcome
from hil.core.board_config import BoardConfig, Connection
from hil.core.results import Outcome
from hil.errors import BoardUnfit, StageError, UsageError

GIB = 1 << 30


class KnownBoard:
    """Board with a time per probe.

    Args:
        rates: rate per second of a probe. StageError: the board does not support the probe.
    """

    def __init__(
        self, rates: Callable[[Probe], float], *, memory: int = 64 * GIB, clock: PeakClock = "board", grade: str = "A"
    ) -> None:
        self.rates, self.memory, self.clock, self.grade = rates, memory, clock, grade
        self.names: Callable[[int], str] = lambda number: "kit"
        self.probes: list[Probe] = []

    def time(self, probe: Probe) -> TimedProbe:
        self.probes.append(probe)
        rate = self.rates(probe)
        each = 1e9 * probe.work / rate
        point = PeakPoint(
            kernel=probe.kernel,
            dtype=probe.dtype,
            size=probe.size,
            work=probe.work,
            iterations=20,
            p10=each * 0.9,
            p50=each,
            p90=each * 1.1,
            rate=rate,
            interval=Interval(low=rate * 0.95, high=rate * 1.05, level=0.99),
            grade=MeasurementGrade(grade=self.grade, reasons=["too hot"]),
        )
        source = StoredProvenance(
            board=self.names(len(self.probes)),
            runtime="iree",
            runtime_version="3.13.0",
            device="local-task",
            machine={"cpu_model": "A53", "cores": 4},
        )
        return TimedProbe(point, self.clock, {"machine": {"memory_bytes": self.memory}}, source, ("--flag",), 3.9)

    def measure(self, *dtypes: Any, **more: Any) -> BoardPeaks:
        return PeakSearch(self.time, **more).measure(dtypes or ("f32",))

    @property
    def sizes(self) -> list[tuple[str, str, int]]:
        return [(one.kernel, one.dtype, one.size) for one in self.probes]


def rate_by_size(best: int, cache: int = 0) -> Callable[[Probe], float]:
    """Return rates: the matmul of size ``best`` has 100 Gop/s, smaller ones less; the memory has 10 GB/s."""

    def rate(probe: Probe) -> float:
        if probe.kernel == "matmul":
            return 100e9 * min(probe.size / best, 1.0)
        return 40e9 if probe.memory_bytes <= cache else 10e9 if probe.kernel == "add" else 12e9

    return rate


def test_search_ends_when_larger_matrices_are_not_faster() -> None:
    board = KnownBoard(rate_by_size(1024))
    peaks = board.measure()
    assert [size for kernel, _, size in board.sizes if kernel == "matmul"] == [256, 512, 1024, 2048]
    assert (peaks.compute["f32"].rate, peaks.compute["f32"].kernel) == (100e9, "matmul f32, 1024 x 1024")
    assert peaks.compute["f32"].spread == pytest.approx(0.2)
    assert peaks.parallelism == 3.9


def test_search_does_not_start_iterations_of_seconds() -> None:
    board = KnownBoard(lambda probe: 8e8 * probe.size / 256 if probe.kernel == "matmul" else 1e9)
    board.measure()
    assert [size for kernel, _, size in board.sizes if kernel == "matmul"] == [256, 512]


def test_other_types_begin_with_the_best_size() -> None:
    board = KnownBoard(rate_by_size(1024))
    peaks = board.measure("f32", "int8")
    assert [size for kernel, dtype, size in board.sizes if kernel == "matmul" and dtype == "int8"] == [1024, 2048]
    assert set(peaks.compute) == {"f32", "int8"}


def test_memory_uses_the_faster_kernel() -> None:
    peaks = KnownBoard(rate_by_size(256)).measure()
    assert peaks.memory is not None
    assert (peaks.memory.rate, peaks.memory.kernel[:3]) == (12e9, "sum")


def test_memory_arrays_grow_beyond_the_caches() -> None:
    board = KnownBoard(rate_by_size(256, cache=100 << 20))
    peaks = board.measure()
    assert [size for kernel, _, size in board.sizes if kernel == "add"] == [4 << 20, 16 << 20, 64 << 20]
    assert peaks.memory is not None
    assert peaks.memory.rate == 12e9
    assert peaks.notes == []


def test_small_memory_limits_the_arrays_and_is_noted() -> None:
    board = KnownBoard(rate_by_size(256), memory=256 << 20)
    peaks = board.measure()
    assert all(probe.memory_bytes <= 27 << 20 for probe in board.probes)
    assert peaks.notes == [
        "the speed of the memory may include caches: --memory or the memory of the board limits the arrays"
    ]


def test_unsupported_type_is_noted() -> None:
    def rate(probe: Probe) -> float:
        if probe.dtype == "int8":
            raise StageError("COMPILE_ERROR: no int8")
        return rate_by_size(256)(probe)

    peaks = KnownBoard(rate).measure("f32", "int8")
    assert list(peaks.compute) == ["f32"]
    assert peaks.notes == ["no peak for int8: COMPILE_ERROR: no int8"]


def test_search_fails_if_no_type_is_supported() -> None:
    def rate(probe: Probe) -> float:
        raise StageError("LOAD_ERROR: no")

    with pytest.raises(StageError, match="LOAD_ERROR"):
        KnownBoard(rate).measure("f32", "int8")


def test_programs_on_different_boards_are_refused() -> None:
    board = KnownBoard(rate_by_size(1024))
    board.names = lambda number: "kit" if number < 3 else "other"
    with pytest.raises(UsageError, match="ran on different boards, kit and other"):
        board.measure()


def test_selector_of_a_farm_is_fixed_to_the_first_board(monkeypatch: pytest.MonkeyPatch) -> None:
    board, used = KnownBoard(rate_by_size(256)), []

    def measure(probe: Probe, request: Job, min_time_s: float, screen: object) -> TimedProbe:
        used.append(request.board)
        return board.time(probe)

    monkeypatch.setattr(job, "time_with_bench", measure)
    monkeypatch.setattr(job, "store_peaks", lambda peaks: Path("stored.json"))
    for address in ("farm:arch=aarch64", "root@kit"):
        used.clear()
        config = BoardConfig("kit", "rpi5", connection=Connection(address=address))
        asked = PeakJob(Job(models=(), board=address, runtime="onnxruntime"), ("f32",))
        job.measure_board(asked, BoardChoice(config, address=address), SimpleNamespace(note=lambda text: None))
        later = 'farm:name="kit"' if address.startswith("farm:") else address
        assert (used[0], set(used[1:])) == (address, {later})


def test_failed_board_ends_the_search() -> None:
    def rate(probe: Probe) -> float:
        raise BoardUnfit("the disk is full")

    with pytest.raises(BoardUnfit):
        KnownBoard(rate).measure("f32", "int8")


def test_microcontroller_has_small_matrices_and_no_memory_peak() -> None:
    board = KnownBoard(rate_by_size(32))
    peaks = board.measure(is_small=True)
    assert board.sizes == [("matmul", "f32", 16), ("matmul", "f32", 32), ("matmul", "f32", 64)]
    assert peaks.memory is None
    peaks.tick_hz = 100_000_000
    assert "  f32     100 Gop/s  = 1e+03 op per tick" in "\n".join(list_peak_lines(peaks))


@pytest.mark.parametrize("is_small", [True, False])
def test_board_that_fails_with_larger_matrices(is_small: bool) -> None:
    def rate(probe: Probe) -> float:
        if probe.size > 256 or (is_small and probe.size > 32):
            raise BoardUnfit("no answer")
        return rate_by_size(256)(probe)

    board = KnownBoard(rate)
    if not is_small:
        with pytest.raises(BoardUnfit):
            board.measure()
        return
    peaks = board.measure(is_small=True)
    assert peaks.compute["f32"].kernel == "matmul f32, 32 x 32"
    assert "matmul f32 64 was not measured: no answer" in peaks.notes


def test_clock_of_instructions_gives_no_memory_peak() -> None:
    peaks = KnownBoard(rate_by_size(256), clock="instructions").measure()
    assert (peaks.clock, peaks.memory) == ("instructions", None)
    assert any("op per instruction" in line for line in list_peak_lines(peaks))


def test_grade_f_of_a_peak_is_noted() -> None:
    peaks = KnownBoard(rate_by_size(256), grade="F").measure()
    assert "matmul f32 256 has grade F: not comparable (too hot): measure again" in peaks.notes


def test_peaks_describe_the_board() -> None:
    peaks = KnownBoard(rate_by_size(256)).measure()
    assert (peaks.board, peaks.runtime, peaks.device, peaks.cpu) == ("kit", "iree", "local-task", "A53, 4 cores")
    assert peaks.flags == ["--flag"]
    report = PeakReport(board="kit", peaks=[peaks], file="x.json")
    check_document({"schema": 1, **report.to_json()}, "board peak")
    text = "\n".join(list_peak_lines(peaks))
    assert "f32     100 Gop/s  (99%: 95 Gop/s to 105 Gop/s)  spread 20.0%  with matmul f32, 256 x 256" in text
    assert "ridge   8.33 op/byte for f32" in text


@pytest.mark.parametrize(
    ("outcome", "error"), [(Outcome.BOARD_UNFIT, BoardUnfit), (Outcome.COMPILE_ERROR, StageError), (None, StageError)]
)
def test_outcome_of_a_probe_becomes_an_error(outcome: Outcome | None, error: type[Exception]) -> None:
    with pytest.raises(error, match="why"):
        raise_outcome(outcome, "why", "", "kit")
