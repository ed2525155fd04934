"""Open a board: with an agent, or over shell commands without an agent. Reconnect to lost boards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_resolver import open_link
from hil.controller.devices.console.board_console import BoardConsole
from hil.controller.devices.health import list_changes
from hil.controller.devices.measuring.measure_commands import restore_board
from hil.controller.devices.power_control.power import connect_with_retry, recover
from hil.errors import BoardError, BoardLost, SessionEnded, UsageError

# Seconds to wait for a lost board. hil does not know the board's boot time, but small systems reboot in less time.
_RECONNECT_SECONDS = 20.0


def connect_board(choice: BoardChoice) -> Board:
    """Connect to a board without retries. Raises the errors of :func:`open_board`."""
    return Board(choice, open_link(choice))


def open_board(choice: BoardChoice, console: BoardConsole | None = None) -> Board:
    """Connect to a board. If the board does not respond, reset and power-cycle the board as configured.

    If a measurement was killed, run the commands that restore the board.

    Args:
        console: The board's console, which is open before the power is switched.

    Raises:
        UsageError: The board cannot be used with these options.
        BoardUnreachable, BoardLost: The board does not respond, even after a reset and a power cycle.
        BoardError: The board refuses the connection or cannot run programs.
    """

    def connect() -> Board:
        try:
            return connect_board(choice)
        except BoardError as error:
            from hil.controller.devices.deploy.packages import COMMAND_HINT, NoAgentHere

            wanted = choice.runtime or choice.config.runtime
            served = choice.config.command.can_run(wanted)
            if not served:
                instead = f"no command supports {wanted} programs: use --runtime iree, or a different board"
                error.hint = error.hint.replace(COMMAND_HINT, instead)
                error.option = "--runtime"
            if not (served and isinstance(error, NoAgentHere)):
                raise
            choice.say(f"{error.message}: continuing without an agent")
            return connect_board(replace(choice, without_agent=error.message))

    boot = {} if console is None else {"time_boot": console.time_boot}
    try:
        board = recover(connect, choice.config.power, board=choice.name, say=choice.say, **boot)
    except BoardError as error:
        if console is not None:
            console.explain(error)
        raise
    try:
        restore_board(board, choice.say)
    except BaseException:
        board.close()
        raise
    return board


def reconnect(lost: Board, error: BoardError, reopen: Callable[[], Board]) -> Board | None:
    """Reconnect to a lost board. Return None if the board does not respond soon. Add the cause to the error.

    Does not repeat any run. Only boards over SSH are reconnected. For other boards, the link's error already contains
    the cause.
    """
    lost.close()
    if lost.shell is None or not isinstance(error, (BoardLost, SessionEnded)):
        return None
    try:
        board = connect_with_retry(reopen, _RECONNECT_SECONDS)
    except (BoardError, UsageError) as gone:
        error.hint = error.hint or f"the board did not reconnect within {_RECONNECT_SECONDS:g} s: {gone.message}"
        return None
    if happened := list_changes(lost.info, board.info):
        error.add(f"meanwhile {' and '.join(happened)}")
    else:
        error.hint = error.hint or "the board stayed up and responds: the agent or the connection failed"
    return board
