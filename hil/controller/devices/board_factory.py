"""Opening a board: through its agent, or by command where it has none; and having it again after it was lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_resolver import open_link
from hil.controller.devices.health import changed
from hil.controller.devices.power import answering, recover
from hil.errors import BoardError, BoardLost, SessionEnded, UsageError

# How long a lost board is looked for: a small system is up again by then, and more is not known of it anyway.
_RECONNECT_S = 20.0


def connect_board(choice: BoardChoice) -> Board:
    """Connect to a board, once; raises as :func:`open_board`."""
    return Board(choice, open_link(choice))


def open_board(choice: BoardChoice) -> Board:
    """Connect to a board. One that does not answer is reset and its power cycled, where its config says how.

    Raises:
        UsageError: the board cannot be used that way.
        BoardUnreachable, BoardLost: nobody answers, whatever was done.
        BoardError: the board refuses us, or can run nothing.
    """

    def connect() -> Board:
        try:
            return connect_board(choice)
        except BoardError as error:
            from hil.controller.devices.deploy.packages import COMMAND_HINT, NoAgentHere

            wanted = choice.runtime or choice.config.runtime
            served = choice.config.command.runs(wanted)
            if not served:
                instead = f"no command runs programs of {wanted} instead: --runtime iree, or another board"
                error.hint = error.hint.replace(COMMAND_HINT, instead)
            if not (served and isinstance(error, NoAgentHere)):
                raise
            choice.say(f"{error.message}: going on without an agent")
            return connect_board(replace(choice, without_agent=error.message))

    return recover(connect, choice.config.power, board=choice.name, say=choice.say)


def reconnect(lost: Board, error: BoardError, reopen: Callable[[], Board]) -> Board | None:
    """Have a lost board again, None where it does not come back soon, and add to the error what became of it.

    Nothing is run again. Only a board that is reached over SSH is looked for: another's link says all there is to know.
    """
    lost.close()
    if lost.shell is None or not isinstance(error, (BoardLost, SessionEnded)):
        return None
    try:
        board = answering(reopen, _RECONNECT_S)
    except (BoardError, UsageError) as gone:
        error.hint = error.hint or f"it did not come back within {_RECONNECT_S:g} s: {gone.message}"
        return None
    if happened := changed(lost.info, board.info):
        error.add(f"meanwhile {' and '.join(happened)}")
    else:
        error.hint = error.hint or "the board itself stayed up and answers again: its agent or the link had failed"
    return board
