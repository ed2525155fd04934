"""`hil board`: the boards there are, and care for one."""

from __future__ import annotations

from typing import Any

import click

from hil.controller.cli.board_check import check, info, ping
from hil.controller.cli.board_hands import clean, deploy, logs, reset, reset_fence, shell
from hil.controller.cli.options import json_option


@click.group(epilog="Example: hil board check root@192.168.7.2")
def board() -> None:
    """List, check, set up and reset boards."""


@board.command("list", epilog="Example: hil board list --json")
@json_option
def list_boards(as_json: bool) -> None:
    """List the boards that a name finds."""
    from hil.boards import known_boards, load_board
    from hil.controller.cli.screen import print_json
    from hil.errors import UsageError

    rows: list[dict[str, Any]] = []
    for name, path in sorted(known_boards().items()):
        try:
            config = load_board(name)
            rows.append({"name": name, "hw_type": config.hw_type, "description": config.description, "path": str(path)})
        except UsageError as error:
            rows.append({"name": name, "hw_type": "?", "description": error.message, "path": str(path)})
    if as_json:
        print_json({"schema": 1, "boards": rows})
        return
    for row in rows:
        click.echo(f"{row['name']:16} {row['hw_type']:12} {row['description']}")


@board.command(epilog="Example: hil board show sim-f16")
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show a board's config."""
    from dataclasses import asdict

    from hil.boards import load_board
    from hil.controller.cli.screen import print_json
    from hil.controller.links import is_address
    from hil.errors import UsageError

    if is_address(name):
        hint = f"hil board info {name} asks the board itself; hil board show generic is the config of any address"
        raise UsageError(f"{name} is an address: there is no config of that name", hint=hint)
    config = load_board(name)
    if as_json:
        print_json({"schema": 1, "board": asdict(config)})
    else:
        click.echo(config.path.read_text().rstrip())


for command in (check, ping, info, logs, shell, reset, deploy, clean, reset_fence):
    board.add_command(command)
