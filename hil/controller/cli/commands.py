"""The classes of all of hil's commands and groups of commands.

Click takes the last of several values where an option has one: a command of these refuses the others.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from hil.controller.storage.origin import note_typed
from hil.errors import UsageError

# Where a command's context has the project file.
PROJECT = "hil.project"


class RunOption(click.Option):
    """An option of a run, whose default the project file may set."""


class Command(click.Command):
    """A command whose options that take one value are given once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError: an option that has one value is given several."""
        _check_repeats(self, ctx, args)
        if not ctx.resilient_parsing:
            words = [*ctx.command_path.split()[1:], *args]
            note_typed(shlex.join(["hil", *(word for word in words if word != "--json")]))
            if not set(args) & {*ctx.help_option_names, "--resume"}:
                _use_project(self, ctx)
        rest = super().parse_args(ctx, args)
        if PROJECT in ctx.meta:
            _show_project(self, ctx)
        return rest


class Group(click.Group):
    """A group of such commands."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError: an option that has one value is given several."""
        _check_repeats(self, ctx, args)
        return super().parse_args(ctx, args)


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], Command]:
    """Make a command of a function."""
    return click.command(name, cls=Command, **settings)


def group(cls: type[Group] = Group, **settings: Any) -> Callable[[Callable[..., Any]], Group]:
    """Make a group of commands of a function."""
    return click.group(cls=cls, **settings)


def _use_project(command: click.Command, ctx: click.Context) -> None:
    """Take defaults from the project file, if there is one and the command has options of a run."""
    options = {str(one.name): one for one in command.params if isinstance(one, RunOption)}
    if not options:
        return
    from hil.controller.pipeline.project import find_project, load_project

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
    """Say which of the project file's settings are in force: of its models, those that match the command's files."""
    from hil.controller.pipeline.model_settings import matches

    project = ctx.meta[PROJECT]
    words: list[str] = []
    for one in command.params:
        if isinstance(one, click.Argument) and (value := ctx.params.get(str(one.name))):
            words += map(str, value if isinstance(value, tuple) else (value,))
    files = [Path(word) for word in words]
    # The models of a folder, a suite or a stored run are not known yet.
    are_known = bool(files) and all(map(Path.is_file, files))
    patterns = [one for one in project.models if not are_known or any(matches(one, file) for file in files)]
    names = [*(ctx.default_map or ()), *(f'models."{pattern}"' for pattern in patterns)]
    click.echo(f"hil: {project.path}: {', '.join(names) or 'nothing for this command'}", err=True)


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
            raise UsageError(f"{' and '.join(names)} exclude each other", hint="give one of them")
        is_switch = same[0].is_flag and not same[0].secondary_opts
        if len(same) > 1 and not is_switch:
            either = "/".join((*same[0].opts[:1], *same[0].secondary_opts[:1]))
            raise UsageError(f"{either} is given {len(same)} times, and has one value", hint="leave all but one out")
