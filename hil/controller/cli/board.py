"""`hil board`: the boards there are, and care for one."""

from __future__ import annotations

from typing import Any

import click

from hil.controller.cli.board_check import check, info, ping
from hil.controller.cli.board_maintenance import clean, deploy, logs, reset, reset_fence, shell
from hil.controller.cli.board_trust import trust
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer
from hil.errors import UsageError


@click.group(epilog="Example: hil board check root@192.168.7.2")
def board() -> None:
    """List, check, set up and reset boards."""


@board.command("list", epilog="Example: hil board list --json")
@json_option
def list_boards(as_json: bool) -> None:
    """List the boards that a name finds, and whether they may be used (hil board trust)."""
    from hil.core.boards import is_trusted_place, known_boards, read_board, trust_digest
    from hil.core.config_files import state_of

    rows: list[dict[str, Any]] = []
    lines = []
    for name, path in sorted(known_boards().items()):
        row: dict[str, Any] = {"name": name, "hw_type": "?", "path": str(path), "trusted": False}
        try:
            config = read_board(path)
            trusted = not config.asks or is_trusted_place(path) or state_of(path, trust_digest(config)) == "trusted"
            row |= {"hw_type": config.hw_type, "description": config.description, "trusted": trusted}
        except UsageError as error:
            row["description"] = error.message
        rows.append(row)
        mark = "" if row["trusted"] or row["hw_type"] == "?" else f" (not trusted: hil board show {name})"
        lines.append(f"{name:16} {row['hw_type']:12} {row['description']}{mark}")
    answer(as_json, {"boards": rows}, *lines)


@board.command(epilog="Example: hil board show sim-f16")
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show a board's config, trusted or not."""
    from dataclasses import asdict

    from hil.controller.devices.board_resolver import is_address
    from hil.core.boards import find_board, read_board

    if is_address(name):
        hint = f"hil board info {name} asks the board itself; hil board show generic is the config of any address"
        raise UsageError(f"{name} is an address: there is no config of that name", hint=hint)
    config = read_board(find_board(name))
    shown = {name: value for name, value in asdict(config).items() if name != "text"}
    answer(as_json, {"board": shown}, config.text.rstrip())


for command in (check, ping, info, logs, shell, reset, deploy, clean, reset_fence, trust):
    board.add_command(command)
