"""Where cases of a suite are run: on a board that was named, or on one after another that somebody lends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hil.controller.devices.board_choice import BoardChoice, is_lent
from hil.controller.devices.links.link import BoardLoan, provider_of
from hil.controller.workloads.suites.tasks import Task
from hil.core.board_config import BoardConfig
from hil.errors import BoardBusy, BoardError, FarmUnreachable


class OtherTarget(BoardError):
    """A board that needs other programs than those of the suite."""


class Agreement:
    """What boards agree on: the first one's target.

    Args:
        compiler: whose flags say what that is.

    Attributes:
        config: of the first board; None while there is none.
        settled: set when it is there, or will never be.
    """

    def __init__(self, compiler: str) -> None:
        self._compiler = compiler
        self._lock = threading.Lock()
        self.config: BoardConfig | None = None
        self.settled = threading.Event()

    def join(self, config: BoardConfig) -> None:
        """A board comes in.

        Raises:
            OtherTarget: it needs other programs.
        """
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
class Going:
    """How the run goes, for whoever waits for a board.

    Attributes:
        over: whether nobody wants one any more.
        running: whether there are other boards that run cases.
        say: told what goes on.
    """

    over: Callable[[], bool]
    running: Callable[[], bool]
    say: Callable[[str], None]


@dataclass(frozen=True)
class Loss:
    """How a board was lost: for good; in the middle of a task, with that task's error, or before any."""

    gone: BoardError
    task: Task | None = None
    error: BoardError | None = None


class Seat:
    """A board that was named: it is there once, and when it is lost the seat is empty.

    Attributes:
        name: what the queue calls it while there is no board.
        lent: whether it may be given another board.
    """

    lent = False

    def __init__(self, choice: BoardChoice) -> None:
        self.name = choice.name
        self._choice = choice

    def take(self, going: Going) -> BoardChoice | None:
        """The board; None where nobody wants it any more.

        Raises:
            BoardError: it cannot be had.
        """
        return self._choice

    def over(self) -> str:
        """Why the board that it has may be used no more; "" where it may."""
        return ""

    def give_back(self) -> None:
        """The board is not used any more."""


class LentSeat(Seat):
    """A board that is lent, and another one when that is lost.

    Args:
        choice: of boards that somebody lends.
        number: which of the seats for that choice it is, from 1.
        purpose: told to others who wait for a board.
        wait_s: how long to wait for one while no other board runs cases.
    """

    lent = True

    def __init__(self, choice: BoardChoice, number: int, purpose: str, wait_s: float) -> None:
        super().__init__(choice)
        self.name = f"{choice.name} ({number})"
        self._purpose = purpose
        self._wait_s = wait_s
        self._loan: BoardLoan | None = None
        self._had_one = False

    def take(self, going: Going) -> BoardChoice | None:
        """Wait for a board: for as long as others run, it may still come in time."""
        provider, selector = provider_of(_address(self._choice))
        deadline = time.monotonic() + self._wait_s
        while not going.over():
            if going.running():
                deadline = time.monotonic() + self._wait_s
            try:
                if self._loan is None:
                    self._loan = provider.order(selector, self._purpose)
                if self._loan.wait(_LOOK_S):
                    going.say(f"{self._loan.name} of the farm runs cases")
                    self._had_one = True
                    return BoardChoice(self._loan.config)
            except FarmUnreachable:
                # Who never reached the farm need not wait for it.
                if not (self._had_one or going.running()) or time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)
            except BaseException:
                self.give_back()
                raise
            if time.monotonic() > deadline:
                told = self._loan.queue_text() if self._loan else ""
                self.give_back()
                raise BoardBusy(f"the farm had no board for us within {self._wait_s:g} s: {told}".rstrip(": "))
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


def seats_of(choices: Sequence[BoardChoice], boards: int, purpose: str, wait_s: float) -> list[Seat]:
    """The seats for what was named: one for a board, so many for a selector of boards that are lent.

    Args:
        choices: what was named.
        boards: how many lent boards at a time, for each selector.
        purpose: told to others who wait for a board.
        wait_s: how long to wait for a lent board while no other runs cases.
    """
    seats: list[Seat] = []
    for choice in choices:
        if is_lent(_address(choice)):
            seats += [LentSeat(choice, number, purpose, wait_s) for number in range(1, boards + 1)]
        else:
            seats.append(Seat(choice))
    return seats


def _address(choice: BoardChoice) -> str:
    return choice.address or choice.config.connection.address
