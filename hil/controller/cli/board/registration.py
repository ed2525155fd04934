"""`hil board add`, `remove` and `rename`: boards in the user's config directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.board.options import print_checks
from hil.controller.cli.commands import make_command
from hil.controller.cli.options import FILE, json_option
from hil.controller.cli.screen import answer, confirm, print_message
from hil.controller.cli.usage.candidates import (
    complete_addresses,
    complete_faults,
    complete_own_boards,
    complete_runtimes,
    complete_types,
)
from hil.errors import EXIT_BOARD, EXIT_OK, UsageError

if TYPE_CHECKING:
    from hil.core.board_config import BoardConfig

_FINGERPRINT = re.compile(r"(SHA256:[A-Za-z0-9+/]{43})=?")
_yes = click.option("--yes", is_flag=True, help="Do not ask for confirmation. Required without a terminal.")


def _parse_fingerprint(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value:
        return ""
    if not (found := _FINGERPRINT.fullmatch(value)):
        raise UsageError(
            f"invalid --fingerprint {value!r}: expected SHA256: and 43 characters",
            hint="run on the board: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub",
        )
    return found[1]


@make_command(
    epilog="""\b
Examples:
  hil board add kitchen root@192.168.7.2
  hil board add small sim:memory_limit=64MiB"""
)
@click.argument("name", metavar="NAME")
@click.argument("address", metavar="ADDRESS", shell_complete=complete_addresses)
@click.option(
    "--runtime-hw-type",
    "hw_type",
    default="",
    metavar="TYPE",
    help="Board type with the settings of the board (default: generic).",
    shell_complete=complete_types,
)
@click.option(
    "--runtime", default="", metavar="NAME", help="Default runtime of the board.", shell_complete=complete_runtimes
)
@click.option("--description", default="", metavar="TEXT", help="Description for lists.")
@click.option("--identity", type=FILE, metavar="FILE", help="Private key for SSH.")
@click.option("--known-hosts", type=FILE, metavar="FILE", help="Pinned host keys (default: ~/.ssh/known_hosts).")
@click.option("--fingerprint", default="", metavar="SHA256:...", callback=_parse_fingerprint, help="Pin only this key.")
@click.option("--yes", "--accept-new-host-key", "yes", is_flag=True, help="Pin the host key without confirmation.")
@click.option("--token-file", type=FILE, metavar="FILE", help="Token of an agent with an address.")
@click.option("--ca", type=FILE, metavar="FILE", help="Certificate authority of the agent; enables TLS.")
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="Fault of the simulator. Repeatable.",
    shell_complete=complete_faults,
)
@click.option("--no-check", is_flag=True, help="Add the board without connecting to it.")
@json_option
def add(
    name: str,
    address: str,
    hw_type: str,
    runtime: str,
    description: str,
    fingerprint: str,
    yes: bool,
    faults: tuple[str, ...],
    no_check: bool,
    as_json: bool,
    **files: Path | None,
) -> int:
    """Add a board: check it, pin its host key, and write its config to the user's config directory.

    ADDRESS is USER@HOST, a host of ~/.ssh/config, unix:PATH, HOST:PORT, farm:SELECTOR, or a simulator: sim, sim-f16,
    ... Like ssh, hil shows the fingerprint of an unknown host key and asks for confirmation. If a check fails, hil does
    not add the board. Exit code: 0 if the board is added, 4 if a check fails.
    """
    from hil.controller.devices.board_choice import BoardChoice
    from hil.controller.devices.choosing.board_files import NewBoard, add_board_file, make_board_config
    from hil.controller.devices.health import FAIL
    from hil.controller.records.commands.boards import AddedBoard
    from hil.controller.storage.paths import locate
    from hil.controller.workloads.board_checks import check_board

    if fingerprint and yes:
        raise UsageError("--fingerprint and --yes are mutually exclusive", hint="use only one of them")
    connection: dict[str, Any] = {key: str(locate(path, Path.cwd())) for key, path in files.items() if path}
    config = make_board_config(NewBoard(name, address, hw_type, runtime, description, connection, faults))
    if no_check:
        if fingerprint or yes:
            raise UsageError("the host key can only be pinned with a check", hint="remove --no-check")
        checks = []
    else:
        with _write_temporary(config) as checked:
            pinned = replace(checked.connection, accept_new_host_key=yes, host_key=fingerprint)
            choice = BoardChoice(replace(checked, connection=pinned))
            checks = print_checks(check_board(choice, say=print_message), quiet=as_json)
    failed = [one.name for one in checks if one.state == FAIL]
    path = None if failed else add_board_file(config)
    if failed and not as_json:
        print_message(f"FAIL: {', '.join(failed)}: {name} is not added (--no-check adds it without a check)")
    added = AddedBoard(
        board=name,
        address=config.connection.address,
        path=str(path or ""),
        ok=not failed,
        checks=checks,
        exit_code=EXIT_BOARD if failed else EXIT_OK,
    )
    lines = [f"added {name}: {path}", f"use the board with: hil run MODEL --board {name}"]
    return answer(as_json, added, *(lines if path else ()))


@contextmanager
def _write_temporary(config: BoardConfig) -> Iterator[BoardConfig]:
    """Write the config of a new board to a temporary directory, because a simulator reads its file."""
    from hil.core.board_parser import read_config
    from hil.core.files import write_atomic
    from hil.core.scratch import make_temporary_folder

    with make_temporary_folder("hil-board-") as folder:
        path = Path(folder) / config.path.name
        write_atomic(path, config.text)
        yield read_config(path)


@make_command(epilog="Example: hil board remove kitchen --yes")
@click.argument("name", shell_complete=complete_own_boards)
@_yes
@json_option
def remove(name: str, yes: bool, as_json: bool) -> None:
    """Delete a board's config from the user's config directory. The board and stored results stay unchanged."""
    from hil.controller.devices.choosing.board_files import find_board_file, remove_board_file
    from hil.controller.records.commands.boards import RemovedBoard

    confirm(f"delete {find_board_file(name)}?", yes=yes)
    path = remove_board_file(name)
    answer(as_json, RemovedBoard(board=name, path=str(path)), f"removed {name}: {path}")


@make_command(epilog="Example: hil board rename kitchen garage")
@click.argument("old", shell_complete=complete_own_boards)
@click.argument("new")
@json_option
def rename(old: str, new: str, as_json: bool) -> None:
    """Rename a board in the user's config directory. Stored results keep the old name."""
    from hil.controller.devices.choosing.board_files import rename_board_file
    from hil.controller.records.commands.boards import RenamedBoard

    path = rename_board_file(old, new)
    answer(as_json, RenamedBoard(board=new, old=old, path=str(path)), f"renamed {old} to {new}: {path}")
