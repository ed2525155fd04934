"""Taking cases to their ends: the host's part of the work goes on while the board runs."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hil import errors
from hil.controller.devices.board_factory import AnyBoard, regain
from hil.controller.devices.board_resolver import knows_target
from hil.controller.pipeline.case import Case, Workshop, end_case
from hil.controller.pipeline.stages import conclude, execute, prepare, refer_case
from hil.core.boards import BoardConfig
from hil.core.results import Stage


def run_cases(
    cases: Sequence[Case], config: BoardConfig, open_board: Callable[[], AnyBoard], shop: Workshop
) -> Iterator[Case]:
    """Take begun cases to their ends; yields each as it ends, in order.

    Compiling and referring go on in threads; the board is opened once, when the first program is there, or before that
    when only the board can tell what to compile for.

    Args:
        cases: from :func:`begin`; those that have an outcome already pass through.
        config: the board's.
        open_board: connects to the board.
        shop: what the cases share.
    """
    board: AnyBoard | None = None
    lost: errors.BoardError | None = None
    compiling: list[concurrent.futures.Future[Case] | None] = []
    with concurrent.futures.ThreadPoolExecutor(shop.isolated.workers, thread_name_prefix="prepare") as pool:
        try:
            if not all(case.outcome or knows_target(config, case.options.runtime) for case in cases):
                try:
                    board = open_board()
                    config = board.config
                except errors.BoardError as error:
                    lost = error
            compiling = [
                pool.submit(prepare, case, config, shop) if not case.outcome and lost is None else None
                for case in cases
            ]
            for case, compiled in zip(cases, compiling, strict=True):
                if compiled is not None:
                    _wait(compiled)
                # A reference depends on model and inputs alone, so it may be computed while the board runs.
                referring = pool.submit(refer_early, case, shop) if case.inputs is not None else None
                if not case.outcome and lost is None:
                    try:
                        board = board or open_board()
                    except errors.BoardError as error:
                        lost = error
                if not case.outcome and lost is not None:
                    end_case(case, lost, Stage.PUSH)
                if board is not None:
                    execute(case, board, shop)
                    if isinstance(case.error, errors.BoardError):
                        # Whatever is gone may come back for the next case: a new connection will tell.
                        shop.watch(case, Stage(case.stage), "the board is gone, looking for it")
                        board = regain(board, case.error, open_board)
                        case.reason = case.error.message
                early = _wait(referring) if referring else None
                if not case.outcome:
                    refer_and_conclude(case, early, shop)
                yield case
        except BaseException:
            for future in compiling:
                if future is not None:
                    future.cancel()
            shop.isolated.close()
            raise
        finally:
            if board is not None:
                board.close()


def refer_early(case: Case, shop: Workshop) -> Case:
    """Ask the references of a case in a copy of it, so that the board's half is not disturbed."""
    copy = replace(case, references=[], unanswered={}, verdicts=[], outcome=None, error=None)
    return refer_case(copy, replace(shop, keep=lambda case, what: None, watch=lambda case, stage, note: None))


def refer_and_conclude(case: Case, early: Case | None, shop: Workshop) -> Case:
    """Compare what the board gave with the references: those the case has, those asked early, or asked now."""
    if early is not None:
        take_references(case, early, shop)
    elif not case.references:
        refer_case(case, shop)
    return conclude(case, shop)


def take_references(case: Case, early: Case, shop: Workshop) -> None:
    """Give a case what its copy got from :func:`refer_early`: references, or the error that took their place."""
    if early.outcome:
        case.outcome, case.error, case.stage, case.reason = early.outcome, early.error, early.stage, early.reason
        return
    case.references, case.plain_reference = early.references, early.plain_reference
    case.unanswered = early.unanswered
    case.timings = replace(case.timings, refer_s=early.timings.refer_s)
    shop.keep(case, "references")


def _wait(future: concurrent.futures.Future[Case]) -> Case:
    """A future's result; waits in slices so that Ctrl-C is heard on every platform."""
    while True:
        try:
            return future.result(timeout=0.5)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
