"""Opening a board: through its agent, or by command where it has none; and having it again after it was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from hil.controller.devices.board import Board, LoadedProgram
from hil.controller.devices.board_resolver import BoardChoice
from hil.controller.devices.health.conditions import changed
from hil.controller.devices.health.power import answering, recover
from hil.controller.devices.links.factory import refuse_faults
from hil.controller.devices.links.link import Say
from hil.errors import BoardError, BoardLost, SessionEnded, UsageError

if TYPE_CHECKING:
    from hil.controller.devices.agentless import CommandBoard, CommandProgram
    from hil.controller.devices.ssh.shell import Shell

AnyBoard: TypeAlias = "Board | CommandBoard"
AnyProgram: TypeAlias = "LoadedProgram | CommandProgram"

# How long a lost board is looked for: a small system is up again by then, and more is not known of it anyway.
_REGAIN_S = 20.0


def open_board(
    choice: BoardChoice,
    *,
    runtime: str = "",
    purpose: str = "",
    faults: tuple[str, ...] = (),
    wait_s: float = 60.0,
    say: Say = lambda text: None,
) -> AnyBoard:
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

    def connect() -> AnyBoard:
        if choice.config.command.kind == "command":
            refuse_faults(faults)
            return _by_command(choice, runtime, wait_s, say, "its config asks for none")
        from hil.controller.devices.deploy.trouble import COMMAND_HINT, NoAgentHere

        try:
            return Board(choice, runtime=runtime, purpose=purpose, faults=faults, wait_s=wait_s, say=say)
        except BoardError as error:
            wanted = runtime or choice.config.runtime
            served = choice.config.command.runs(wanted)
            if not served:
                instead = f"no command runs programs of {wanted} instead: --runtime iree, or another board"
                error.hint = error.hint.replace(COMMAND_HINT, instead)
            if not (served and isinstance(error, NoAgentHere)):
                raise
            say(f"{error.message}: going on without an agent")
            return _by_command(choice, runtime, wait_s, say, error.message)

    return recover(connect, choice.config.power, board=choice.name, say=say)


def _by_command(choice: BoardChoice, runtime: str, wait_s: float, say: Say, why: str) -> AnyBoard:
    from hil.controller.devices.agentless import CommandBoard
    from hil.controller.devices.ssh.address import is_ssh_address
    from hil.controller.devices.ssh.shell import open_shell

    connection, where = choice.config.connection, choice.address or choice.config.connection.address
    if not is_ssh_address(where):
        raise UsageError(
            f"programs run by command over SSH only, and {where or 'no address'} is none for that",
            board=choice.name,
            hint="--board USER@HOST, or an address in the config's [connection]",
        )

    def login() -> Shell:
        return open_shell(where, connection, board=choice.name, base=choice.config.path.parent)

    return CommandBoard(choice, login(), runtime=runtime, wait_s=wait_s, say=say, reopen=login, why=why)


def regain(lost: AnyBoard, error: BoardError, reopen: Callable[[], AnyBoard]) -> AnyBoard | None:
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
        board = answering(reopen, _REGAIN_S)
    except (BoardError, UsageError) as gone:
        error.hint = error.hint or f"it did not come back within {_REGAIN_S:g} s: {gone.message}"
        return None
    if happened := changed(lost.info, board.info):
        error.add(f"meanwhile {' and '.join(happened)}")
    else:
        error.hint = error.hint or "the board itself stayed up and answers again: its agent or the link had failed"
    return board
