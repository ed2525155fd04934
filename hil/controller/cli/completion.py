"""`hil completion`: the shell's completion script."""

from __future__ import annotations

import click

from hil.controller.cli.commands import make_command


@make_command(epilog='Example: eval "$(hil completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a SHELL."""
    from click.shell_completion import get_completion_class

    from hil.controller.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "hil", "_HIL_COMPLETE").source())
