"""The [power] table of a board config: what resets a board and switches its power.

Each action (``reset``, ``off``, ``on``, ``cycle``) is one of three, and none goes through a shell::

    [power]
    reset = ["usbrelay", "BOARD_1=1"]                            # a program and its arguments
    cycle = "labgrid-client -p rpi5 power cycle"                 # one line, split as labgrid splits it
    off = { url = "http://pdu.lab/outlet/3/off" }                # HTTP (USER:PASSWORD@ too); also method, headers, body
    boot_s = 60                                                  # seconds until the board answers again

The keys of labgrid's ExternalPowerDriver (``cmd_on``, ``cmd_off``, ``cmd_cycle``, ``delay``) are taken as they are.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hil.errors import UsageError

ACTIONS = ("reset", "off", "on", "cycle")
# Longer nobody waits for a board.
_DAY_S = 86400.0


@dataclass(frozen=True)
class Command:
    """A program to run on this machine, without a shell."""

    argv: tuple[str, ...]


@dataclass(frozen=True)
class Http:
    """A request to send: to a switched socket, a power distribution unit."""

    url: str
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""


@dataclass(frozen=True)
class Power:
    """The table.

    Attributes:
        hooks: action -> what does it.
        delay: seconds between off and on, where nothing does a cycle.
        boot_s: most seconds that the board takes to answer again.
        timeout_s: most seconds that a hook may take.
    """

    hooks: Mapping[str, Command | Http] = field(default_factory=dict)
    delay: float = 2.0
    boot_s: float = 120.0
    timeout_s: float = 60.0

    def can(self, action: str) -> bool:
        """Whether there is a hook for the action; a cycle may be made of off and on."""
        return action in self.hooks or (action == "cycle" and {"off", "on"} <= self.hooks.keys())


def parse_power(table: Mapping[str, Any], where: Path) -> Power:
    """The table as read from TOML.

    Args:
        table: the table.
        where: its file. A program that is named by a relative path lies beside it, and never in the folder that hil
            happens to be called in.

    Raises:
        UsageError: it has another key or type than these.
    """
    hooks: dict[str, Command | Http] = {}
    seconds: dict[str, float] = {}
    for key, value in table.items():
        action = key.removeprefix("cmd_")
        if key in ("delay", "boot_s", "timeout_s"):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _DAY_S:
                raise UsageError(f"{where}: [power] {key} must be a number of seconds, a day of them at most")
            seconds[key] = float(value)
        elif action in ACTIONS and action not in hooks:
            hooks[action] = _hook(value, f"{where}: [power] {key}", where.absolute().parent)
        elif action in ACTIONS:
            raise UsageError(
                f"{where}: [power] has {action!r} twice", hint=f"leave out one of {action} and cmd_{action}"
            )
        else:
            takes = ", ".join((*ACTIONS, *Power.__dataclass_fields__))
            raise UsageError(f"{where}: [power] has no {key!r}", hint=f"it takes {takes.replace('hooks, ', '')}")
    return Power(hooks, **seconds)


def _hook(value: Any, where: str, folder: Path) -> Command | Http:
    if isinstance(value, dict):
        return _http(value, where)
    try:
        argv = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UsageError(f"{where} cannot be split into words: {error}") from error
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise UsageError(f"{where} must be a command (a list of texts, or one line) or a table with a url")
    if any("\0" in word for word in argv):
        raise UsageError(f"{where} holds a character that no argument can")
    program = str(folder / argv[0]) if "/" in argv[0] else argv[0]
    return Command((program, *argv[1:]))


def _http(value: dict[str, Any], where: str) -> Http:
    wrong = value.keys() - Http.__dataclass_fields__.keys()
    headers = value.get("headers", {})
    if wrong or not isinstance(headers, dict):
        raise UsageError(
            f"{where} has no {', '.join(sorted(wrong)) or 'such headers'}", hint="it takes url, method, headers, body"
        )
    if not all(
        isinstance(text, str) for text in (*headers.values(), *(value[key] for key in value.keys() - {"headers"}))
    ):
        raise UsageError(f"{where}: url, method, headers and body are texts")
    if not str(value.get("url", "")).startswith(("http://", "https://")):
        raise UsageError(f"{where}: url must begin with http:// or https://")
    return Http(**value)
