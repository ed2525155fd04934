"""Resolve the user's board options to a board and a link.

A package adds a link kind under the entry-point group ``hil.links``. The name of the entry point is the address prefix
without the colon. The value is a function ``(address, config) -> Link``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hil.controller.devices.board_choice import BoardChoice, is_provider_address
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.links.agent import AGENT_KIND
from hil.controller.devices.links.link import Capabilities, Link, LinkKind
from hil.controller.devices.links.package_links import LENT_KIND, connect_by_package
from hil.controller.devices.links.serial_line import SERIAL_KIND
from hil.controller.devices.links.simulator import SIM_KIND
from hil.controller.devices.links.ssh import COMMAND_KIND, SSH_KIND
from hil.controller.devices.ssh.aliases import list_aliases
from hil.controller.storage.paths import locate
from hil.core.board_config import BoardConfig
from hil.core.boards import is_file, list_boards, load_board, read_board
from hil.core.installed import list_entry_points
from hil.core.serial_device import PREFIX, is_same_line
from hil.errors import UsageError


def _is_of_package(address: str) -> bool:
    return any(address.startswith(f"{entry.name}:") for entry in list_entry_points("hil.links"))


def _connect_by_package(choice: BoardChoice) -> Link:
    entry = next(entry for entry in list_entry_points("hil.links") if choice.target.startswith(f"{entry.name}:"))
    return connect_by_package(entry, choice)


# Order matters: the first matching kind opens the board.
KINDS = (
    COMMAND_KIND,
    SIM_KIND,
    SERIAL_KIND,
    LENT_KIND,
    LinkKind("package", _connect_by_package, _is_of_package),
    SSH_KIND,
    AGENT_KIND,
)


def is_address(text: str) -> bool:
    """Return whether a text is an address rather than a board's name or config file."""
    return any(kind.is_address(text) for kind in KINDS)


def is_alias(name: str) -> bool:
    """Return whether a board's name is only a host of the user's ssh config. Board configs take precedence."""
    return not (is_address(name) or is_file(name) or name in list_boards()) and name in list_aliases()


def is_without_config(name: str) -> bool:
    """Return whether a board's name is an address or a host of the user's ssh config, and not a board config."""
    return is_address(name) or is_alias(name)


def _find_kind(choice: BoardChoice) -> LinkKind | None:
    return next((kind for kind in KINDS if kind.is_for(choice)), None)


def read_capabilities(choice: BoardChoice) -> Capabilities:
    """Return the features and requirements of a board, without connecting."""
    return (_find_kind(choice) or AGENT_KIND).capabilities


def check_faults(choice: BoardChoice, faults: Sequence[str]) -> None:
    """Raise UsageError for faults on a board that is not a simulator of hil."""
    kind = _find_kind(choice)
    if faults and not (kind and kind.takes_faults):
        raise UsageError("--fault requires a simulator", hint="remove --fault, or use --runtime-hw-type sim")


def open_link(choice: BoardChoice) -> Link:
    """Open the link to a board, start a simulator, or reuse an open link, depending on the choice.

    Raises UsageError if no link kind takes the address, and BoardError as :func:`open_board`.
    """
    kind = _find_kind(choice)
    name = choice.config.name
    if kind is None and not choice.target:
        raise UsageError(
            f"missing address for board type {name}", hint=f"use --board USER@HOST --runtime-hw-type {name}"
        )
    check_faults(choice, choice.faults)
    if choice.alias_note:
        choice.say(choice.alias_note)
    if choice.connect is not None:
        return Link(AgentEndpoint(choice.target), connect=choice.connect)
    # If no kind matches, AGENT_KIND reports that the address is invalid.
    return (kind or AGENT_KIND).connect(choice)


DEFAULT_HW_TYPE = "sim"
# Environment variable with the default board.
BOARD_VARIABLE = "HIL_BOARD"
# Config for a board with only an address.
GENERIC = "generic"


def choose(
    board: str = "",
    hw_type: str = "",
    *,
    identity: Path | None = None,
    known_hosts: Path | None = None,
    accept_new_host_key: bool = False,
) -> BoardChoice:
    """Return the board for ``--board`` and ``--runtime-hw-type``.

    Args:
        board: A board's name, a host of the ssh config, a config file, or an address (``USER@HOST[:PORT]``,
            ``ssh:ALIAS``, ``unix:PATH``, ``HOST:PORT``, ``farm:SELECTOR``). "" without ``hw_type`` means the value of
            ``HIL_BOARD``.
        hw_type: Hardware type. With an address, the type selects the config (default: ``generic``). Without an address,
            the type selects the simulator (default: ``sim``). For a farm, only boards of this type match. identity,
            known_hosts, accept_new_host_key: SSH settings that override the config.

    Raises:
        UsageError: The board or type does not exist, or they do not match.
    """
    board = board or get_named_board(hw_type)
    of_variable = bool(board) and board == os.environ.get(BOARD_VARIABLE)
    alias = board if board and is_alias(board) else ""
    try:
        # A relative path in an environment variable depends on the current directory. So do not trust it like a path
        # that the user typed.
        typed = not of_variable or Path(board).is_absolute()
        choice = _choose_config(f"ssh:{alias}" if alias else board, hw_type, typed=typed)
        _refuse_ambiguous(board, choice)
    except UsageError as error:
        if of_variable:
            error.add(f"set by the variable {BOARD_VARIABLE}")
        raise
    files = {"identity": identity, "known_hosts": known_hosts}
    given: dict[str, Any] = {key: str(locate(path, Path.cwd())) for key, path in files.items() if path}
    if accept_new_host_key:
        given["accept_new_host_key"] = True
    connection = replace(choice.config.connection, **given)
    return replace(choice, config=replace(choice.config, connection=connection), alias=alias)


def _refuse_ambiguous(board: str, choice: BoardChoice) -> None:
    """Raise UsageError for the name of a board type that is also a host of the ssh config."""
    name = choice.config.name
    if board and _find_kind(choice) is None and not choice.target and board in list_aliases():
        raise UsageError(
            f"ambiguous board {board!r}: a board type without an address, and a host of ~/.ssh/config",
            hint=f"use the type on the host: --board ssh:{board} --runtime-hw-type {name}; "
            f"or only the host: --board ssh:{board}",
        )


def _choose_config(board: str, hw_type: str, *, typed: bool) -> BoardChoice:
    name = _name_config(board, hw_type)
    if name == GENERIC and not hw_type and (found := _find_config_by_line(board)):
        return BoardChoice(load_board(found, others=list_aliases).config, board)
    config = load_board(name, typed=typed or name != board, others=list_aliases).config
    if is_provider_address(board):
        return _choose_farm_board(board, hw_type, config)
    if name != board:
        return BoardChoice(config, board)
    if hw_type and config.hw_type != hw_type:
        raise UsageError(f"board {board} is of type {config.hw_type}, not {hw_type}")
    return BoardChoice(config)


def _name_config(board: str, hw_type: str) -> str:
    """Return the name or file of the config for a board and a hardware type."""
    if not board:
        return hw_type or DEFAULT_HW_TYPE
    if is_provider_address(board):
        return GENERIC
    return hw_type or GENERIC if is_address(board) else board


def _find_config_by_line(address: str) -> str:
    """Return the name of the board config with this serial line, or "" if there is none.

    Raises:
        UsageError: multiple configs have this line.
    """
    if not address.startswith(PREFIX):
        return ""
    found = []
    for name, path in list_boards().items():
        with contextlib.suppress(UsageError):  # an invalid config of another board
            config = read_board(path).config
            if config.mcu is not None and is_same_line(config.connection.address, address):
                found.append(name)
    if len(found) > 1:
        raise UsageError(
            f"several board configs have the address {address}: {', '.join(found)}",
            hint=f"use --board {found[0]}, or add --runtime-hw-type CONFIG",
        )
    return found[0] if found else ""


def get_named_board(hw_type: str) -> str:
    """Return the board from ``HIL_BOARD``, or "" if it is unset or ``hw_type`` is given."""
    return "" if hw_type else os.environ.get(BOARD_VARIABLE, "")


def _choose_farm_board(board: str, hw_type: str, config: BoardConfig) -> BoardChoice:
    """Return the choice for a board of a provider.

    Before the provider lends a board, only the requested type is known.
    """
    prefix, _, selector = board.partition(":")
    selector = selector.strip()
    if hw_type:
        selector = f'({selector}), hw_type="{hw_type}"' if selector else f'hw_type="{hw_type}"'
    address = f"{prefix}:{selector}"
    connection = replace(config.connection, address=address)
    return BoardChoice(replace(config, hw_type=hw_type or prefix, connection=connection), address)
