"""`hil config`: show the effective settings, and print schemas of config files."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import group
from hil.controller.cli.options import MODEL, json_option
from hil.controller.cli.screen import answer
from hil.controller.cli.usage.candidates import complete_boards, complete_types

if TYPE_CHECKING:
    from hil.controller.records.commands.projects import EffectiveConfig, EffectiveValue

_MAX_WIDTH = 40


@group(epilog="Example: hil config show")
def config() -> None:
    """Show the settings of commands in this directory, and print schemas of config files."""


@config.command(epilog="Example: hil config show net.onnx --board rpi5 --json")
@click.argument("model", required=False, type=MODEL, metavar="[MODEL]")
@click.option(
    "--board",
    default="",
    metavar="ADDR|NAME",
    help="Show the values for this board.",
    shell_complete=complete_boards,
)
@click.option(
    "--runtime-hw-type",
    "hw_type",
    default="",
    metavar="TYPE",
    help="Show the values for this hardware type.",
    shell_complete=complete_types,
)
@click.option("--describe", is_flag=True, help="Also print the meaning of each key.")
@json_option
def show(model: Path | None, board: str, hw_type: str, describe: bool, as_json: bool) -> None:
    """Show each effective value with its source: option, variable, hil.toml, board config or built-in.

    With a MODEL, the tables of hil.toml that match the model apply. Values that need trust are marked.
    """
    from hil.controller.projects.effective import find_effective_config

    found = find_effective_config(Path(), model, board=board, hw_type=hw_type)
    answer(as_json, found, *_format_config(found, describe))


@config.command(epilog="Example: hil config schema --file board > board.schema.json")
@click.option(
    "--file",
    "kind",
    type=click.Choice(["project", "board", "farm"]),
    default="project",
    show_default=True,
    help="Kind of config file: hil.toml, a board config, or farm.toml.",
)
def schema(kind: str) -> None:
    """Print the JSON schema of a config file, for completion and checks in an editor.

    Store the schema in a file, and begin the config file with the line `#:schema ./FILE`.
    """
    from hil.controller.cli.project.config_files import CONFIG_FILES
    from hil.controller.projects.config_schema import make_schema

    click.echo(make_schema(CONFIG_FILES[kind]), nl=False)


def _format_config(found: EffectiveConfig, describe: bool) -> list[str]:
    lines = [f"project file: {found.project or 'none (hil init creates one)'}"]
    if found.models and not found.model:
        lines.append(f"tables of models: {', '.join(found.models)} (hil config show MODEL)")
    rows = [(row, _format_value(row.value)) for row in found.values]
    keys = max(len(row.key) for row, _ in rows)
    values = min(_MAX_WIDTH, max(len(text) for _, text in rows))
    for table, group_rows in itertools.groupby(rows, key=lambda pair: pair[0].table):
        lines.append(f"[{table}]")
        for row, text in group_rows:
            lines.append(f"  {row.key:{keys}}  {text:{values}}  {_format_source(row)}")
            lines += [f"      {row.meaning}"] if describe and row.meaning else []
    return lines


def _format_source(row: EffectiveValue) -> str:
    text = f"hil.toml {row.where}" if row.source == "project" else row.where or row.source
    return text if row.trusted else f"{text} (not trusted: hil board trust DIR)"


def _format_value(value: Any) -> str:
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
