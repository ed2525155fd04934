"""Base classes of hil's commands and command groups.

If an option with a single value is repeated, click uses the last value. These classes raise an error instead.
"""

from __future__ import annotations

import contextlib
import inspect
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hil.controller.cli.help_sections import write_options
from hil.controller.storage.sources.origin import note_typed
from hil.core.text import hide_passwords
from hil.errors import UsageError, did_you_mean

# Key for the project file in a command's context, if its run options apply to the command.
PROJECT = "hil.project"
# Key for the project file that sets defaults of ProjectOptions, and for the keys of the file that the command uses.
_DEFAULTS, _USED, _RESUMES = "hil.project-defaults", "hil.project-keys", "hil.resumes"


class RunOption(click.Option):
    """Option of a run with a default that the project file may set."""


class ProjectOption(click.Option):
    """Option with a default from a key of :data:`hil.controller.pipeline.settings.command_keys.COMMAND_KEYS`.

    Args:
        key: key of ``[defaults]`` in the project file; "" for an option that the file does not set.
    """

    def __init__(self, *args: Any, key: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.key = key

    def get_default(self, ctx: click.Context, call: bool = True) -> Any:
        """Return the project file's value, or else the option's default."""
        if self.key and (value := use_project_key(ctx, self.key)):
            return (value,) if self.multiple else value
        return super().get_default(ctx, call)


def use_project_key(ctx: click.Context, key: str) -> str:
    """Return a key of ``[defaults]`` for commands, or "" if the project file does not set it.

    Raises:
        UsageError: the value needs trust that the user has not given.
    """
    project = ctx.meta.get(_DEFAULTS)
    if project is None or (_is_resuming(ctx) and key != "out"):
        return ""
    value: str = project.use(key)
    _note_used(ctx, **{key: value})
    return value


def use_project_board(ctx: click.Context) -> tuple[str, str]:
    """Return the board and the hardware type of the project file, "" for a missing key.

    Raises:
        UsageError: the board is unknown, or needs trust that the user has not given.
    """
    project = ctx.meta.get(_DEFAULTS)
    if project is None or _is_resuming(ctx):
        return "", ""
    board, hw_type = project.use_board()
    _note_used(ctx, board=board, runtime_hw_type=hw_type)
    return board, hw_type


def read_project_board() -> tuple[str, str]:
    """Return the board and the hardware type of the project file, for a command without a :class:`ProjectOption`.

    Raises:
        UsageError: the file is invalid, or the board is unknown or needs trust that the user has not given.
    """
    from hil.controller.pipeline.settings.project import find_project, read_project

    path = find_project(Path())
    found = read_project(path).use_board() if path else ("", "")
    if any(found):
        names = [name for name, value in zip(("board", "runtime_hw_type"), found, strict=True) if value]
        click.echo(f"hil: {path}: {', '.join(names)}", err=True)
    return found


def read_project_runs() -> Path | None:
    """Return the directory for runs of the project file, or None. Raises UsageError if it needs trust."""
    from hil.controller.pipeline.settings.project import find_project, read_project

    path = find_project(Path())
    out = read_project(path).use("out") if path else ""
    return Path(out) if out else None


def _note_used(ctx: click.Context, **values: str) -> None:
    ctx.meta.setdefault(_USED, {}).update({name: value for name, value in values.items() if value})


def _is_resuming(ctx: click.Context) -> bool:
    """Return True if the command continues stored work: then only the place of this work comes from the file."""
    return bool(ctx.meta.get(_RESUMES))


class CliCommand(click.Command):
    """Command that rejects repeated single-value options, and shows N and X as placeholders for numbers."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _set_placeholders(self.params)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError if a single-value option is repeated."""
        if ctx.resilient_parsing:
            with _without_callbacks(self.params):
                return super().parse_args(ctx, args)
        _check_repeats(self, ctx, args)
        words = ["hil", *ctx.command_path.split()[1:], *args]
        # Records contain the command, and other users can read them.
        note_typed(shlex.join(hide_passwords(word) for word in words if word != "--json"))
        if not set(args) & set(ctx.help_option_names):
            ctx.meta[_RESUMES] = "--resume" in args
            _use_project(self, ctx)
        with _add_context(ctx):
            rest = super().parse_args(ctx, args)
        if _DEFAULTS in ctx.meta:
            _show_project(self, ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        _write_examples(self.epilog, formatter)


def _write_examples(epilog: str | None, formatter: click.HelpFormatter) -> None:
    """Write the examples without line breaks, so that users can copy them."""
    lines = inspect.cleandoc(epilog or "").replace("\b\n", "").splitlines()
    formatter.write_paragraph()
    formatter.write("".join(f"  {line}".rstrip() + "\n" for line in lines))


def _set_placeholders(params: Sequence[click.Parameter]) -> None:
    """Set the placeholders of numbers in the help, N for whole numbers and X for others, instead of INTEGER RANGE."""
    for one in params:
        if isinstance(one, click.Option) and one.metavar is None:
            if isinstance(one.type, click.types.IntParamType):
                one.metavar = "N"
            elif isinstance(one.type, click.types.FloatParamType):
                one.metavar = "X"


@contextlib.contextmanager
def _without_callbacks(params: Sequence[click.Parameter]) -> Iterator[None]:
    """Parse without the callbacks of parameters: shell completion must not read URLs or run Python files."""
    callbacks = [one.callback for one in params]
    for one in params:
        one.callback = None
    try:
        yield
    finally:
        for one, callback in zip(params, callbacks, strict=True):
            one.callback = callback


@contextlib.contextmanager
def _add_context(ctx: click.Context) -> Iterator[None]:
    """Add the command to errors of its command line, for the hint."""
    try:
        yield
    except click.UsageError as error:
        error.ctx = error.ctx or ctx
        raise


class CliGroup(click.Group):
    """Group of ``CliCommand`` objects."""

    command_class = CliCommand

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _set_placeholders(self.params)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Raises UsageError if a single-value option is repeated."""
        _check_repeats(self, ctx, args)
        with _add_context(ctx):
            return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        _write_examples(self.epilog, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command name like click. The error for an unknown name suggests a similar name."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            hint = f"{did_you_mean(args[0], known)}{ctx.command_path} --help lists the commands"
            raise UsageError(f"unknown command `{ctx.command_path} {args[0]}`", hint=hint)
        return super().resolve_command(ctx, args)


def make_command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., Any]], CliCommand]:
    """Return a decorator that creates a command."""
    return click.command(name, cls=CliCommand, **settings)


def group(cls: type[CliGroup] = CliGroup, **settings: Any) -> Callable[[Callable[..., Any]], CliGroup]:
    """Return a decorator that creates a group of commands."""
    return click.group(cls=cls, **settings)


def _use_project(command: click.Command, ctx: click.Context) -> None:
    """Set defaults from the project file, if it exists and sets options of the command."""
    options = {str(one.name): one for one in command.params if isinstance(one, RunOption)}
    if not options and not any(isinstance(one, ProjectOption) for one in command.params):
        return
    from hil.controller.pipeline.settings.project import find_project, load_project, read_project

    path = find_project(Path())
    if path is None:
        return
    if not options or _is_resuming(ctx):
        ctx.meta[_DEFAULTS] = read_project(path)
        return
    ctx.meta[_DEFAULTS] = ctx.meta[PROJECT] = project = load_project(Path())
    assert project is not None
    used = {name: value for name, value in project.defaults.items() if name in options}
    ctx.default_map = {
        name: (value,) if options[name].multiple and not isinstance(value, tuple) else value
        for name, value in used.items()
    }


def _show_project(command: click.Command, ctx: click.Context) -> None:
    """Print the project settings in effect. Model settings are included if they match the command's files."""
    from hil.controller.pipeline.settings.model_settings import matches

    project, used = ctx.meta[_DEFAULTS], list(ctx.meta.get(_USED, ()))
    if PROJECT not in ctx.meta:
        if used:
            click.echo(f"hil: {project.path}: {', '.join(used)}", err=True)
        return
    words: list[str] = []
    for one in command.params:
        if isinstance(one, click.Argument) and (value := ctx.params.get(str(one.name))):
            words += map(str, value if isinstance(value, tuple) else (value,))
    files = [Path(word) for word in words]
    # Models in a directory, suite or stored run are not known yet.
    are_known = bool(files) and all(map(Path.is_file, files))
    patterns = [one for one in project.models if not are_known or any(matches(one, file) for file in files)]
    names = [*used, *(ctx.default_map or ()), *(f'models."{pattern}"' for pattern in patterns)]
    if names:
        click.echo(f"hil: {project.path}: {', '.join(names)}", err=True)


def _check_repeats(of: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    if ctx.resilient_parsing:
        return
    with _add_context(ctx):
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
