"""Collect the stack of a board: the parts that the agent reads, and those of the config's table ``[stack]``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hil.controller.devices.power_control.power import is_silent, run_command
from hil.controller.records.stack import StackPart
from hil.core.board_config import Command
from hil.core.stack_config import COMMAND_SECONDS, MAX_PARTS, MAX_VERSION, PARTS, StackValue
from hil.core.text import escape_controls
from hil.errors import BoardError, HilError

if TYPE_CHECKING:
    from hil.controller.devices.ssh.shell import Shell

_GOVERNOR = " governor"


@dataclass(frozen=True)
class StackReader:
    """Reader of a board's stack.

    Args:
        values: table ``[stack]`` of the config that the user chose, with commands.
        public: table ``[stack]`` of the config from a farm. Only its texts are used.
        shell: shell on the board, or None. Without a shell, only simulators run commands of the board, on this machine.
    """

    board: str
    values: Mapping[str, StackValue]
    public: Mapping[str, StackValue]
    shell: Shell | None
    is_simulator: bool

    def read(self, info: Mapping[str, Any]) -> list[StackPart]:
        """Return all parts, standard parts first. An unknown part has no version.

        Args:
            info: description of the board, with the keys of Describe.

        Raises BoardError if the board does not respond.
        """
        found = {one.name: one for one in list_described_parts(info)}
        found |= {name: _make_text_part(name, one.text) for name, one in self.public.items() if one.text}
        found |= {name: self._read_value(name, one) for name, one in self.values.items()}
        unknown = {name: _make_unknown_part(name, "not reported by the board") for name in PARTS}
        return list({**unknown, **found}.values())

    def _read_value(self, name: str, value: StackValue) -> StackPart:
        if value.text:
            return _make_text_part(name, value.text)
        command = value.board or value.command
        try:
            output = self._run(name, value)
        except HilError as error:
            if isinstance(error, BoardError) and is_silent(error):
                raise
            return _make_unknown_part(name, error.message)
        version = _clean(output)
        if not version:
            return _make_unknown_part(name, f"{shlex.join(command)} printed nothing")
        return StackPart(name=name, version=version, source="command", detail=shlex.join(command))

    def _run(self, name: str, value: StackValue) -> str:
        place = f"[stack] {name}"
        if value.command or (self.is_simulator and self.shell is None):
            return run_command(
                Command(value.command or value.board), COMMAND_SECONDS, f"command of {place}", place, self.board
            )
        if self.shell is None:
            raise BoardError("commands on the board need a connection over SSH", board=self.board)
        return self.shell.run(list(value.board), timeout=COMMAND_SECONDS).text


def list_described_parts(info: Mapping[str, Any]) -> Iterator[StackPart]:
    """Yield the parts in a board's description. A board is not trusted: hil limits the texts."""
    machine = info.get("machine", {})
    kernel = " ".join(filter(None, (str(machine.get("system", "")), str(machine.get("kernel", "")))))
    runtimes = [
        f"{one['name']} {one.get('version', '')}".rstrip() for one in info.get("runtimes", ()) if not one.get("error")
    ]
    governors = {
        one["text"]: "" for one in info.get("readings", ()) if one["name"].endswith(_GOVERNOR) and "text" in one
    }
    known = (("kernel", kernel), ("runtime", ", ".join(runtimes)), ("governor", ", ".join(governors)))
    for name, text in known:
        if version := _clean(text):
            yield StackPart(name=name, version=version, source="agent")
    for one in info.get("stack", ())[:MAX_PARTS]:
        name, version = _clean(str(one.get("name", "")))[:60], _clean(str(one.get("version", "")))
        if name and version:
            yield StackPart(name=name, version=version, source="agent", detail=_clean(str(one.get("source", ""))))


def _make_text_part(name: str, text: str) -> StackPart:
    return StackPart(name=name, version=text, source="config")


def _make_unknown_part(name: str, why: str) -> StackPart:
    return StackPart(name=name, version="", source="unknown", detail=why)


def _clean(text: str) -> str:
    """Return a text in one line, without control characters."""
    return escape_controls(" ".join(text[: 4 * MAX_VERSION].split()))[:MAX_VERSION]
