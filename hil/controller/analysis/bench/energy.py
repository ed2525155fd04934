"""Measure the energy of a bench's sides, after the times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hil.controller.analysis.bench.measure import BenchSide, SideProgram
from hil.controller.analysis.bench.prompts import split_batch
from hil.controller.pipeline.energy import EnergyCall, measure_energy, refuse_energy
from hil.controller.records.measurements.energy import EnergyMeasurement


def measure_side_energy(side: BenchSide, report: Callable[[float], None]) -> EnergyMeasurement:
    """Measure the energy of a side, whose times are known.

    Args:
        report: receives the finished share.

    Raises:
        UsageError: the meter cannot be opened.
        HilError: the program failed. The error is the outcome of the side's case.
    """
    if side.clock != "board" or not side.board.config.has_time:
        return refuse_energy(side.board, "the board does not report times of iterations on its own clock")
    each_ns = float(np.median(np.concatenate([batch.duration_ns for batch in side.batches])))
    with SideProgram(side) as program:

        def run(iterations: int, warmup: int) -> EnergyCall:
            batch = program.measure_batch(iterations, warmup)
            ends = int(batch.start_ns[0]), int(batch.start_ns[-1] + batch.duration_ns[-1])
            tokens = split_batch(side, batch) if side.case.decoder is not None else []
            return EnergyCall(ends, batch.host_ns, iterations, tokens)

        return measure_energy(side.board, run, each_ns=each_ns, timeout_s=side.case.options.timeout, report=report)
