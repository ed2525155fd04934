"""Which board, what it is opened for, and what programs for it are compiled for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hil.controller.devices.board_client import BoardClient
from hil.core.board_config import BoardConfig
from hil.core.installed import points
from hil.core.named import resolve
from hil.core.runtimes import RUNTIMES
from hil.core.text import TextSink

PROVIDERS = "hil.board_providers"


@dataclass(frozen=True)
class BoardChoice:
    """Which board, and what it is opened for."""

    config: BoardConfig
    address: str = ""  # what ``--board`` gave; "" leaves it to the config
    faults: tuple[str, ...] = ()
    runtime: str = ""  # the runtime that is going to be used; "" is the config's
    purpose: str = ""  # told to others who wait for the board
    wait_s: float = 60.0  # how long to wait while somebody else has it
    say: TextSink = lambda text: None
    without_agent: str = ""  # why the board is served by command; "" where its config does not ask for that
    # makes the client, for errors of that name, where a link to the target is open; None: one is opened.
    connect: Callable[[str], BoardClient] | None = None

    @property
    def name(self) -> str:
        """How results and errors call the board."""
        return self.address or self.config.name

    @property
    def target(self) -> str:
        """The address that a link leads to; "" where neither the user nor the config names one."""
        return self.address or self.config.connection.address


def is_lent(address: str) -> bool:
    """Whether an address is a selector of boards that somebody lends: which one it comes to shows when it is opened."""
    prefix, colon, _ = address.partition(":")
    return bool(colon) and any(point.name == prefix for point in points(PROVIDERS))


def pinned(choice: BoardChoice, board: str) -> BoardChoice:
    """The choice once it is known to which board, by name, it came: another connection is to be to the same one."""
    # Only the farm's selectors are known to name a board so.
    if not choice.config.connection.address.startswith("farm:"):
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
