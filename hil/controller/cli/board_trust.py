"""`hil board trust`: which folders' board configs may do more than describe a board."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.commands import command
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer
from hil.errors import UsageError

_FLOWS = "flows.toml"
_PROJECT = "hil.toml"


@command(epilog="Example: hil board trust board_configs")
@click.argument("folder", default="", metavar="[DIR]")
@click.option("--list", "lists", is_flag=True, help="List the folders that are trusted, and what was altered since.")
@click.option("--remove", default="", metavar="DIR", help="Trust a folder no longer.")
@json_option
def trust(folder: str, lists: bool, remove: str, as_json: bool) -> None:
    """Trust the board configs of a folder as they are now: their addresses, commands, flags and files are used.

    DIR is a folder of configs, or one that has board_configs, flows.toml or hil.toml (whose flags and Python functions
    are trusted, too). Without trust a config of the working directory may only say what a board is: its type, runtime,
    devices, labels and simulator. An altered file is asked for again. hil's own configs, those in the user's own folder
    and those that are named as files need no trust.
    """
    from hil.core.config_files import distrust, trusted_folders

    if sum(map(bool, (folder, lists, remove))) != 1:
        raise UsageError(
            "name one folder to trust, or one of --list and --remove", hint="hil board trust board_configs"
        )
    # Without links: two ways to one folder are one.
    where = Path(folder or remove).expanduser().resolve()
    if lists:
        _list(as_json)
    elif remove:
        known = ", ".join(sorted(trusted_folders()))
        if not distrust(where):
            raise UsageError(f"{remove} is not trusted", hint=f"trusted are: {known}" if known else "no folder is")
        answer(as_json, {"removed": str(where)}, f"{where} is trusted no longer")
    elif not where.is_dir():
        raise UsageError(f"there is no folder {folder}", hint="name the folder that holds the configs")
    else:
        asks = _trusted(where)
        files = [{"path": str(path), "asks": asked} for path, asked in asks.items()]
        nothing = "it only says what the board is"
        lines = (f"trusted {path}: {', '.join(asked) or nothing}" for path, asked in asks.items())
        answer(as_json, {"folder": str(where), "files": files}, *lines)


def _trusted(folder: Path) -> dict[Path, list[str]]:
    """Trust a folder; its files, and what each asks for."""
    from hil.core.config_files import trust as keep

    # In a project's folder other files end in .toml as well.
    project = [*folder.glob("board_configs/*.toml"), *folder.glob(_FLOWS), *folder.glob(_PROJECT)]
    files = {path: _look(path) for path in sorted(project or folder.glob("*.toml"))}
    if not files:
        raise UsageError(
            f"{folder} holds no board configs", hint="they are files *.toml, in it or in its board_configs"
        )
    if unread := [path for path, (digest, _) in files.items() if not digest]:
        raise UsageError(f"{unread[0]} names a program that cannot be read", hint="see its [power] and [runtime] file")
    keep(folder, {path: digest for path, (digest, _) in files.items()})
    return {path: asks for path, (_, asks) in files.items()}


def _look(path: Path) -> tuple[str, list[str]]:
    """The digest by which a board config, a file of flows or a project file is trusted, and what it asks for."""
    from hil.core.boards import read_board, trust_digest
    from hil.core.digest import digest_of

    if path.name == _FLOWS:
        from hil.controller.models.flows import read_flows

        flows = read_flows(path).values()
        return digest_of(path.read_bytes()), [f"compile_flags of {flow.name}" for flow in flows if flow.compile_flags]
    if path.name == _PROJECT:
        from hil.controller.pipeline.project import read_project

        project = read_project(path)
        # A file that asks for nothing has no digest of its own.
        return project.digest if project.asks else digest_of(path.read_bytes()), list(project.asks)
    config = read_board(path)
    return trust_digest(config), list(config.asks)


def _list(as_json: bool) -> None:
    """Print the trusted folders, and which of their files were altered since."""
    from hil.core.config_files import trusted_folders

    rows: list[dict[str, Any]] = []
    lines = []
    for folder, paths in sorted(trusted_folders().items()):
        files = [{"path": path, "state": _state(Path(path))} for path in paths]
        rows.append({"folder": folder, "files": files})
        lines += [folder, *(f"  {file['state']:8} {Path(file['path']).name}" for file in files)]
    answer(as_json, {"folders": rows}, *lines)


def _state(path: Path) -> str:
    from hil.core.config_files import state_of

    if not path.exists():
        return "gone"
    try:
        return state_of(path, _look(path)[0])
    except UsageError:
        return "altered"
