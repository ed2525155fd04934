"""Measure the energy of a case of a run or suite, with ``--energy``.

A run without this option does not use this module's imports, which take milliseconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hil.controller.devices.board import Board
from hil.controller.devices.loaded_program import LoadedProgram
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.repeated import make_steps_arguments
from hil.controller.records.measurements.energy import EnergyMeasurement

if TYPE_CHECKING:
    from hil.controller.pipeline.energy import EnergyCall

# Iterations that give the typical time, after an untimed one.
_CALIBRATION = 3


def add_energy(case: Case, board: Board, program: LoadedProgram) -> Case:
    """Return a case that ran with the energy of its program, or the reason why hil refuses it.

    Raises:
        UsageError: the meter cannot be opened.
        HilError: the program failed.
    """
    from hil.controller.devices.metering.meter_factory import make_missing_error
    from hil.controller.pipeline.energy import EnergyCall, measure_energy, refuse_energy
    from hil.controller.pipeline.records.generation import split_calls
    from hil.core.steps import PROMPT, TOKENS

    if not board.meter.is_set:
        error = make_missing_error(board)
        reason = f"{error.message}; {error.hint}"
        return replace(case, energy=EnergyMeasurement(meter="", refused="no meter", reason=reason))
    artifact, inputs, options = case.artifact, case.inputs, case.options
    assert artifact is not None and inputs is not None

    def run(iterations: int, warmup: int) -> EnergyCall | None:
        result, call = program.run(
            inputs,
            iterations=iterations,
            warmup=warmup,
            timeout=options.timeout,
            names=artifact.output_names,
            **make_steps_arguments(case),
        )
        stamps = result.iterations_ns
        if not stamps or call.board_ns is None:
            return None
        tokens = []
        if case.decoder is not None:
            tokens = split_calls(stamps, call.calls, inputs[PROMPT].tolist(), result.outputs[TOKENS].tolist())
        return EnergyCall((stamps[0][0], stamps[-1][1]), call.host_ns, len(stamps), tokens)

    first = run(_CALIBRATION, 1)
    if first is None:
        reason = "the board does not report times of iterations on its own clock"
        return replace(case, energy=refuse_energy(board, reason))

    def run_window(iterations: int, warmup: int) -> EnergyCall:
        found = run(iterations, warmup)
        assert found is not None
        return found

    each_ns = float(np.ptp(first.board_ns)) / first.iterations
    return replace(
        case,
        energy=measure_energy(board, run_window, each_ns=each_ns, timeout_s=options.timeout, report=lambda share: None),
    )
