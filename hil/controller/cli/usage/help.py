"""`hil help`: the help of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import make_command
from hil.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _complete_command(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a command after the names of its groups."""
    try:
        context = _find_command(ctx.find_root(), ctx.params.get("words") or ())
    except UsageError:
        return []
    group = context.command
    found = group.shell_complete(context, incomplete) if isinstance(group, click.Group) else []
    return [item for item in found if not item.value.startswith("-")]


@make_command(epilog="Example: hil help board check")
@click.argument("words", nargs=-1, metavar="[COMMAND [SUBCOMMAND]]", shell_complete=_complete_command)
@click.pass_context
def help(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, as COMMAND --help does. Without a command, show the help of hil."""
    found = _find_command(context.find_root(), words)
    click.echo(found.get_help())


def _find_command(root: click.Context, words: tuple[str, ...]) -> click.Context:
    """Return the context of a command, as the command line creates it. Raises UsageError for an unknown command."""
    context = root
    for word in words:
        group, path = context.command, context.command_path
        if not isinstance(group, click.Group):
            raise UsageError(f"`{path}` has no subcommands, got {word!r}", hint=f"hil help {path.partition(' ')[2]}")
        known = group.list_commands(context)
        command = group.get_command(context, word)
        if command is None:
            hint = f"{did_you_mean(word, known)}commands of {path}: {', '.join(known)}"
            raise UsageError(f"unknown command `{path} {word}`", hint=hint)
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    return context
