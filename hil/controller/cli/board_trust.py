"""`hil board trust`: which folders' board configs may do more than describe a board."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer
from hil.errors import UsageError

_FLOWS = "flows.toml"


@click.command(epilog="Example: hil board trust board_configs")
@click.argument("folder", default="", metavar="[DIR]")
@click.option("--list", "lists", is_flag=True, help="List the folders that are trusted, and what was altered since.")
@click.option("--remove", default="", metavar="DIR", help="Trust a folder no longer.")
@json_option
def trust(folder: str, lists: bool, remove: str, as_json: bool) -> None:
    """Trust the board configs of a folder as they are now: their addresses, commands, flags and files are used.

    DIR is a folder of configs, or one that has board_configs or flows.toml (whose flags are trusted, too). Without
    trust a config of the working directory may only say what a board is: its type, runtime, devices, labels and
    simulator. An altered file is asked for again. hil's own configs, those in the user's own folder and those that are
    named as files need no trust.
    """

    if sum(map(bool, (folder, lists, remove))) != 1:
        raise UsageError(
            "name one folder to trust, or one of --list and --remove", hint="hil board trust board_configs"
        )
    if lists:
        rows = _listed()
        texts = [
            "\n".join([row["folder"], *(f"  {file['state']:8} {Path(file['path']).name}" for file in row["files"])])
            for row in rows
        ]
        answer(as_json, {"folders": rows}, *texts)
    elif remove:
        _remove(remove, as_json)
    else:
        files = _trusted(folder)
        told: list[dict[str, Any]] = [{"path": str(path), "asks": asks} for path, asks in files.items()]
        lines = [f"trusted {one['path']}: {', '.join(one['asks']) or 'it only says what the board is'}" for one in told]
        answer(as_json, {"folder": str(_folder(folder)), "files": told}, *lines)


def _folder(text: str) -> Path:
    """The folder that is meant, without links: two ways to one are one."""
    return Path(text).expanduser().resolve()


def _trusted(text: str) -> dict[Path, list[str]]:
    """Trust a folder; its files, and what each asks for."""
    from hil.core.config_files import trust as keep

    folder = _folder(text)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {text}", hint="name the folder that holds the configs")
    # In a project's folder other files end in .toml as well.
    project = [*folder.glob("board_configs/*.toml"), *folder.glob(_FLOWS)]
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
    """The digest that a file is trusted by, and what it asks for.

    Raises:
        UsageError: it is neither a board config nor a file of flows.
    """
    from hil.core.boards import read_board, trust_digest
    from hil.core.digest import digest_of

    if path.name == _FLOWS:
        from hil.controller.models.flows import read_flows

        flows = read_flows(path).values()
        return digest_of(path.read_bytes()), [f"compile_flags of {flow.name}" for flow in flows if flow.compile_flags]
    config = read_board(path)
    return trust_digest(config), list(config.asks)


def _listed() -> list[dict[str, Any]]:
    from hil.core.config_files import trusted_folders

    return [
        {"folder": folder, "files": [{"path": path, "state": _state(Path(path))} for path in files]}
        for folder, files in sorted(trusted_folders().items())
    ]


def _state(path: Path) -> str:
    from hil.core.config_files import state_of

    if not path.exists():
        return "gone"
    try:
        return state_of(path, _look(path)[0])
    except UsageError:
        return "altered"


def _remove(text: str, as_json: bool) -> None:
    from hil.core.config_files import distrust, trusted_folders

    folder = _folder(text)
    if not distrust(folder):
        known = ", ".join(sorted(trusted_folders()))
        raise UsageError(f"{text} is not trusted", hint=f"trusted are: {known}" if known else "no folder is")
    answer(as_json, {"removed": str(folder)}, f"{folder} is trusted no longer")
