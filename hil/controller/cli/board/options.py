"""Helpers for the `hil board` commands: the board's address as an argument, and connections to the board."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hil.controller.cli.commands import read_project_board
from hil.controller.cli.options import choose_board, list_given_options, stored_board_options
from hil.controller.cli.screen import print_message
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.devices.agent_client.client import AgentClient
    from hil.controller.devices.board_choice import BoardChoice
    from hil.controller.devices.ssh.shell import Shell

F = TypeVar("F", bound=Callable[..., Any])


def add_board_place(command: F) -> F:
    """Add the argument ``[ADDR]`` to the options that select a board."""
    return click.argument("addr", default="", metavar="[ADDR|NAME]")(stored_board_options(command))


def choose_place(settings: dict[str, Any]) -> BoardChoice:
    """Return the board selected by the options of :func:`add_board_place`, or else the project file's board.

    Remove their values from a command's settings.
    """
    addr = settings.pop("addr")
    if addr and "board" in list_given_options():
        raise UsageError(f"two boards specified: {addr} and {settings['board']}", hint="specify only one")
    settings["board"] = addr or settings["board"]
    if not settings["board"] and not settings["hw_type"]:
        settings["board"], settings["hw_type"] = read_project_board()
    return choose_board(settings)


def is_over_ssh(choice: BoardChoice) -> bool:
    """Return True if hil reaches a board over SSH."""
    from hil.controller.devices.ssh.address import is_ssh_address

    return is_ssh_address(choice.target)


def open_shell(choice: BoardChoice) -> Shell:
    """Open a shell on the board, as a context manager. Raises UsageError if the board is not reached over SSH."""
    from hil.controller.devices.ssh.connect import open_shell

    if not is_over_ssh(choice):
        raise UsageError(
            f"{choice.name} is not reached over SSH",
            hint="specify USER@HOST, ssh:ALIAS, or a board config with such an address",
        )
    return open_shell(choice.target, choice.config.connection, board=choice.name, base=choice.config.path.parent)


@contextmanager
def connect_agent(choice: BoardChoice) -> Iterator[AgentClient]:
    """Connect to a board's agent without disturbing sessions. Deploy the agent if it is missing."""
    from hil.controller.devices.agent_client.client import AgentClient
    from hil.controller.devices.choosing.board_resolver import open_link

    with (
        closing(open_link(replace(choice, say=print_message))) as link,
        closing(AgentClient(link.target, choice.name)) as client,
    ):
        yield client
