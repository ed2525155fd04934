"""Where cases of a suite are run: on a board that was named, or on one after another that the farm lends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hil.controller.choice import BoardChoice
from hil.controller.links import is_farm
from hil.controller.suite.tasks import Task
from hil.errors import BoardBusy, BoardError, FarmUnreachable

if TYPE_CHECKING:
    from hil.controller.farm.holding import Holding

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


class FarmSeat(Seat):
    """A board of the farm, and another one when that is lost.

    Args:
        choice: of a farm's boards.
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
        self._holding: Holding | None = None
        self._had_one = False

    def take(self, going: Going) -> BoardChoice | None:
        """Wait for a board: for as long as others run, it may still come in time."""
        from hil.controller.farm.holding import Holding
        from hil.controller.farm.leased import lease_order
        from hil.controller.farm.link import selector_of
        from hil.controller.farm.places import farm_address

        order = lease_order(selector_of(_address(self._choice)), self._purpose)
        deadline = time.monotonic() + self._wait_s
        while not going.over():
            if going.running():
                deadline = time.monotonic() + self._wait_s
            try:
                if self._holding is None:
                    self._holding = Holding(farm_address(), order)
                if self._holding.wait(_LOOK_S):
                    going.say(f"{self._holding.held.card.name} of the farm runs cases")
                    self._had_one = True
                    return BoardChoice(self._holding.config)
            except FarmUnreachable:
                # Who never reached the farm need not wait for it.
                if not (self._had_one or going.running()) or time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)
            except BaseException:
                self.give_back()
                raise
            if time.monotonic() > deadline:
                told = self._holding.queue_text() if self._holding else ""
                self.give_back()
                raise BoardBusy(f"the farm had no board for us within {self._wait_s:g} s: {told}".rstrip(": "))
        self.give_back()
        return None

    def over(self) -> str:
        """Why the lease ended; it may be some moments until the farm tells."""
        return self._holding.ended(_LOOK_S) if self._holding else ""

    def give_back(self) -> None:
        """End the lease."""
        holding, self._holding = self._holding, None
        if holding is not None:
            holding.close()


def seats_of(choices: Sequence[BoardChoice], boards: int, purpose: str, wait_s: float) -> list[Seat]:
    """The seats for what was named: one for a board, so many for a selector of the farm's boards.

    Args:
        choices: what was named.
        boards: how many boards of the farm at a time, for each selector.
        purpose: told to others who wait for a board.
        wait_s: how long to wait for a board of the farm while no other runs cases.
    """
    seats: list[Seat] = []
    for choice in choices:
        if is_farm(_address(choice)):
            seats += [FarmSeat(choice, number, purpose, wait_s) for number in range(1, boards + 1)]
        else:
            seats.append(Seat(choice))
    return seats


def _address(choice: BoardChoice) -> str:
    return choice.address or choice.config.connection.address
