"""Base classes of hil's commands and command groups.

If an option with a single value is repeated, click uses the last value. These classes raise an error instead.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from hil.controller.cli.help_sections import write_options
from hil.controller.storage.origin import note_typed
from hil.core.text import hide_passwords
from hil.errors import UsageError

# Key for the project file in a command's context.
PROJECT = "hil.project"


class RunOption(click.Option):
    """Option of a run with a default that the project file may set."""


class CliCommand(click.Command):
    """Command that rejects repeated single-value options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError if a single-value option is repeated."""
        _check_repeats(self, ctx, args)
        if not ctx.resilient_parsing:
            words = ["hil", *ctx.command_path.split()[1:], *args]
            # Records contain the command, and other users can read them.
            note_typed(shlex.join(hide_passwords(word) for word in words if word != "--json"))
            if not set(args) & {*ctx.help_option_names, "--resume"}:
                _use_project(self, ctx)
        rest = super().parse_args(ctx, args)
        if PROJECT in ctx.meta:
            _show_project(self, ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        write_options(self.get_params(ctx), ctx, formatter)


class CliGroup(click.Group):
    """Group of ``CliCommand`` objects."""

    command_class = CliCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError if a single-value option is repeated."""
        _check_repeats(self, ctx, args)
        return super().parse_args(ctx, args)


def make_command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], CliCommand]:
    """Return a decorator that creates a command."""
    return click.command(name, cls=CliCommand, **settings)


def group(cls: type[CliGroup] = CliGroup, **settings: Any) -> Callable[[Callable[..., Any]], CliGroup]:
    """Return a decorator that creates a group of commands."""
    return click.group(cls=cls, **settings)


def _use_project(command: click.Command, ctx: click.Context) -> None:
    """Set defaults from the project file, if it exists and the command has run options."""
    options = {str(one.name): one for one in command.params if isinstance(one, RunOption)}
    if not options:
        return
    from hil.controller.pipeline.settings.project import find_project, load_project

    if find_project(Path()) is None:
        return
    project = load_project(Path())
    assert project is not None
    ctx.meta[PROJECT] = project
    used = {name: value for name, value in project.defaults.items() if name in options}
    ctx.default_map = {
        name: (value,) if options[name].multiple and not isinstance(value, tuple) else value
        for name, value in used.items()
    }


def _show_project(command: click.Command, ctx: click.Context) -> None:
    """Print the project settings in effect. Model settings are included if they match the command's files."""
    from hil.controller.pipeline.settings.model_settings import matches

    project = ctx.meta[PROJECT]
    words: list[str] = []
    for one in command.params:
        if isinstance(one, click.Argument) and (value := ctx.params.get(str(one.name))):
            words += map(str, value if isinstance(value, tuple) else (value,))
    files = [Path(word) for word in words]
    # Models in a directory, suite or stored run are not known yet.
    are_known = bool(files) and all(map(Path.is_file, files))
    patterns = [one for one in project.models if not are_known or any(matches(one, file) for file in files)]
    names = [*(ctx.default_map or ()), *(f'models."{pattern}"' for pattern in patterns)]
    # With an automatic history, the command itself reports the added entries at the end.
    if names or not project.history.auto:
        click.echo(f"hil: {project.path}: {', '.join(names) or 'no settings for this command'}", err=True)


def _check_repeats(of: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    if ctx.resilient_parsing:
        return
    *_, order = of.make_parser(ctx).parse_args(args=list(args))
    given: dict[str | None, list[click.Option]] = {}
    for one in order:
        if isinstance(one, click.Option) and not (one.multiple or one.count):
            given.setdefault(one.name, []).append(one)
    for same in given.values():
        names = list(dict.fromkeys(one.opts[0] for one in same))
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} are mutually exclusive", hint="use only one of them")
        is_switch = same[0].is_flag and not same[0].secondary_opts
        if len(same) > 1 and not is_switch:
            either = "/".join((*same[0].opts[:1], *same[0].secondary_opts[:1]))
            raise UsageError(
                f"{either} is specified {len(same)} times, but accepts a single value", hint="specify it once"
            )
