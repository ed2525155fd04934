"""`hil init`: create a project."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import FILE, MODEL, json_option
from hil.controller.cli.screen import answer
from hil.controller.cli.usage.candidates import complete_boards, complete_folder
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.projects.scaffold import CiKind

_CI_KINDS: tuple[CiKind, ...] = ("github", "gitlab", "none")
# Number of choices that a question lists. The user can type other values.
_MAX_SHOWN = 12


@make_command(epilog="Example: hil init my-models --model net.onnx --board sim --yes")
@click.argument("folder", default=".", type=FILE, metavar="[DIR]", shell_complete=complete_folder)
@click.option(
    "--model",
    type=MODEL,
    metavar="FILE",
    help="Model to test (default: in DIR, ONNX first, or an example).",
)
@click.option(
    "--board",
    default="",
    metavar="ADDR|NAME",
    help="Board of the project (default: sim).",
    shell_complete=complete_boards,
)
@click.option("--ci", type=click.Choice(_CI_KINDS), help="CI file to create (default: github).")
@click.option(
    "--package", default="", metavar="SPEC", help="Package that CI installs with pip (default: this version of hil)."
)
@click.option("-y", "--yes", is_flag=True, help="Use the defaults without questions.")
@json_option
def init(
    folder: Path, model: Path | None, board: str, ci: CiKind | None, package: str, yes: bool, as_json: bool
) -> None:
    """Create a project in DIR: hil.toml, a first test, the settings of pytest, and a CI file.

    On a terminal, hil asks for the model, the board and the CI system, unless options specify them. hil finds models
    (.onnx, .mlir, .tflite) in DIR, boards with a config, and hosts in ~/.ssh/config. A model from outside of DIR is
    copied. Existing files are not changed; if DIR already has a hil.toml, the command fails.
    """
    from hil.controller.projects.discovery import DEFAULT_BOARD
    from hil.controller.projects.scaffold import (
        ProjectRequest,
        check_board,
        check_folder,
        choose_default_model,
        create_project,
    )
    from hil.controller.storage.screen.prompts import can_ask

    check_folder(folder)
    if board:
        check_board(folder, board)
    asks = not (yes or as_json) and can_ask()
    if model is None:
        model = _ask_model(folder) if asks else choose_default_model(folder)
    if not board:
        board = _ask_board(folder) if asks else DEFAULT_BOARD
    if ci is None:
        ci = _ask_ci() if asks else "github"
    made = create_project(ProjectRequest(folder, model, board, ci, package))
    words = {"created": "created", "kept": "exists, not changed:"}
    lines = [f"{words[one.state]} {one.path}" for one in made.files]
    lines += [f"note: {one}" for one in made.notes]
    answer(as_json, made, *lines, "next:", *(f"  {one}" for one in made.next))


def _ask_model(folder: Path) -> Path | None:
    """Ask for the model. Return None for the example."""
    from hil.controller.projects.discovery import find_models
    from hil.controller.projects.scaffold import EXAMPLE, check_model

    found = [str(path) for path in find_models(folder)][:_MAX_SHOWN]
    while True:
        value = _choose("Model (number or path)", [*found, f"example: {EXAMPLE}"], [*found, ""])
        if not value:
            return None
        # Listed models are relative to the project; the user types other paths relative to the working directory.
        model = folder / value if value in found else Path(value)
        try:
            check_model(model)
        except UsageError as error:
            click.echo(f"hil: {error}", err=True)
            continue
        return model


def _ask_ci() -> CiKind:
    kind: CiKind = click.prompt("CI system", type=click.Choice(_CI_KINDS), default=_CI_KINDS[0])
    return kind


def _ask_board(folder: Path) -> str:
    from hil.controller.projects.discovery import find_boards
    from hil.controller.projects.scaffold import check_board

    found = find_boards(folder)[:_MAX_SHOWN]
    width = max(len(one.name) for one in found)
    lines = [f"{one.name:{width}}  {one.description}" for one in found]
    while True:
        board = _choose("Board (number, name or address)", lines, [one.name for one in found])
        try:
            check_board(folder, board)
        except UsageError as error:
            click.echo(f"hil: {error}", err=True)
            continue
        return board


def _choose(title: str, lines: Sequence[str], values: Sequence[str]) -> str:
    """Ask for one of the values by number, or for any other text. The first value is the default."""
    for number, line in enumerate(lines, 1):
        click.echo(f"  {number:2}  {line}")
    text: str = click.prompt(title, default="1").strip()
    if text.isdecimal() and 0 < int(text) <= len(values):
        return values[int(text) - 1]
    return text
