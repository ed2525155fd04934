"""A board that was chosen, and what programs for it are compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hil.controller.devices.links.link import BoardRequest, is_lent
from hil.core.board_config import BoardConfig
from hil.core.runtimes import RUNTIMES, resolve


@dataclass(frozen=True)
class BoardChoice:
    """What the user said about the board: a config, and an address where that is another than the config's."""

    config: BoardConfig
    address: str = ""

    @property
    def name(self) -> str:
        """How results and errors call the board."""
        return self.address or self.config.name

    def request(self, **options: Any) -> BoardRequest:
        """The request to open this board."""
        return BoardRequest(self.address, self.config, **options)


def pinned(choice: BoardChoice, board: str) -> BoardChoice:
    """The choice once it is known to which board, by name, it came: another connection is to be to the same one."""
    if not is_lent(choice.config.connection.address):
        return choice
    address = f'farm:name="{board}"'
    connection = replace(choice.config.connection, address=address)
    return replace(choice, config=replace(choice.config, connection=connection), address=address)


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
    """A config that names what to compile for, and in words what was chosen; "" where the config's own flags hold."""
    if knows_target(config, runtime):
        return config, ""
    info = RUNTIMES[runtime or config.runtime]
    target = resolve(info.target)(machine)
    flags = {**config.compile_flags, info.compiler: target.flags}
    return replace(config, compile_flags=flags), target.description
