"""Record the board's conditions while a case runs repeatedly, and grade the times.

A run with a single iteration does not use this module's imports, which take milliseconds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hil.controller.devices.board import Board
from hil.controller.devices.board_client import Invocation
from hil.controller.pipeline.case import Case

if TYPE_CHECKING:
    from hil.controller.devices.measuring.conditions import ConditionWatch


def is_measured(case: Case) -> bool:
    """Return True if the run measures times: it has multiple timed iterations, or the tokens of a generation."""
    return case.decoder is not None or case.options.iterations * case.options.repeat > 1


def watch_run(case: Case, board: Board) -> AbstractContextManager[ConditionWatch | None]:
    """Record the board's conditions during the block, for :func:`grade_run`. None if the run does not measure times."""
    if not (is_measured(case) and board.config.has_time):
        return nullcontext()
    from hil.controller.devices.measuring.conditions import ConditionWatch

    return ConditionWatch(board)


def grade_run(case: Case, watch: ConditionWatch, call: Invocation) -> Case:
    """Return a case that ran with the board's conditions and the grade of its times.

    Args:
        watch: The conditions during the run, after its end.
        call: The first call of the run.
    """
    from hil.controller.devices.measuring.grading import grade_measurement
    from hil.controller.devices.measuring.time_statistics import DEFAULT_EFFECT, summarise

    result = case.result
    assert result is not None
    stamps = np.array(result.iterations_ns, np.int64).reshape(-1, 2)
    is_on_board_clock = call.board_ns is not None and len(stamps) > 0
    window = (int(stamps[0, 0]), int(stamps[-1, 1])) if is_on_board_clock else None
    # With --fresh-load, the load of hil itself between the iterations is unknown.
    conditions = watch.summarise(window, None if case.options.fresh_load else _count_own_cores(call))
    times = None
    if len(stamps) > 1:
        warm = stamps[1:] if result.cold else stamps
        times = summarise(warm[:, 0], warm[:, 1] - warm[:, 0], drift_share=DEFAULT_EFFECT)
    elif case.decoder is None:
        # The board reported no times.
        return replace(case, conditions=conditions)
    return replace(case, conditions=conditions, grade=grade_measurement(conditions, times, has_cold=result.cold))


def _count_own_cores(call: Invocation) -> float | None:
    """Return the mean number of cores that the program kept busy; None if unknown."""
    spent_ns = sum(end - start for start, end in call.iterations_ns)
    return call.cpu_ns / spent_ns if call.cpu_ns and spent_ns else None
