"""`hil board`: list, show and check boards."""

from __future__ import annotations

from typing import Any

import click

from hil.controller.cli.options import board_options, chosen_board, json_option
from hil.errors import EXIT_BOARD, EXIT_OK


@click.group(epilog="Example: hil board check --runtime-hw-type sim")
def board() -> None:
    """List, show and check boards."""


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

    config = load_board(name)
    if as_json:
        print_json({"schema": 1, "board": asdict(config)})
    else:
        click.echo(config.path.read_text().rstrip())


@board.command(epilog="Example: hil board check --board unix:/run/hil/agent.sock")
@board_options
@json_option
def check(as_json: bool, **settings: Any) -> int:
    """Connect to a board and say what it is and what it can run."""
    from hil.controller.board import Board
    from hil.controller.cli.screen import print_json

    choice = chosen_board(settings)
    with Board(choice, purpose="hil board check", wait_s=5.0) as connected:
        info = connected.info
        fit = connected.clock_fit()
    wanted = choice.config.runtime
    runtimes = info.get("runtimes", [])
    usable = any(one["name"] == wanted and not one.get("error") for one in runtimes)
    code = EXIT_OK if usable else EXIT_BOARD
    if as_json:
        clock = {"offset_ns": fit.offset_ns, "error_ns": fit.error_ns}
        print_json({"schema": 1, "board": choice.name, "ok": usable, "info": info, "clock": clock, "exit_code": code})
        return code
    machine = info["machine"]
    memory = int(info.get("memory_limit_bytes") or machine.get("memory_bytes", 0))
    rows = [
        ("board", f"{info['name']} ({info['board_id']})"),
        ("agent", f"hil {info['agent_version']}, protocol {info['protocol']}"),
        ("machine", f"{machine.get('arch')} {machine.get('cpu_model', '')}, {machine.get('cores')} cores"),
        (
            "system",
            f"{machine.get('system')} {machine.get('kernel')}, {machine.get('libc')}, Python {machine.get('python')}",
        ),
        ("memory", f"{memory / 2**20:.0f} MiB for a program"),
        ("clock", f"known to within {fit.error_ns / 1e3:.0f} us"),
    ]
    for key, value in rows:
        click.echo(f"{key:10} {value}")
    for one in runtimes:
        state = (
            f"does not work: {one['error']}" if one.get("error") else f"{one['version']} on {', '.join(one['devices'])}"
        )
        click.echo(f"{'runtime':10} {one['name']} {state}")
    if not usable:
        click.echo(f"FAIL: the board's runtime {wanted} cannot be used; install it on the board", err=True)
    return code
