"""Which board: what the user said about it, and the connection that this comes to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hil.controller.devices.links.factory import is_address
from hil.controller.devices.links.provider import is_lent
from hil.core.board_config import BoardConfig
from hil.core.boards import load_board
from hil.core.runtimes import RUNTIMES, resolve
from hil.errors import UsageError

DEFAULT_HW_TYPE = "sim"
# What names a board where nobody names one.
BOARD_VARIABLE = "HIL_BOARD"
# A board of which nothing but the address is known.
GENERIC = "generic"


@dataclass(frozen=True)
class BoardChoice:
    """What the user said about the board: a config, and an address where that is another than the config's."""

    config: BoardConfig
    address: str = ""

    @property
    def name(self) -> str:
        """How results and errors call the board."""
        return self.address or self.config.name


def choose(
    board: str = "",
    hw_type: str = "",
    *,
    identity: Path | None = None,
    known_hosts: Path | None = None,
    accept_new_host_key: bool = False,
) -> BoardChoice:
    """The board for ``--board`` and ``--runtime-hw-type``.

    Args:
        board: a board's name, a config file, or an address (``USER@HOST[:PORT]``, ``ssh:ALIAS``, ``unix:PATH``,
            ``HOST:PORT``, ``farm:SELECTOR``); "" without ``hw_type`` is what ``HIL_BOARD`` names.
        hw_type: hardware type: the config to use for an address, or the simulator to start; without it an address is
            a ``generic`` board, and no address at all is ``sim``. Of a farm: the boards of that type only.
        identity, known_hosts, accept_new_host_key: for SSH, in place of the config's own.

    Raises:
        UsageError: there is no such board or type, or the two do not fit.
    """
    board = board or named_board(hw_type)
    of_variable = bool(board) and board == os.environ.get(BOARD_VARIABLE)
    try:
        # A relative path in a variable is another file in every folder: nobody typed that of this one.
        choice = _chosen(board, hw_type, typed=not of_variable or Path(board).is_absolute())
    except UsageError as error:
        if of_variable:
            error.add(f"the variable {BOARD_VARIABLE} names it")
        raise
    given: dict[str, Any] = {
        "identity": _absolute(identity),
        "known_hosts": _absolute(known_hosts),
        "accept_new_host_key": accept_new_host_key,
    }
    connection = replace(choice.config.connection, **{key: value for key, value in given.items() if value})
    return replace(choice, config=replace(choice.config, connection=connection))


def _chosen(board: str, hw_type: str, *, typed: bool) -> BoardChoice:
    if not board:
        return BoardChoice(load_board(hw_type or DEFAULT_HW_TYPE))
    if is_lent(board):
        return _of_farm(board, hw_type)
    if is_address(board):
        return BoardChoice(load_board(hw_type or GENERIC), board)
    choice = BoardChoice(load_board(board, typed=typed))
    if hw_type and choice.config.hw_type != hw_type:
        raise UsageError(f"board {board} is of type {choice.config.hw_type}, not {hw_type}")
    return choice


def named_board(hw_type: str) -> str:
    """The board that ``HIL_BOARD`` names, where no kind of hardware was named instead; "" is none."""
    return "" if hw_type else os.environ.get(BOARD_VARIABLE, "")


def pinned(choice: BoardChoice, board: str) -> BoardChoice:
    """The choice once it is known which board it came to: another connection is to be to the same one.

    Args:
        choice: as it was made.
        board: the board's name.
    """
    if not is_lent(choice.config.connection.address):
        return choice
    address = f'farm:name="{board}"'
    connection = replace(choice.config.connection, address=address)
    return replace(choice, config=replace(choice.config, connection=connection), address=address)


def _of_farm(board: str, hw_type: str) -> BoardChoice:
    """A board of the farm: all that is known of it before it is had is its type, where that was named."""
    selector = board.partition(":")[2].strip()
    if hw_type:
        selector = f'({selector}), hw_type="{hw_type}"' if selector else f'hw_type="{hw_type}"'
    config = load_board(GENERIC)
    address = f"farm:{selector}"
    connection = replace(config.connection, address=address)
    return BoardChoice(replace(config, hw_type=hw_type or "farm", connection=connection), address)


def _absolute(path: Path | None) -> str:
    try:
        return str(path.expanduser().absolute()) if path else ""
    except RuntimeError as error:
        raise UsageError(f"{path} lies in the home of a user that there is not") from error


def knows_target(config: BoardConfig, runtime: str) -> bool:
    """Whether a program can be compiled before the board was seen; ``runtime`` "" is the config's own."""
    if is_lent(config.connection.address):
        return False
    info = RUNTIMES.get(runtime or config.runtime)
    if info is None or not info.target:
        return True
    # A simulator's CPU is this machine's.
    here = info.targets_host and config.is_simulator
    return here or bool(config.compile_flags.get(info.compiler))


def with_target(config: BoardConfig, runtime: str, machine: Mapping[str, Any]) -> tuple[BoardConfig, str]:
    """A config that names what to compile for: its own flags, or those for the machine that the board shows.

    Args:
        config: the board's.
        runtime: the one that is going to be used; "" is the config's own.
        machine: what the board said of itself.

    Returns:
        The config, and what was chosen in words; "" where the config says it itself.
    """
    if knows_target(config, runtime):
        return config, ""
    info = RUNTIMES[runtime or config.runtime]
    target = resolve(info.target)(machine)
    flags = {**config.compile_flags, info.compiler: target.flags}
    return replace(config, compile_flags=flags), target.description
