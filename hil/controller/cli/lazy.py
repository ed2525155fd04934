"""Command group that loads commands only when they are called, so that help is fast."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

from hil.controller.cli.commands import CliGroup
from hil.errors import UsageError, did_you_mean


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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command name like click. The error for an unknown name suggests a similar name."""
        if args[0] not in self._table and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. {did_you_mean(args[0], self._table).capitalize()}".strip())
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's lines without loading the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._table.items()])
