"""Opening a board: through its agent, or by command where it has none; and having it again after it was lost."""

from __future__ import annotations

from collections.abc import Callable

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.board_resolver import open_link
from hil.controller.devices.health import changed
from hil.controller.devices.links.link import Say
from hil.controller.devices.power import answering, recover
from hil.errors import BoardError, BoardLost, SessionEnded, UsageError

# How long a lost board is looked for: a small system is up again by then, and more is not known of it anyway.
_RECONNECT_S = 20.0


def connect_board(
    choice: BoardChoice,
    *,
    runtime: str = "",
    purpose: str = "",
    faults: tuple[str, ...] = (),
    wait_s: float = 60.0,
    say: Say = lambda text: None,
    without_agent: str = "",
) -> Board:
    """Connect to a board, once; arguments and errors are those of :func:`open_board`.

    Args:
        without_agent: why the board is to be served by command, through SSH; "" leaves it to its config.
    """
    link = open_link(
        choice.address,
        choice.config,
        faults=faults,
        runtime=runtime,
        purpose=purpose,
        wait_s=wait_s,
        say=say,
        without_agent=without_agent,
    )
    return Board(choice, link, runtime=runtime, purpose=purpose, wait_s=wait_s, say=say)


def open_board(
    choice: BoardChoice,
    *,
    runtime: str = "",
    purpose: str = "",
    faults: tuple[str, ...] = (),
    wait_s: float = 60.0,
    say: Say = lambda text: None,
) -> Board:
    """Connect to a board. One that does not answer is reset and its power cycled, where its config says how.

    Args:
        choice: which board.
        runtime: the runtime that is going to be used; "" is the config's.
        purpose: told to others who wait for it.
        faults: for a simulator: faults to switch on.
        wait_s: how long to wait while somebody else has it.
        say: told what goes on.

    Raises:
        UsageError: the board cannot be used that way.
        BoardUnreachable, BoardLost: nobody answers, whatever was done.
        BoardError: the board refuses us, or can run nothing.
    """

    def once(without_agent: str = "") -> Board:
        return connect_board(
            choice,
            runtime=runtime,
            purpose=purpose,
            faults=faults,
            wait_s=wait_s,
            say=say,
            without_agent=without_agent,
        )

    def connect_anyhow() -> Board:
        from hil.controller.devices.deploy.packages import COMMAND_HINT, NoAgentHere

        try:
            return once()
        except BoardError as error:
            wanted = runtime or choice.config.runtime
            served = choice.config.command.runs(wanted)
            if not served:
                instead = f"no command runs programs of {wanted} instead: --runtime iree, or another board"
                error.hint = error.hint.replace(COMMAND_HINT, instead)
            if not (served and isinstance(error, NoAgentHere)):
                raise
            say(f"{error.message}: going on without an agent")
            return once(error.message)

    return recover(connect_anyhow, choice.config.power, board=choice.name, say=say)


def reconnect(lost: Board, error: BoardError, reopen: Callable[[], Board]) -> Board | None:
    """After a board was lost: have it again if it comes back soon, and tell what became of it.

    Nothing is run again. Only a board that is reached over SSH is looked for: another's link says all there is to know.

    Args:
        lost: the board as it was; it is closed.
        error: how it was lost; what is found out is added to it.
        reopen: connects to the board.

    Returns:
        The board for whatever comes next, or None.
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
