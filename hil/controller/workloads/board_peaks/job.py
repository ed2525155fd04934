"""Measure and store the peaks of a board. This implements `hil board peak`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hil.controller.analysis.roofline.peak_store import store_peaks
from hil.controller.analysis.roofline.probes import Probe
from hil.controller.devices.board_choice import BoardChoice, pin_choice
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.measurements.roofline import BoardPeaks, PeakType
from hil.controller.storage.run_context import Progress
from hil.controller.workloads.board_peaks.measure import PeakSearch
from hil.controller.workloads.board_peaks.timers import TimedProbe, time_on_device, time_with_bench
from hil.core.chips import parse_chip
from hil.core.runtimes import can_load_onnx
from hil.errors import UsageError
from hil.formats.iree_devices import GPU_DRIVERS, get_driver

DEFAULT_MIN_TIME_SECONDS = 1.0
# Runtime whose profiler reports times on the clock of a GPU.
_DEVICE_TIMED = "iree"
_LEAST_MEMORY_MIB, _MOST_MEMORY_MIB = 1, 64 << 10


@dataclass(frozen=True)
class PeakJob:
    """Request of `hil board peak`."""

    job: Job  # board, runtime, device and compiler flags
    dtypes: Sequence[PeakType] = ()  # empty: f32 and int8, and f16 on a GPU
    min_time_s: float = DEFAULT_MIN_TIME_SECONDS  # minimum measured time per size
    memory_mib: int | None = None  # maximum size of the arrays, in MiB; None is a tenth of the memory, at most 768


def measure_board(request: PeakJob, choice: BoardChoice, screen: Progress) -> tuple[BoardPeaks, Path]:
    """Measure the peaks of a board and store them. Return the peaks and their file.

    Raises:
        UsageError: an option is invalid, or hil cannot create the programs for the runtime.
        StageError: the board supports none of the types.
        BoardError: the board failed.
        StorageError: the peaks cannot be stored.
    """
    runtime = request.job.runtime or choice.config.runtime
    if not can_load_onnx(runtime):
        raise UsageError(
            f"hil cannot create the programs of the measurement for runtime {runtime!r}",
            hint="measure with --runtime iree or onnxruntime, or write the values of the data sheet to [peak] in the "
            "board config",
            option="--runtime",
        )
    if request.memory_mib is not None and not _LEAST_MEMORY_MIB <= request.memory_mib <= _MOST_MEMORY_MIB:
        raise UsageError(
            f"invalid --memory {request.memory_mib}: expected {_LEAST_MEMORY_MIB} to {_MOST_MEMORY_MIB} MiB"
        )
    if not request.min_time_s > 0:
        raise UsageError(f"invalid --min-time {request.min_time_s:g}: expected more than 0 seconds")
    device = request.job.device or choice.config.devices.get(runtime, "")
    is_gpu = get_driver(device) in GPU_DRIVERS
    is_small = choice.config.mcu is not None

    job = request.job

    def measure_probe(probe: Probe) -> TimedProbe:
        nonlocal job
        if is_gpu and runtime == _DEVICE_TIMED:
            timed = time_on_device(probe, job, screen)
        else:
            timed = time_with_bench(probe, job, request.min_time_s, screen)
        pinned = pin_choice(choice, timed.provenance.board)
        if choice.address and pinned is not choice:
            # A selector of a farm may match several boards: run all programs on the board of the first one.
            job = replace(job, board=pinned.address)
        return timed

    search = PeakSearch(measure_probe, screen.note, is_small=is_small)
    if request.memory_mib is not None:
        search.memory_limit = request.memory_mib << 20
    usual: tuple[PeakType, ...] = ("f32", "f16", "int8") if is_gpu else ("f32", "int8")
    peaks = search.measure(request.dtypes or usual)
    if choice.config.mcu is not None:
        peaks.tick_hz = parse_chip(choice.config.mcu.values).tick_hz
    return peaks, store_peaks(peaks)
