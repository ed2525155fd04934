"""Collect the stack of a board from the agent and the table [stack]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hil.controller.devices.measuring import board_stack
from hil.controller.devices.measuring.board_stack import StackReader
from hil.controller.devices.ssh.shell import Done
from hil.controller.records.stack import StackPart
from hil.core.board_config import BoardConfig
from hil.core.board_parser import parse_board
from hil.core.config_files import list_trusted_settings
from hil.core.stack_config import PARTS, StackValue
from hil.errors import BoardError, BoardUnreachable, UsageError

INFO: dict[str, Any] = {
    "machine": {"system": "Linux", "kernel": "6.1"},
    "runtimes": [{"name": "iree", "version": "3.1"}, {"name": "x", "error": "missing"}],
    "readings": [{"name": "cpu0 governor", "text": "performance"}, {"name": "cpu0 frequency", "value": 1.0}],
    "stack": [{"name": "driver", "version": "npu 1.0", "source": "/sys/module"}],
}


class FakeShell:
    """Shell whose command prints a text or fails."""

    def __init__(self, answer: bytes | Exception) -> None:
        self._answer = answer

    def run(self, argv: list[str], timeout: float) -> Done:
        if isinstance(self._answer, Exception):
            raise self._answer
        return Done(tuple(argv), 0, self._answer, "")


def read(
    values: dict[str, StackValue],
    *,
    public: dict[str, StackValue] | None = None,
    shell: Any = None,
    is_simulator: bool = False,
    info: dict[str, Any] = INFO,
) -> dict[str, StackPart]:
    parts = StackReader("b", values, public or {}, shell, is_simulator).read(info)
    assert [one.name for one in parts[: len(PARTS)]] == list(PARTS)
    return {one.name: one for one in parts}


def parsed(text: str) -> BoardConfig:
    return parse_board(f"[stack]\n{text}\n", Path("/lab/b.toml"))


def test_agent_supplies_parts_and_others_are_unknown() -> None:
    found = read({})
    assert {name: one.version for name, one in found.items() if one.version} == {
        "kernel": "Linux 6.1",
        "driver": "npu 1.0",
        "runtime": "iree 3.1",
        "governor": "performance",
    }
    assert (found["usb"].source, found["driver"].detail) == ("unknown", "/sys/module")


def test_config_overrides_agent() -> None:
    found = read({"driver": StackValue(text="2.0"), "carrier": StackValue(text="B")})
    assert (found["driver"].version, found["driver"].source, found["carrier"].version) == ("2.0", "config", "B")


def test_board_command_runs_over_ssh() -> None:
    found = read({"driver": StackValue(board=("modinfo",))}, shell=FakeShell(b" 5.0\x1b\n\n"))
    assert (found["driver"].version, found["driver"].source) == ("5.0\\x1b", "command")


def test_failed_command_makes_part_unknown() -> None:
    found = read({"driver": StackValue(board=("modinfo",))}, shell=FakeShell(BoardError("exit code 1")))
    assert (found["driver"].version, found["driver"].detail) == ("", "exit code 1")
    assert "SSH" in read({"driver": StackValue(board=("modinfo",))})["driver"].detail
    assert "printed nothing" in read({"driver": StackValue(command=("true",))})["driver"].detail
    assert "exit code 3" in read({"d": StackValue(command=("sh", "-c", "exit 3"))})["d"].detail
    assert "cannot start" in read({"d": StackValue(command=("/nowhere/tool",))})["d"].detail


def test_lost_board_is_an_error() -> None:
    with pytest.raises(BoardUnreachable):
        read({"driver": StackValue(board=("modinfo",))}, shell=FakeShell(BoardUnreachable("no response")))


def test_command_has_time_limit_and_limited_output(monkeypatch: pytest.MonkeyPatch) -> None:
    printing = StackValue(command=(sys.executable, "-c", "print('x' * 100_000)"))
    assert len(read({"d": printing})["d"].version) == 2000
    monkeypatch.setattr(board_stack, "COMMAND_SECONDS", 0.2)
    assert "timed out" in read({"d": StackValue(command=("sleep", "60"))})["d"].detail


def test_simulator_runs_board_command_on_this_machine() -> None:
    assert read({"d": StackValue(board=("echo", "7"))}, is_simulator=True)["d"].version == "7"


def test_farm_config_supplies_only_texts() -> None:
    public = {"driver": StackValue(text="3"), "firmware": StackValue(command=("false",))}
    found = read({}, public=public)
    assert (found["driver"].version, found["firmware"].detail) == ("3", "not reported by the board")


def test_hostile_description_is_limited() -> None:
    parts = [{"name": f"p{number}\x1b", "version": "v" * 10_000} for number in range(1000)]
    found = read({}, info={"stack": [*parts, {"name": "x"}]})
    assert len(found) == 100 + len(PARTS)
    assert all(len(one.version) <= 2000 for one in found.values())


def test_stack_table_is_parsed() -> None:
    found = parsed('driver = ["cat", "v"]\nfirmware = { command = ["./fw.sh", "3"] }\ncarrier = "rev B"').stack
    assert found == {
        "driver": StackValue(board=("cat", "v")),
        "firmware": StackValue(command=("/lab/fw.sh", "3")),
        "carrier": StackValue(text="rev B"),
    }


@pytest.mark.parametrize(
    "text",
    ["driver = 3", "driver = []", 'driver = ""', 'driver = { board = "x" }', '"a/b" = "1"', "driver = { command = 3 }"],
)
def test_invalid_stack_table_is_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"\[stack\]"):
        parsed(text)


def test_only_commands_need_trust() -> None:
    assert list_trusted_settings({"stack": {"driver": "1.0", "fw": ["cat"]}}) == ["[stack] fw"]
