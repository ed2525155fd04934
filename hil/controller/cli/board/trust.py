"""`hil board trust`: directories with board configs that are fully trusted."""

from __future__ import annotations

from pathlib import Path

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer
from hil.controller.cli.usage.candidates import complete_folder
from hil.controller.storage.paths import is_folder
from hil.core.files import read_file, suggest_path
from hil.errors import UsageError, did_you_mean

_FLOWS = "flows.toml"
_PROJECT = "hil.toml"


@make_command(epilog="Example: hil board trust board_configs")
@click.argument("folder", default="", metavar="[DIR]", shell_complete=complete_folder)
@click.option("--list", "lists", is_flag=True, help="List trusted directories and modified files.")
@click.option("--remove", default="", metavar="DIR", help="Stop trusting a directory.", shell_complete=complete_folder)
@json_option
def trust(folder: str, lists: bool, remove: str, as_json: bool) -> None:
    """Trust the current board configs of a directory: hil uses their addresses, commands, flags and files.

    DIR contains configs, board_configs, flows.toml or hil.toml. The flags, Python functions, boards and other settings
    of these files that need trust are then trusted too. Without trust, a config of the working directory may only
    describe a board: type, runtime, devices, labels and simulator. Modified files require trust again. hil's configs,
    configs of installed packages, configs in the user's config directory, and configs specified as files need no trust.
    """
    from hil.controller.records.commands.boards import RemovedTrust, TrustedFile, TrustedFolder
    from hil.core.config_files import read_trusted, remove_trust

    if sum(map(bool, (folder, lists, remove))) != 1:
        raise UsageError("exactly one of DIR, --list and --remove is required", hint="hil board trust board_configs")
    # Resolve links, so that a directory is listed once.
    where = Path(folder or remove).expanduser().resolve()
    if lists:
        _list(as_json)
    elif remove:
        known = ", ".join(sorted(read_trusted()))
        if not remove_trust(where):
            raise UsageError(
                f"{remove} is not trusted",
                hint=f"{did_you_mean(str(where), read_trusted())}trusted directories: {known}"
                if known
                else "no directory is trusted",
            )
        answer(as_json, RemovedTrust(removed=str(where)), f"{where} is no longer trusted")
    elif not is_folder(where):
        raise UsageError(
            f"directory {folder} not found",
            hint=f"{suggest_path(Path(folder or ''))}specify the directory that contains the configs",
        )
    else:
        asks = _trust_folder(where)
        files = [TrustedFile(path=str(path), asks=asked) for path, asked in asks.items()]
        nothing = "no settings that need trust"
        lines = (f"trusted {path}: {', '.join(asked) or nothing}" for path, asked in asks.items())
        answer(as_json, TrustedFolder(folder=str(where), files=files), *lines)


def _trust_folder(folder: Path) -> dict[Path, list[str]]:
    """Trust a directory. Return the files with their trusted settings."""
    from hil.core.config_files import trust as keep

    # A project directory may contain unrelated .toml files.
    project = [*folder.glob("board_configs/*.toml"), *folder.glob(_FLOWS), *folder.glob(_PROJECT)]
    files = {path: _read_trust(path) for path in sorted(project or folder.glob("*.toml"))}
    if not files:
        raise UsageError(
            f"no board configs in {folder}", hint="expected *.toml files in the directory or in board_configs"
        )
    if unread := [path for path, (digest, _) in files.items() if not digest]:
        raise UsageError(
            f"cannot read a program used by {unread[0]}", hint="check [power] and [runtime] file in the board's config"
        )
    keep(folder, {path: digest for path, (digest, _) in files.items()})
    return {path: asks for path, (_, asks) in files.items()}


def _read_trust(path: Path) -> tuple[str, list[str]]:
    """Return the digest of a board config, flows file or project file for trust, and the settings that need trust."""
    from hil.core.boards import read_board
    from hil.core.digest import digest_of

    if path.name == _FLOWS:
        from hil.controller.models.flows.flow_registry import read_flows

        flows = read_flows(path).values()
        return digest_of(read_file(path)), [f"compile_flags of {flow.name}" for flow in flows if flow.compile_flags]
    if path.name == _PROJECT:
        from hil.controller.pipeline.settings.project import read_project

        project = read_project(path)
        # project.digest is valid only if the file has settings that need trust.
        return project.digest if project.asks else digest_of(read_file(path)), list(project.asks)
    board = read_board(path)
    return board.digest, list(board.config.asks)


def _list(as_json: bool) -> None:
    """Print the trusted directories and the state of their files."""
    from hil.controller.records.commands.boards import FileTrust, FolderTrust, TrustList
    from hil.core.config_files import read_trusted

    rows = []
    lines = []
    for folder, paths in sorted(read_trusted().items()):
        files = [FileTrust(path=path, state=_state(Path(path))) for path in paths]
        rows.append(FolderTrust(folder=folder, files=files))
        lines += [folder, *(f"  {file.state:8} {Path(file.path).name}" for file in files)]
    answer(as_json, TrustList(folders=rows), *lines)


def _state(path: Path) -> str:
    from hil.core.config_files import state_of

    if not path.exists():
        return "gone"
    try:
        return state_of(path, _read_trust(path)[0])
    except UsageError:
        return "altered"
