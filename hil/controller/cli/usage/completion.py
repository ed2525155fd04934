"""`hil completion`: the shell's completion script, and the answers to this script."""

from __future__ import annotations

import contextlib
import io
import os

import click

from hil.controller.cli.commands import make_command
from hil.errors import EXIT_OK, EXIT_USAGE, UsageError

# Environment variable of click. The scripts set it to SHELL_complete.
VARIABLE = "_HIL_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@make_command(epilog='Example: eval "$(hil completion bash)"')
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for a SHELL.

    The script completes commands, options, files, boards, runtimes, references, flows, faults, criteria and run IDs.
    """
    print_completion(context.find_root().command, f"{shell}_source")


def print_completion(cli: click.Command, instruction: str) -> int:
    """Print a completion script (``bash_source``), or the candidates for a word (``bash_complete``).

    For candidates, the environment has the command line in ``COMP_LINE``, or in ``COMP_WORDS`` and ``COMP_CWORD``.

    Raises:
        UsageError: the instruction or the environment is invalid.
    """
    from hil.controller.cli.usage.shells import COMPLETERS, check_words

    shell, _, action = instruction.partition("_")
    if shell not in COMPLETERS or action not in ("source", "complete"):
        expected = ", ".join(f"{name}_complete" for name in SHELLS)
        raise UsageError(f"invalid {VARIABLE} {instruction!r}", hint=f"expected one of {expected}")
    completer = COMPLETERS[shell](cli, {}, "hil", VARIABLE)
    if action == "source":
        click.echo(completer.source(), nl=False)
        return EXIT_OK
    check_words(os.environ, shell)
    # The shell shows everything on stderr in the user's command line.
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            text = completer.complete()
        except Exception:
            return EXIT_USAGE
    # A file name may have bytes that are not UTF-8.
    click.echo(text.encode(errors="backslashreplace"))
    return EXIT_OK
