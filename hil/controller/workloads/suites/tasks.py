"""Assignment of cases to boards: the task queue, and slots for named or leased boards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hil.controller.devices.board_choice import BoardChoice, is_provider_address, use_device
from hil.controller.devices.links.link import BoardLoan
from hil.controller.devices.links.package_links import find_provider
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import Options
from hil.core.board_config import BoardConfig
from hil.core.results import Timings
from hil.errors import BoardBusy, BoardError, FarmUnreachable


@dataclass
class Task:
    """A case that is ready to run."""

    case: Case  # the case's current state
    early: Case | None = None  # a copy with prefetched reference results, or None
    boards: tuple[str, ...] = ()  # boards that may run the case; empty: any board
    board: str = ""  # last board that ran the case
    hw_type: str = ""  # hardware type of the final result
    # Attempts that do not count: see :class:`hil.controller.records.suite.CaseRecord`.
    attempts: list[dict[str, str]] = field(default_factory=list)
    # State of the case after the first mismatch, or None if no confirmation runs are needed.
    wrong: Case | None = None
    wrong_on: str = ""  # the board with that mismatch
    # Results of the confirmation runs: (board, whether the mismatch occurred again).
    confirmations: list[tuple[str, bool]] = field(default_factory=list)
    started: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def answered(self) -> Case:
        """The case with the result that counts, regardless of confirmation runs."""
        return self.case if self.wrong is None else self.wrong

    def fits(self, boards: Sequence[str]) -> bool:
        """Return whether any of these boards may run the task."""
        return bool(boards) and not (self.boards and set(self.boards).isdisjoint(boards))


class TaskQueue:
    """Tasks that wait for a board, in first-in, first-out order. Threads take the tasks that their board may run."""

    def __init__(self, boards: Sequence[str]) -> None:
        self._alive = list(boards)
        self._waiting: list[Task] = []
        self._changed = threading.Condition()
        self._closed = False

    @property
    def alive(self) -> tuple[str, ...]:
        """The boards that still take tasks."""
        with self._changed:
            return tuple(self._alive)

    def put(self, task: Task, *, most: int | None = None) -> bool:
        """Wait until fewer than ``most`` tasks are in the queue, then add a task.

        Return False if no board may run the task, or if the queue is closed.
        """
        with self._changed:
            while not self._closed and most is not None and len(self._waiting) >= most and self._alive:
                self._changed.wait(0.5)
            if self._closed or not task.fits(self._alive):
                return False
            self._waiting.append(task)
            self._changed.notify_all()
            return True

    def take(self, board: str) -> Task | None:
        """Wait for the next task for a board. Return None when the queue is closed."""
        with self._changed:
            while not self._closed:
                if (task := next((task for task in self._waiting if task.fits([board])), None)) is not None:
                    self._waiting.remove(task)
                    self._changed.notify_all()
                    return task
                self._changed.wait(0.5)
            return None

    def leave(self, board: str) -> list[Task]:
        """Remove a board. Return the tasks that no remaining board may run."""
        with self._changed:
            self._alive.remove(board)
            stranded = [task for task in self._waiting if not task.fits(self._alive)]
            self._waiting = [task for task in self._waiting if task.fits(self._alive)]
            self._changed.notify_all()
            return stranded

    def rename(self, board: str, to: str) -> None:
        """Replace a board with a new board, also in the tasks for this board.

        Wait until the slot that used the new board before has removed the board. The farm may lease a lost board to a
        second slot immediately, but the first slot notices the loss only after its current case.
        """

        def rename_boards(names: Sequence[str]) -> list[str]:
            return [to if name == board else name for name in names]

        with self._changed:
            while to != board and to in self._alive and not self._closed:
                self._changed.wait(0.5)
            self._alive = rename_boards(self._alive)
            for task in self._waiting:
                task.boards = tuple(rename_boards(task.boards))
            self._changed.notify_all()

    def close(self) -> None:
        """Close the queue. Waiting calls return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def make_unread_case(name: str, runtime: str, folder: Path) -> Case:
    """Return a case without any results, for cases whose model or compile target is unknown."""
    return Case(name, folder / "unread", Options(runtime=runtime), folder)


def drop_results(case: Case) -> Case:
    """Return the case without the results of the run. Host results such as references and their times remain."""
    return replace(
        case,
        result=None,
        verdicts=(),
        plain_verdict=None,
        outcome=None,
        stage="",
        reason="",
        error=None,
        timings=Timings(import_s=case.timings.import_s, compile_s=case.timings.compile_s),
        worker_log=(),
        pushed_bytes=0,
    )


def make_attempt(why: str, task: Task) -> dict[str, str]:
    """Return the record of an attempt that does not count, with the reason."""
    case = task.case
    outcome = case.outcome.value if case.outcome else ""
    return {"why": why, "board": task.board, "outcome": outcome, "message": case.reason}


def choose_next_confirmation(task: Task, wanted: int, boards: Sequence[str]) -> tuple[str, ...] | None:
    """Return the allowed boards for the next confirmation run of a mismatch, or None if no run is needed.

    The board of the mismatch and the other boards alternate, starting with the board of the mismatch.
    """
    done = len(task.confirmations)
    if done >= wanted or not boards:
        return None
    others = tuple(board for board in boards if board != task.wrong_on)
    if others and (done % 2 or task.wrong_on not in boards):
        return others
    return (task.wrong_on,)


def summarize_confirmations(first: str, confirmations: Sequence[tuple[str, bool]]) -> str:
    """Summarize the confirmation runs of a mismatch.

    Returns ``always wrong``, ``flaky``, ``one bad board``, or "" without runs.
    """
    if not confirmations:
        return ""
    if all(wrong for _, wrong in confirmations):
        return "always wrong"
    elsewhere = [wrong for board, wrong in confirmations if board != first]
    here = [wrong for board, wrong in confirmations if board == first]
    if here and all(here) and elsewhere and not any(elsewhere):
        return "one bad board"
    return "flaky"


class OtherTarget(BoardError):
    """The board needs a different compile target than the suite."""


class TargetConsensus:
    """Common compile target of all boards: the first board's flags for the compiler."""

    def __init__(self, compiler: str) -> None:
        self._compiler = compiler
        self._lock = threading.Lock()
        self.config: BoardConfig | None = None  # from the first board; None before
        self.settled = threading.Event()  # set when the config is known, or will never be known

    def join(self, config: BoardConfig) -> None:
        """Add a board. Raises OtherTarget if the compile target differs."""
        with self._lock:
            agreed = self.config = self.config or config
            self.settled.set()
        mine, theirs = (" ".join(one.compile_flags.get(self._compiler, ())) for one in (config, agreed))
        if mine != theirs:
            raise OtherTarget(
                f"the board requires code compiled with {mine or 'no flags'}, the other boards require code compiled "
                f"with {theirs or 'no flags'}",
                board=config.name,
                hint="run the suite separately for each kind of board (on a farm, use a narrower selector)",
            )


_LOOK_SECONDS = 0.3


@dataclass(frozen=True)
class RunState:
    """State of the suite run, for threads that wait for a board."""

    over: Callable[[], bool]  # whether the run has ended
    running: Callable[[], bool]  # whether other boards run cases
    say: Callable[[str], None]


@dataclass(frozen=True)
class BoardLoss:
    """Permanent loss of a board. ``task`` and ``error`` are set if hil lost the board during a task."""

    gone: BoardError
    task: Task | None = None
    error: BoardError | None = None


class BoardSlot:
    """Slot for a named board. After the board is lost, the slot stays empty."""

    lent = False  # whether the slot may get a second board

    def __init__(self, choice: BoardChoice) -> None:
        self.name = choice.name  # name in the queue while the slot has no board
        self._choice = choice

    def take(self, state: RunState) -> BoardChoice | None:
        """Return the board, or None if the run has ended. Raises BoardError if the board is unavailable."""
        return self._choice

    def over(self) -> str:
        """Return why the current board may no longer be used, or ""."""
        return ""

    def give_back(self) -> None:
        """Release the board."""


class LeasedSlot(BoardSlot):
    """Slot for a leased board. If the board is lost, the slot gets a new board.

    Slots with the same board selector are numbered from 1.
    """

    lent = True

    def __init__(self, choice: BoardChoice, number: int, purpose: str, wait_s: float) -> None:
        super().__init__(choice)
        self.name = f"{choice.name} ({number})"
        self._purpose = purpose
        self._wait_s = wait_s
        self._loan: BoardLoan | None = None
        self._had_one = False

    def take(self, state: RunState) -> BoardChoice | None:
        """Wait for a board. The timeout restarts while other boards run cases."""
        provider, selector = find_provider(_get_address(self._choice))
        deadline = time.monotonic() + self._wait_s
        try:
            while not state.over():
                if state.running():
                    deadline = time.monotonic() + self._wait_s
                try:
                    self._loan = self._loan or provider.order(selector, self._purpose)
                    if self._loan.wait(_LOOK_SECONDS):
                        state.say(f"farm board {self._loan.name} runs cases")
                        self._had_one = True
                        return use_device(BoardChoice(self._loan.config), *self._choice.used_device)
                except FarmUnreachable:
                    # Wait for the farm only if it was reachable before.
                    if not (self._had_one or state.running()) or time.monotonic() > deadline:
                        raise
                    time.sleep(_LOOK_SECONDS)
                if time.monotonic() > deadline:
                    text = self._loan.queue_text() if self._loan else ""
                    raise BoardBusy(f"no farm board became available within {self._wait_s:g} s: {text}".rstrip(": "))
        except BaseException:
            self.give_back()
            raise
        self.give_back()
        return None

    def over(self) -> str:
        """Return why the lease ended, or "". The farm may report the reason with a short delay."""
        return self._loan.ended(_LOOK_SECONDS) if self._loan else ""

    def give_back(self) -> None:
        """End the lease."""
        loan, self._loan = self._loan, None
        if loan is not None:
            loan.close()


def make_slots(choices: Sequence[BoardChoice], boards: int, purpose: str, wait_s: float) -> list[BoardSlot]:
    """Return the slots for the chosen boards: one per named board, ``boards`` per farm selector.

    Args:
        wait_s: timeout in seconds for a leased board while no other board runs cases.
    """
    slots: list[BoardSlot] = []
    for choice in choices:
        if is_provider_address(_get_address(choice)):
            slots += [LeasedSlot(choice, number, purpose, wait_s) for number in range(1, boards + 1)]
        else:
            slots.append(BoardSlot(choice))
    return slots


def _get_address(choice: BoardChoice) -> str:
    return choice.address or choice.config.connection.address
