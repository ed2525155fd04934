"""Read the keys of the table ``[defaults]`` that are not options of a run: board, flow, directories and addresses.

Such a key can send models to another machine, run commands or write files. So each key needs trust separately, and hil
checks the trust of a key only if a command uses the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hil.core.boards import BOARDS_FOLDER, find_board, is_file, list_boards, read_board
from hil.errors import UsageError


@dataclass(frozen=True)
class CommandKey:
    """Description of a key."""

    meaning: str
    default: str  # for people; "" for none
    trust: str  # values that need trust, for people: see :func:`needs_trust`


_TRUSTED_BOARDS = "boards with a config of the project, except simulators"
COMMAND_KEYS: Mapping[str, CommandKey] = {
    "board": CommandKey("Board of commands without --board; the variable HIL_BOARD overrides it.", "", _TRUSTED_BOARDS),
    "runtime_hw_type": CommandKey(
        "Hardware type of commands without --runtime-hw-type and --board.", "`sim`", _TRUSTED_BOARDS
    ),
    "flow": CommandKey("Flow of suites and of pytest.", "`iree`", "a file"),
    "out": CommandKey("Directory for runs.", "`hil-runs`", "a directory outside of the project"),
    "web_url": CommandKey("Address of a hil web server, for hil publish, and for links of hil notify.", "", "yes"),
    "notify_github": CommandKey("Repository on GitHub in which hil notify opens issues: OWNER/REPO.", "", "yes"),
}


def resolve_command_key(path: Path, name: str, value: str) -> str:
    """Return a key's value, with paths relative to the project file.

    A board's name may also be the name of a config in ``board_configs`` next to the file.
    """
    if name == "out" or (name == "flow" and get_flow_file(value)) or (name in _BOARDS and is_file(value)):
        return str(path.parent / value)
    if name in _BOARDS:
        # Imported on use, because most project files select no board.
        from hil.controller.devices.choosing.board_resolver import is_address

        own = path.parent / BOARDS_FOLDER / f"{value}.toml"
        if not is_address(value) and value not in list_boards() and own.is_file():
            return str(own)
    return value


def needs_trust(path: Path, name: str, value: str) -> bool:
    """Return True if a key's resolved value needs trust.

    Needs no trust: a board of hil, a simulator without commands, a flow's name, and a directory inside of the project.
    """
    if name in _BOARDS:
        return _runs_commands(value)
    if name == "flow":
        return bool(get_flow_file(value))
    if name == "out":
        try:
            return not Path(value).resolve().is_relative_to(path.parent.resolve())
        except (OSError, RuntimeError, ValueError):
            return True
    return True


def get_flow_file(flow: str) -> str:
    """Return the file of ``FILE.toml`` or ``FILE.toml:NAME``; "" for a flow's name."""
    file, found, _ = flow.rpartition(".toml:")
    return f"{file}.toml" if found else flow if flow.endswith(".toml") else ""


_BOARDS = ("board", "runtime_hw_type")


def _runs_commands(board: str) -> bool:
    """Return False for a board of hil, and for a simulator without settings that need trust."""
    from hil.controller.devices.choosing.board_resolver import is_without_config

    if is_without_config(board):
        return True
    try:
        return not read_board(find_board(board)).is_harmless
    except UsageError:
        return False  # the command that uses the board reports the error
