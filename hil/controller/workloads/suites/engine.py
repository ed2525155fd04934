"""Run the cases of a suite: prepare them in parallel on the host, and run them in order on the boards.

One thread prepares cases with a pool over the isolated processes, and every board has a thread. Only the caller's
thread stores results.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice, knows_target
from hil.controller.models.flows.flow import Flow
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.runner import Runner
from hil.controller.records.console import StoredConsole
from hil.controller.storage.screen import prompts
from hil.controller.workloads.suites.cases.spec import CaseSpec
from hil.controller.workloads.suites.preparing import iter_prepared
from hil.controller.workloads.suites.request import SuiteRequest
from hil.controller.workloads.suites.store import SuiteDirectory
from hil.controller.workloads.suites.tasks import (
    BoardLoss,
    BoardSlot,
    OtherTarget,
    RunState,
    TargetConsensus,
    Task,
    TaskQueue,
    choose_next_confirmation,
    drop_results,
    make_attempt,
    make_slots,
    make_unread_case,
)
from hil.core.results import Outcome, Stage
from hil.core.text import TextSink
from hil.errors import BoardError, BoardLost, BoardRefused, BoardUnfit, BoardUnreachable, FarmError, SessionEnded

# Maximum attempts after a lost board, because the case itself may crash the boards.
_TRIES = 3
# Number of consecutive ``BOARD_UNFIT`` cases after which a board is dropped. A single such case may be too large for
# any board.
_UNFIT_CASES = 3
# Maximum prepared cases that wait for a board. Their tensors are in memory.
_WAITING = 256
_JOIN_SECONDS = 15.0


class Engine:
    """Runs the cases of a suite on boards.

    Args:
        choices: different boards, or requirements for farm boards. All boards must have the same compile target.
        say: receives progress messages; called from multiple threads.
    """

    def __init__(
        self,
        request: SuiteRequest,
        flow: Flow,
        choices: Sequence[BoardChoice],
        runner: Runner,
        run: SuiteDirectory,
        *,
        say: TextSink = lambda text: None,
    ) -> None:
        self._request = request
        self._flow = flow
        self._runner = runner
        self._run = run
        self._say = say
        purpose = f"hil suite {run.folder.name}"
        at_a_time = (request.jobs or 1) if request.on_farm else 1
        self._slots = make_slots(choices, at_a_time, purpose, request.wait_s)
        self._queue = TaskQueue([slot.name for slot in self._slots])
        self._ended: queue.SimpleQueue[Task | BaseException] = queue.SimpleQueue()
        self._over = threading.Event()
        self._agreed = TargetConsensus(flow.compiler or flow.runtime)
        self._lost: BoardError | None = None
        self._got_in = False
        self._pool = BoardPool(
            purpose,
            wait_s=request.wait_s,
            timeout_s=request.settings.timeout,
            say=say,
            opened=self._record_board,
            record_folder=run.folder,
        )
        self._state = RunState(self._over.is_set, lambda: self._pool.any_open, say)
        self._hw_type = choices[0].config.hw_type
        self.boards: dict[str, dict[str, Any]] = {}  # info by opened board
        # Runtimes of the cases: the flow's, and those of models that use another runtime.
        self._runtimes: tuple[str, ...] = (flow.runtime,)
        if all(knows_target(choice.config, flow.runtime) for choice in choices):
            self._agreed.join(choices[0].config)

    def run(self, specs: Sequence[CaseSpec]) -> Iterator[Task]:
        """Run cases and yield them as they end, in any order. Call this method only once."""
        self._runtimes = tuple(dict.fromkeys((spec.flow or self._flow).runtime for spec in specs)) or self._runtimes
        work = [(self._prepare_cases, specs), *((self._serve_slot, slot) for slot in self._slots)]
        threads = [threading.Thread(target=self._run_thread, args=one, daemon=True) for one in work]
        for thread in threads:
            thread.start()
        try:
            for _ in specs:
                yield self._wait_for_result()
        except BaseException:
            self._over.set()
            prompts.interrupt()
            self._runner.context.isolated.close()
            with contextlib.suppress(BoardError):
                self._pool.close()
            raise
        finally:
            self._over.set()
            self._agreed.settled.set()
            self._queue.close()
            for thread in threads:
                thread.join(_JOIN_SECONDS)

    @property
    def hw_type(self) -> str:
        """The hardware type to record for cases that never reached a board.

        For farm boards, the hardware type is known only later.
        """
        lent = self._slots[0].lent and self._agreed.config
        return lent.hw_type if lent else self._hw_type

    def save_consoles(self) -> list[StoredConsole]:
        """Write the lines of the boards' consoles, and return the consoles for the record."""
        return self._pool.save_consoles()

    def _wait_for_result(self) -> Task:
        """Return the next finished case.

        Wait in short intervals, because a blocking wait delays Ctrl-C on some platforms.
        """
        while True:
            with contextlib.suppress(queue.Empty):
                ended = self._ended.get(timeout=0.5)
                if isinstance(ended, BaseException):
                    raise ended
                return ended

    def _run_thread(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except BaseException as error:
            if not self._over.is_set():
                self._ended.put(error)

    def _prepare_cases(self, specs: Sequence[CaseSpec]) -> None:
        self._agreed.settled.wait()
        if self._agreed.config is None:
            # No board was reached, so the compile target is unknown and cases cannot be compiled.
            for spec in specs:
                case = make_unread_case(spec.id, self._flow.runtime, self._run.get_case_folder(spec.id))
                self._end_lost_task(Task(case))
            return
        settings, config = self._request.settings, self._agreed.config
        for task in iter_prepared(specs, self._flow, settings, self._runner, config, self._run, self._over):
            if task.case.outcome:
                self._end_task(task)
            elif not self._queue.put(task, most=_WAITING) and not self._over.is_set():
                self._end_lost_task(task)

    def _serve_slot(self, slot: BoardSlot) -> None:
        """Run queued cases on a slot's board. If the board is lost, continue on the slot's next board."""
        useless = 0
        try:
            while (choice := self._take_board(slot)) is not None:
                self._queue.rename(slot.name, choice.name)
                loss = self._run_on_board(slot, choice)
                if loss is None:
                    return
                useless = 0 if loss.task else useless + 1
                another = slot.lent and useless < _TRIES and not isinstance(loss.gone, OtherTarget)
                if another:
                    self._say(f"{choice.name} lost: {loss.gone.message}; waiting for a replacement board")
                    self._lost = loss.gone
                    self._queue.rename(choice.name, slot.name)
                    slot.give_back()
                else:
                    self._drop_board(choice.name, loss.gone)
                if loss.task is not None:
                    self._retry_task(loss.task, loss.error or loss.gone)
                if not another:
                    return
        finally:
            slot.give_back()

    def _take_board(self, slot: BoardSlot) -> BoardChoice | None:
        """Return a slot's board, or None if the slot gets no board."""
        try:
            return slot.take(self._state)
        except BoardError as refused:
            if isinstance(refused, FarmError) and self._agreed.config is None:
                # Raise the error: cases have not run, and the farm has no such boards.
                raise
            self._drop_board(slot.name, refused)
            return None

    def _run_on_board(self, slot: BoardSlot, choice: BoardChoice) -> BoardLoss | None:
        """Run queued cases on a board. Return how the board was lost, or None if the board was not lost."""
        runtimes, unfit = self._runtimes, 0
        try:
            try:
                session = self._pool.session(choice, runtimes=runtimes, faults=self._request.faults)
            except BoardError as refused:
                return None if self._over.is_set() else BoardLoss(refused)
            while (task := self._queue.take(choice.name)) is not None:
                task.board = choice.name
                if task.wrong is None:
                    task.hw_type = choice.config.hw_type
                task.case = self._runner.execute(task.case, session)
                if self._over.is_set():
                    return None
                error = task.case.error
                unfit = unfit + 1 if isinstance(error, BoardUnfit) else 0
                if not isinstance(error, BoardError):
                    if not task.case.outcome:
                        task.case = self._runner.judge(task.case, task.early)
                    self._finish_or_confirm(task)
                    continue
                if isinstance(error, BoardUnfit):
                    if slot.lent or (unfit >= _UNFIT_CASES and self._find_other_boards(choice.name)):
                        return BoardLoss(error, task, error)
                    self._retry_task(task, error)
                    continue
                try:
                    if why := slot.over():
                        raise SessionEnded(f"the lease ended: {why}")
                    self._say(f"{choice.name}: {error.message}; reconnecting")
                    self._pool.reconnect(choice, error, faults=self._request.faults)
                    session = self._pool.session(choice, runtimes=runtimes, faults=self._request.faults)
                except BoardError as gone:
                    return BoardLoss(gone, task, error)
                self._retry_task(task, error)
            return None
        finally:
            self._pool.give_back(choice, faults=self._request.faults)

    def _record_board(self, board: Board) -> None:
        """Record an opened board. The compile target must match the target of the other boards."""
        self._agreed.join(board.config)
        self._got_in = True
        self.boards[board.name] = dict(board.info)

    def _drop_board(self, board: str, error: BoardError) -> None:
        """Drop a board. Raise the error if it was the last board, and hil never reached a board."""
        self._lost = error
        waiting = self._queue.leave(board)
        if not (self._queue.alive or self._got_in) and isinstance(error, (BoardRefused, BoardUnreachable)):
            raise error
        self._say(f"{board} removed from the run: {error.message}")
        for task in waiting:
            if not self._queue_task(task):
                self._end_lost_task(task)
        if not self._queue.alive:
            self._agreed.settled.set()

    def _queue_task(self, task: Task) -> bool:
        """Queue a task. If all allowed boards have been dropped, allow any board."""
        if self._queue.put(task):
            return True
        task.boards = ()
        return self._queue.put(task)

    def _find_other_boards(self, *boards: str) -> tuple[str, ...]:
        """Return the boards in use, except those in ``boards``."""
        return tuple(other for other in self._queue.alive if other not in boards)

    def _retry_task(self, task: Task, error: BoardError) -> None:
        """Retry a case after the board failed, on a different board if possible. Count the attempts.

        A board that was unfit for a case does not get the case again.
        """
        case = task.case
        is_unfit = isinstance(error, BoardUnfit)
        unfit = (one["board"] for one in task.attempts if one["why"] == "board unfit")
        others = self._find_other_boards(task.board, *unfit)
        tries = 1 + sum(one["why"] != "confirm" for one in task.attempts)
        if task.wrong is None and tries < _TRIES and (others or not is_unfit):
            task.attempts.append(make_attempt("board unfit" if is_unfit else "board lost", task))
            task.case, task.boards = drop_results(case), others
            if self._queue_task(task):
                return
            task.case = case.with_error(error, Stage.RUN)
        self._end_task(task)

    def _finish_or_confirm(self, task: Task) -> None:
        """End a judged case, or queue the case again to confirm a mismatch."""
        case = task.case
        if task.wrong is not None:
            task.attempts.append(make_attempt("confirm", task))
            task.confirmations.append((task.board, case.outcome is not Outcome.PASS))
        elif case.outcome is Outcome.FAIL and self._request.confirm:
            task.wrong, task.wrong_on = case, task.board
        where = (
            choose_next_confirmation(task, self._request.confirm, self._queue.alive) if task.wrong is not None else None
        )
        if where is not None:
            task.case, task.boards = drop_results(case), where
            if self._queue_task(task):
                return
        self._end_task(task)

    def _end_lost_task(self, task: Task) -> None:
        if task.wrong is None:
            task.case = task.case.with_error(self._lost or BoardLost("no board available"), Stage.PUSH)
        self._end_task(task)

    def _end_task(self, task: Task) -> None:
        self._ended.put(task)
