"""Run cases on one board and store the run as it comes: what ``hil run`` and ``hil bundle run`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.pipeline.board_pool import BoardPool
from hil.controller.pipeline.case import Case, ProgressSink
from hil.controller.pipeline.options import Job
from hil.controller.pipeline.record import Recorder
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.stages import STAGES
from hil.controller.storage.run_context import Progress, RunContext
from hil.controller.storage.runs import GO_ON, Run
from hil.core.results import Stage
from hil.errors import StorageError, UsageError


def run_cases(
    run: Run,
    job: Job,
    choice: BoardChoice,
    cases: Sequence[Case],
    context: RunContext,
    screen: Progress,
    *,
    order: Sequence[str] = (),
    runtime: str,
    purpose: str,
    most_loaded: int = 0,
    resumable: bool = False,
    after: Callable[[Case], Iterable[Case]] = lambda case: (),
) -> dict[str, Any]:
    """Run cases on a board; the run's record follows.

    Args:
        order: names of all the run's cases, those that ended before among them; none are those of ``cases``.
        runtime: what the connection is opened for; "" is the board's own.
        purpose: told to others who wait for the board.
        most_loaded: how many programs stay loaded on the board between cases.
        resumable: whether a run that was interrupted can be gone on with.
        after: called with each case that ended, once its outcome is stored; yields it as it changes.

    Returns:
        The run's record with ``folder``, its place.

    Raises:
        UsageError: only the board could tell that something cannot be; a new run of which no case has ended is deleted.
        KeyboardInterrupt: Ctrl-C; what there was is stored.
    """
    is_new = not run.record["cases"]
    cases = [replace(case, folder=run.case_folder(case.name)) for case in cases]
    for case in cases:
        screen.begin(case.name, len(STAGES))
    recorder = Recorder(run, order or [case.name for case in cases], cases)

    def watch(case: Case, stage: Stage, note: str) -> None:
        screen.stage(case.name, STAGES.index(stage), f"{stage.value} {note}".strip())
        if not note:
            recorder.write(case)

    def opened(board: Board) -> None:
        if board.target and not all(case.artifact for case in cases):
            screen.note(f"compiling for {board.target}")
        run.record["board"] = {"name": board.name, "hw_type": board.config.hw_type, "info": board.info}

    runner = Runner(context, sink=ProgressSink(watch, recorder.keep, recorder.write))
    pool = BoardPool(purpose, wait_s=job.wait_s, say=screen.note, opened=opened, most_loaded=most_loaded)
    try:
        with pool:
            for case in runner.run(cases, pool, choice, runtime=runtime, faults=job.faults):
                screen.end(case.name)
                # First its outcome is safe: what comes after may take a while, or Ctrl-C.
                recorder.end(case)
                for changed in after(case):
                    recorder.write(changed)
    except StorageError:
        raise
    except UsageError:
        if is_new and not recorder.ended:
            run.discard()
        raise
    except KeyboardInterrupt:
        recorder.interrupt()
        screen.note(
            f"{GO_ON}hil run --resume {run.id}" if resumable else f"interrupted; what had ended is in {run.folder}"
        )
        raise
    return recorder.finish()
