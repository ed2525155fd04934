"""`hil board trust`: which folders' board configs may do more than describe a board."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.options import json_option

if TYPE_CHECKING:
    from hil.boards import BoardConfig


@click.command(epilog="Example: hil board trust board_configs")
@click.argument("folder", default="", metavar="[DIR]")
@click.option("--list", "lists", is_flag=True, help="List the folders that are trusted, and what was altered since.")
@click.option("--remove", default="", metavar="DIR", help="Trust a folder no longer.")
@json_option
def trust(folder: str, lists: bool, remove: str, as_json: bool) -> None:
    """Trust the board configs of a folder as they are now: their addresses, commands, flags and files are used.

    DIR is a folder of configs, or one that has them in board_configs. Without trust a config of the working directory
    may only say what a board is: its type, runtime, devices, labels and simulator. Whoever alters one asks anew. hil's
    own configs, those in the user's own folder and those that are named as files need no trust.
    """
    from hil.controller.cli.screen import print_json
    from hil.errors import UsageError

    if sum(map(bool, (folder, lists, remove))) != 1:
        raise UsageError(
            "name one folder to trust, or one of --list and --remove", hint="hil board trust board_configs"
        )
    if lists:
        rows = _listed()
        if as_json:
            print_json({"schema": 1, "folders": rows})
        for row in () if as_json else rows:
            click.echo(row["folder"])
            for config in row["configs"]:
                click.echo(f"  {config['state']:8} {Path(config['path']).name}")
    elif remove:
        _remove(remove, as_json)
    else:
        configs = _trusted(folder)
        if as_json:
            told = [{"path": str(config.path), "asks": list(config.asks)} for config in configs]
            print_json({"schema": 1, "folder": str(_folder(folder)), "configs": told})
        for config in () if as_json else configs:
            click.echo(f"trusted {config.path}: {', '.join(config.asks) or 'it only says what the board is'}")


def _folder(text: str) -> Path:
    """The folder that is meant, without links: two ways to one are one."""
    path = Path(text).expanduser().resolve()
    inside = path / "board_configs"
    return inside.resolve() if inside.is_dir() else path


def _trusted(text: str) -> list[BoardConfig]:
    from hil import trust as trusting
    from hil.boards import read_board
    from hil.errors import UsageError

    folder = _folder(text)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {text}", hint="name the folder that holds the configs")
    configs = [read_board(path) for path in sorted(folder.glob("*.toml"))]
    if not configs:
        raise UsageError(f"{folder} holds no board configs", hint="they are its files *.toml")
    trusting.trust(folder, configs)
    return configs


def _listed() -> list[dict[str, Any]]:
    from hil.trust import trusted_folders

    return [
        {"folder": folder, "configs": [{"path": path, "state": _state(Path(path))} for path in files]}
        for folder, files in sorted(trusted_folders().items())
    ]


def _state(path: Path) -> str:
    from hil.boards import read_board
    from hil.errors import UsageError
    from hil.trust import state_of

    if not path.exists():
        return "gone"
    try:
        return state_of(read_board(path))
    except UsageError:
        return "altered"


def _remove(text: str, as_json: bool) -> None:
    from hil.controller.cli.screen import print_json
    from hil.errors import UsageError
    from hil.trust import distrust, trusted_folders

    # One that is gone can be named as well.
    folder = next((one for one in (_folder(text), Path(text).expanduser().resolve()) if distrust(one)), None)
    if folder is None:
        known = ", ".join(sorted(trusted_folders()))
        raise UsageError(f"{text} is not trusted", hint=f"trusted are: {known}" if known else "no folder is")
    if as_json:
        print_json({"schema": 1, "removed": str(folder)})
    else:
        click.echo(f"{folder} is trusted no longer")
