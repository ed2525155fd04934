"""Parts of a board's stack, such as the driver, and the table ``[stack]`` of board configs.

::

    [stack]
    driver = ["cat", "/sys/module/npu/version"]      # command on the board
    firmware = { command = ["./firmware.sh", "3"] }  # command on this machine
    carrier = "rev B"                                # a text
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.core.config_values import parse_words
from hil.errors import UsageError

# Parts of every stack. hil reports a part that nothing supplies as unknown.
PARTS = (
    *("kernel", "firmware", "driver", "runtime", "microcode", "governor", "ddr clock", "accelerator clock"),
    *("pci", "usb"),
)
MAX_PARTS = 100
MAX_VERSION = 2000
COMMAND_SECONDS = 10.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,59}")
_EXAMPLE = 'use a text, a command on the board ["program"], or { command = ["program"] } for this machine'


@dataclass(frozen=True)
class StackValue:
    """Version of a part: a text, or the command that prints it. Exactly one attribute is set."""

    text: str = ""
    board: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def parse_stack(table: Mapping[str, Any], where: Path) -> dict[str, StackValue]:
    """Parse the ``[stack]`` table.

    Args:
        where: the config file. Relative program paths start at its directory.

    Raises:
        UsageError: a name or a value is invalid.
    """
    if len(table) > MAX_PARTS:
        raise UsageError(f"{where}: [stack] has {len(table)} parts, at most {MAX_PARTS} are allowed")
    return {name: _parse_value(name, value, where) for name, value in table.items()}


def _parse_value(name: str, value: Any, where: Path) -> StackValue:
    place = f"{where}: [stack] {name}"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: [stack] invalid name {name[:50]!r}", hint="use letters, digits and spaces")
    if isinstance(value, str) and value.strip() and value.isprintable() and len(value) <= MAX_VERSION:
        return StackValue(text=value.strip())
    if isinstance(value, list):
        return StackValue(board=parse_words(value, place))
    if isinstance(value, dict) and value.keys() == {"command"} and isinstance(value["command"], list):
        program, *arguments = parse_words(value["command"], place)
        path = str(where.absolute().parent / program) if "/" in program else program
        return StackValue(command=(path, *arguments))
    raise UsageError(f"{place} is invalid", hint=_EXAMPLE)
