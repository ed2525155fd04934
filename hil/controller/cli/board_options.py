"""What the verbs of `hil board` share: the board's address as an argument, and ways to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hil.controller.cli.options import board_options, chosen_board
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.devices.board_choice import BoardChoice
    from hil.controller.devices.client import AgentClient
    from hil.controller.devices.links.link import Link
    from hil.controller.devices.ssh.shell import Shell

F = TypeVar("F", bound=Callable[..., Any])


def board_place(command: F) -> F:
    """``[ADDR]`` beside the options that name a board."""
    return click.argument("addr", default="", metavar="[ADDR|NAME]")(board_options(command))


def chosen_place(settings: dict[str, Any]) -> BoardChoice:
    """The board that :func:`board_place` names; takes its settings out of a command's.

    Raises:
        UsageError: there is no such board, or two were named.
    """
    addr = settings.pop("addr")
    typed = click.get_current_context().get_parameter_source("board") is click.core.ParameterSource.COMMANDLINE
    if addr and typed:
        raise UsageError(f"two boards are named: {addr} and {settings['board']}", hint="leave one of them out")
    settings["board"] = addr or settings["board"]
    return chosen_board(settings)


def address_of(choice: BoardChoice) -> str:
    """Where a board is; "" for a simulator."""
    return choice.address or choice.config.connection.address


def say(text: str) -> None:
    """What goes on, on stderr."""
    click.echo(text, err=True)


def shell_at(choice: BoardChoice) -> Shell:
    """A shell on the board; a context manager.

    Raises:
        UsageError: it is not reached over SSH.
        BoardUnreachable: nobody answers there, or it refuses us.
    """
    from hil.controller.devices.ssh.address import is_ssh_address

    where = address_of(choice)
    if not is_ssh_address(where):
        raise UsageError(
            f"{choice.name} is not reached over SSH",
            hint="name a board as USER@HOST or ssh:ALIAS, or one whose config has such an address",
        )
    from hil.controller.devices.ssh.connect import open_shell

    return open_shell(where, choice.config.connection, board=choice.name, base=choice.config.path.parent)


@contextmanager
def agent_at(choice: BoardChoice) -> Iterator[tuple[Link, AgentClient]]:
    """The agent of a board, which is put there where it is missing; nobody's session is disturbed.

    Raises:
        BoardError: it cannot be reached, or no agent can be put there.
    """
    from hil.controller.devices.board_resolver import open_link
    from hil.controller.devices.client import AgentClient

    link = open_link(replace(choice, say=say))
    try:
        client = AgentClient(link.target, choice.name)
        try:
            yield link, client
        finally:
            client.close()
    finally:
        link.close()
