"""Command group that loads commands only when they are called, so that help is fast."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import CliGroup
from hil.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LazyGroup(CliGroup):
    """Group with a table of commands."""

    def __init__(self, *args: Any, commands: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._table = commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the table's order."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load and return the command. Raises UsageError if a package that the command requires is missing."""
        if cmd_name not in self._table:
            return None
        try:
            module = importlib.import_module(self._table[cmd_name][0])
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if name in ("", "hil"):
                raise
            hint = "`pip check` lists missing packages; reinstall hil in this environment"
            raise UsageError(f"hil {cmd_name} requires {name}, which is not installed", hint=hint) from error
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Complete a command's name without loading the commands."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=line) for name, (_, line) in self._table.items() if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's lines without loading the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._table.items()])
