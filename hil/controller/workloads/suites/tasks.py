"""Which board runs what next: tasks that wait, and boards that are named or lent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hil.controller.devices.board_choice import BoardChoice, is_lent
from hil.controller.devices.links.link import BoardLoan
from hil.controller.devices.links.package_links import provider_of
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.options import Options
from hil.core.board_config import BoardConfig
from hil.core.results import Timings
from hil.errors import BoardBusy, BoardError, FarmUnreachable


@dataclass
class Task:
    """A case that is ready to run."""

    case: Case  # what is run next, or was run last
    early: Case | None = None  # a copy of it that has asked the references already, or None
    boards: tuple[str, ...] = ()  # the boards that may run it; empty is any of them
    board: str = ""  # who ran it last
    hw_type: str = ""  # the hardware type of who gave the answer that counts
    # the tries that do not count: see :class:`hil.controller.workloads.suites.store.CaseRecord`.
    attempts: list[dict[str, str]] = field(default_factory=list)
    # the case as its answer was first found wrong; None unless further runs are to confirm that.
    wrong: Case | None = None
    wrong_on: str = ""  # the board that gave that answer
    # how those runs ended: (board, whether the answer was wrong again).
    confirmations: list[tuple[str, bool]] = field(default_factory=list)
    started: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def answered(self) -> Case:
        """The case whose answer counts, whatever came of runs that were to confirm it."""
        return self.case if self.wrong is None else self.wrong

    def fits(self, boards: Sequence[str]) -> bool:
        """Whether one of some boards may run it."""
        return bool(boards) and not (self.boards and set(self.boards).isdisjoint(boards))


class TaskQueue:
    """Tasks that wait for a board; threads take what their board may run, first come, first served."""

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
        """Add a task, once fewer than ``most`` wait; false where no board may run it any more, or it is closed."""
        with self._changed:
            while not self._closed and most is not None and len(self._waiting) >= most and self._alive:
                self._changed.wait(0.5)
            if self._closed or not task.fits(self._alive):
                return False
            self._waiting.append(task)
            self._changed.notify_all()
            return True

    def take(self, board: str) -> Task | None:
        """The next task for a board; waits for one. None when the queue is closed."""
        with self._changed:
            while not self._closed:
                if (task := next((task for task in self._waiting if task.fits([board])), None)) is not None:
                    self._waiting.remove(task)
                    self._changed.notify_all()
                    return task
                self._changed.wait(0.5)
            return None

    def leave(self, board: str) -> list[Task]:
        """A board takes no more; returns the tasks that nobody is left for."""
        with self._changed:
            self._alive.remove(board)
            stranded = [task for task in self._waiting if not task.fits(self._alive)]
            self._waiting = [task for task in self._waiting if task.fits(self._alive)]
            self._changed.notify_all()
            return stranded

    def rename(self, board: str, to: str) -> None:
        """In place of a board there is another one from now on, also for the tasks that were meant for it.

        Whoever had that one before must have left it: a board that was lost may be lent to another slot at once, and
        the former one finds out only when its case has ended.
        """

        def renamed(names: Sequence[str]) -> list[str]:
            return [to if name == board else name for name in names]

        with self._changed:
            while to != board and to in self._alive and not self._closed:
                self._changed.wait(0.5)
            self._alive = renamed(self._alive)
            for task in self._waiting:
                task.boards = tuple(renamed(task.boards))
            self._changed.notify_all()

    def close(self) -> None:
        """Send everybody home."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def unread(name: str, runtime: str, folder: Path) -> Case:
    """A case that nothing was done for: nobody knows its model, or what to compile it for."""
    return Case(name, folder / "unread", Options(runtime=runtime), folder)


def fresh(case: Case) -> Case:
    """The case as it was before it ran: what the host made is left, references among it, and of its times those."""
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


def attempt(why: str, task: Task) -> dict[str, str]:
    """The record of a try that does not count, and why it does not."""
    case = task.case
    outcome = case.outcome.value if case.outcome else ""
    return {"why": why, "board": task.board, "outcome": outcome, "message": case.reason}


def next_confirmation(task: Task, wanted: int, boards: Sequence[str]) -> tuple[str, ...] | None:
    """Which boards may run a mismatch again: the same one first, then another in turns; None where none is wanted."""
    done = len(task.confirmations)
    if done >= wanted or not boards:
        return None
    others = tuple(board for board in boards if board != task.wrong_on)
    if others and (done % 2 or task.wrong_on not in boards):
        return others
    return (task.wrong_on,)


def confirmed(first: str, confirmations: Sequence[tuple[str, bool]]) -> str:
    """What runs that confirm the first board's mismatch say: ``always wrong``, ``flaky``, ``one bad board``, or ""."""
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
    """A board that needs other programs than those of the suite."""


class Agreement:
    """What boards agree on: the first one's target, as the flags of one compiler say it."""

    def __init__(self, compiler: str) -> None:
        self._compiler = compiler
        self._lock = threading.Lock()
        self.config: BoardConfig | None = None  # of the first board; None while there is none
        self.settled = threading.Event()  # set when it is there, or will never be

    def join(self, config: BoardConfig) -> None:
        """A board comes in. Raises OtherTarget: it needs other programs."""
        with self._lock:
            agreed = self.config = self.config or config
            self.settled.set()
        mine, theirs = (" ".join(one.compile_flags.get(self._compiler, ())) for one in (config, agreed))
        if mine != theirs:
            raise OtherTarget(
                f"it needs programs compiled with {mine or 'no flags'}, the others with {theirs or 'no flags'}",
                board=config.name,
                hint="boards of one suite run must be alike: run the suite on each kind of board by itself "
                "(a narrower selector has a farm lend boards of one kind)",
            )


_LOOK_S = 0.3


@dataclass(frozen=True)
class RunState:
    """How the run goes, for whoever waits for a board."""

    over: Callable[[], bool]  # whether nobody wants one any more
    running: Callable[[], bool]  # whether there are other boards that run cases
    say: Callable[[str], None]


@dataclass(frozen=True)
class BoardLoss:
    """How a board was lost: for good; in the middle of a task, with that task's error, or before any."""

    gone: BoardError
    task: Task | None = None
    error: BoardError | None = None


class BoardSlot:
    """A board that was named: it is there once, and when it is lost the slot is empty."""

    lent = False  # whether it may be given another board

    def __init__(self, choice: BoardChoice) -> None:
        self.name = choice.name  # what the queue calls it while there is no board
        self._choice = choice

    def take(self, state: RunState) -> BoardChoice | None:
        """The board; None where nobody wants it any more. Raises BoardError: it cannot be had."""
        return self._choice

    def over(self) -> str:
        """Why the board that it has may be used no more; "" where it may."""
        return ""

    def give_back(self) -> None:
        """The board is not used any more."""


class LeasedSlot(BoardSlot):
    """A board that is lent, and another one when that is lost; the slots for one choice are numbered from 1."""

    lent = True

    def __init__(self, choice: BoardChoice, number: int, purpose: str, wait_s: float) -> None:
        super().__init__(choice)
        self.name = f"{choice.name} ({number})"
        self._purpose = purpose
        self._wait_s = wait_s
        self._loan: BoardLoan | None = None
        self._had_one = False

    def take(self, state: RunState) -> BoardChoice | None:
        """Wait for a board: for as long as others run, it may still come in time."""
        provider, selector = provider_of(_address(self._choice))
        deadline = time.monotonic() + self._wait_s
        try:
            while not state.over():
                if state.running():
                    deadline = time.monotonic() + self._wait_s
                try:
                    self._loan = self._loan or provider.order(selector, self._purpose)
                    if self._loan.wait(_LOOK_S):
                        state.say(f"{self._loan.name} of the farm runs cases")
                        self._had_one = True
                        return BoardChoice(self._loan.config)
                except FarmUnreachable:
                    # Who never reached the farm need not wait for it.
                    if not (self._had_one or state.running()) or time.monotonic() > deadline:
                        raise
                    time.sleep(_LOOK_S)
                if time.monotonic() > deadline:
                    text = self._loan.queue_text() if self._loan else ""
                    raise BoardBusy(f"the farm had no board for us within {self._wait_s:g} s: {text}".rstrip(": "))
        except BaseException:
            self.give_back()
            raise
        self.give_back()
        return None

    def over(self) -> str:
        """Why the lease ended; it may be some moments until the farm tells."""
        return self._loan.ended(_LOOK_S) if self._loan else ""

    def give_back(self) -> None:
        """End the lease."""
        loan, self._loan = self._loan, None
        if loan is not None:
            loan.close()


def slots_of(choices: Sequence[BoardChoice], boards: int, purpose: str, wait_s: float) -> list[BoardSlot]:
    """The slots for what was named: one for a board, ``boards`` for a selector of boards that are lent.

    Args:
        wait_s: how long to wait for a lent board while no other runs cases.
    """
    slots: list[BoardSlot] = []
    for choice in choices:
        if is_lent(_address(choice)):
            slots += [LeasedSlot(choice, number, purpose, wait_s) for number in range(1, boards + 1)]
        else:
            slots.append(BoardSlot(choice))
    return slots


def _address(choice: BoardChoice) -> str:
    return choice.address or choice.config.connection.address
