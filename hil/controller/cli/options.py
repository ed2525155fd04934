"""What several verbs share: options, the conversion of their values, the board and the workshop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hil.controller.cli.commands import PROJECT, RunOption
from hil.controller.pipeline.options import PROFILED_COUNTS, CaseSettings, RunSettings, flag_of, parse_seconds, specs_of
from hil.core.runtimes import RUNTIMES
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.devices.board_choice import BoardChoice
    from hil.controller.pipeline.options import Options
    from hil.controller.storage.run_context import RunContext
    from hil.controller.workloads.matrix.targets import Target

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=CaseSettings)

FILE = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
# The settings of a connection over SSH.
SSH = ("identity", "known_hosts", "accept_new_host_key")

_SPECS = specs_of(RunSettings)
_DEFAULTS = RunSettings()


def seconds(_: click.Context, option: click.Parameter, value: float) -> float:
    """Check the value of an option in seconds."""
    return parse_seconds(value, option.opts[0])


def run_option(name: str, flag: str = "", **more: Any) -> Callable[[F], F]:
    """Make the option of a verb from the description in :mod:`hil.controller.pipeline.options`.

    Args:
        name: the field of :class:`RunSettings`; the verb gets its value under this name.
        flag: a long name instead of the usual one.
        more: arguments of click that replace those of the description.
    """
    spec, default = _SPECS[name], getattr(_DEFAULTS, name)
    settings: dict[str, Any] = {"help": spec.help, "metavar": spec.metavar}
    if isinstance(default, bool):
        settings = {"help": spec.help, "is_flag": True}
    elif spec.repeats:
        settings["multiple"] = True
    elif default is None and spec.of_text is None:
        settings["type"] = FOLDER if spec.metavar == "DIR" else float
    else:
        settings |= {"default": "" if default is None else default, "show_default": spec.shows_default}
    if of_text := spec.of_text:
        settings["callback"] = lambda _, option, value: of_text(value, option.opts[0])
    return click.option(flag or flag_of(name, spec), name, cls=RunOption, **{**settings, **more})


def run_options(*names: str) -> Callable[[F], F]:
    """Combine several options of a run; help lists them in this order."""
    return options(*map(run_option, names))


def once(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> str:
    """Refuse a second value of an option that users may expect to repeat."""
    if len(values) > 1:
        message = f"{option.opts[0]} is given {len(values)} times: {', '.join(values)}"
        raise UsageError(message, hint="name one, and call the command again for another")
    return "".join(values)


def options(*several: Callable[[F], F]) -> Callable[[F], F]:
    """Combine several options to one decorator; help lists them in this order."""

    def add(command: F) -> F:
        for option in reversed(several):
            command = option(command)
        return command

    return add


def _hardware(board: Callable[[F], F], *, repeats: bool = False) -> Callable[[F], F]:
    more = "; repeats: each is a target" if repeats else ""
    return options(
        board,
        click.option(
            "--runtime-hw-type",
            "hw_type",
            default=() if repeats else "",
            multiple=repeats,
            is_eager=True,
            metavar="TYPE",
            help=f"Kind of hardware: sim, sim-f16, ... (default sim){more}.",
        ),
        click.option("--identity", type=FILE, metavar="FILE", help="Private key for SSH."),
        click.option(
            "--known-hosts", type=FILE, metavar="FILE", help="Pinned host keys (default: ~/.ssh/known_hosts)."
        ),
        click.option("--accept-new-host-key", is_flag=True, help="Pin the key of a host that was never seen."),
    )


def _named(context: click.Context, _: click.Parameter, value: Any) -> Any:
    """Default --board to the board that HIL_BOARD names, so that it is recorded with the run."""
    if value or context.resilient_parsing:
        return value
    from hil.controller.devices.board_resolver import named_board

    board = named_board("".join(context.params.get("hw_type", "")))
    if not board:
        return value
    return (board,) if isinstance(value, tuple) else board


def _board(name: str, more: str, **settings: Any) -> Callable[[F], F]:
    which = "USER@HOST, ssh:ALIAS, a name, a config file, unix:PATH, HOST:PORT or farm:SELECTOR (default: HIL_BOARD)"
    return click.option("--board", name, callback=_named, metavar="ADDR|NAME", help=f"{which}{more}.", **settings)


# The board's name and connection: the arguments of hil.controller.devices.board_resolver.choose. Then the same where
# each that is named is a target of a matrix, and where boards share the work.
board_options = _hardware(_board("board", "", default=""))
target_options = _hardware(_board("board", "; repeats: each is a target", multiple=True), repeats=True)
boards_options = options(
    _hardware(_board("boards", "; repeats: boards share the work", multiple=True), repeats=True),
    click.option("--each-board", is_flag=True, help="Each --board is a target, and has all cases."),
)
wait_option = click.option(
    "--wait",
    "wait_s",
    default=60.0,
    show_default=True,
    metavar="S",
    callback=seconds,
    help="How long to wait for a busy board.",
)


def _choose_sandbox(_: click.Context, __: click.Parameter, wanted: bool | None) -> None:
    """Pass the choice on to simulators, in whatever process they are started."""
    if wanted is not None:
        os.environ["HIL_SANDBOX"] = "required" if wanted else "off"


def _choose_fresh(_: click.Context, __: click.Parameter, wanted: bool) -> None:
    if wanted:
        os.environ["HIL_SIMULATOR"] = "fresh"


# Options of a simulator that the command starts.
fault_option = options(
    click.option(
        "--fault",
        "faults",
        multiple=True,
        metavar="FAULT",
        help="Of a simulator: crash, hang, corrupt, drop, slow, ... (docs/simulator.md). Repeats.",
    ),
    click.option(
        "--sandbox/--no-sandbox",
        default=None,
        expose_value=False,
        callback=_choose_sandbox,
        help="Of a simulator: programs have no network and no files to write (default: where the kernel allows it).",
    ),
    click.option(
        "--fresh",
        is_flag=True,
        expose_value=False,
        callback=_choose_fresh,
        help="Of a simulator: a new one, which ends with the command, not one that is kept for the next.",
    ),
)


def _show_live(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Show on stderr what tools print, until the command ends."""
    if wanted and not context.resilient_parsing:
        from hil.controller.storage import live

        context.with_resource(live.showing(lambda text: click.echo(text, err=True)))


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_show_live,
    help="Show what compilers, importers, references and programs' workers print, as it comes.",
)
# Options of every verb that runs programs on a board.
limit_options = options(run_options("timeout", "no_fallback"), wait_option, verbose_option, fault_option)
group_option = click.option(
    "--group",
    type=click.Choice(["node", "fused"]),
    default="node",
    show_default=True,
    help="What a layer is: a node, or what compilers fuse (Conv+Relu).",
)
input_options = run_options("inputs", "seed", "input_range")
tolerance_options = run_options("rtol", "atol", "accept", "allow_blind", "allow_flush")
arithmetic_option = run_options("arithmetic")
reference_options = run_options("references", "expected", "require_independent")
repetition_options = run_options("repeat", "fresh_load", "recompile", "allow_unstable")
iteration_options = options(run_options("iterations", "warmup"), repetition_options)
cache_options = run_options("debug_ir", "debug_ir_passes", "recompute")
compile_profile_option = click.option(
    "--compile-time-profile",
    type=FOLDER,
    metavar="DIR",
    help="Compile once more with timing on: passes, dispatches, executables and estimates, as CSV and as a trace.",
)
# Of every verb that runs models; in a suite, DIR has a folder a case.
profile_options = options(
    click.option(
        "--profile",
        type=FOLDER,
        metavar="DIR",
        help="Also run under the runtime's profiler and write a Perfetto trace and a table of operations here, in a "
        f"suite a folder a case (then {PROFILED_COUNTS['iterations']} iterations after {PROFILED_COUNTS['warmup']} "
        "warm-ups by default).",
    ),
    compile_profile_option,
)
# Options of every verb that compiles one model: first those that determine the program.
program_options = options(
    run_option("runtime", help=f"{', '.join(RUNTIMES)}, ... (default: the board's)."),
    run_options("function", "dims", "compile_flags"),
)
model_options = options(program_options, cache_options)
# The same where each runtime that is named is a target.
target_program_options = options(
    run_option(
        "runtime",
        multiple=True,
        default=(),
        help=f"{', '.join(RUNTIMES)}, ... (default: the board's); repeats: each is a target.",
    ),
    run_options("function", "dims", "compile_flags"),
)
label_option = run_option("labels")
runs_option = click.option("--out", type=FILE, metavar="DIR", help="Where runs are stored (default: hil-runs).")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout and nothing else.")


def flow_option(default: str, *, repeats: bool = False) -> Callable[[F], F]:
    """Make the option --flow, which is given once, or each of which is a target."""
    more = "; repeats: each is a target" if repeats else ""
    return click.option(
        "--flow",
        multiple=True,
        callback=None if repeats else once,
        default=[default] if default else [],
        show_default=bool(default),
        metavar="F",
        help=f"A flow's name (hil flows), FILE or FILE:NAME{more}.",
    )


def split_targets(settings: dict[str, Any], *fields: str) -> tuple[Target, ...]:
    """Return the targets that repeated options make; the settings then have the values that all of them have."""
    from hil.controller.workloads.matrix.targets import targets_of

    targets = targets_of({field: settings[field] for field in fields})
    settings |= {field: "".join(settings[field]) if len(settings[field]) == 1 else "" for field in fields}
    return targets


def chosen_board(settings: dict[str, Any]) -> BoardChoice:
    """Return the board of :data:`board_options`, whose values are removed from a command's settings."""
    from hil.controller.devices.board_resolver import choose

    return choose(settings.pop("board"), settings.pop("hw_type"), **{name: settings.pop(name) for name in SSH})


def run_settings(settings: dict[str, Any], **more: Any) -> Options:
    """Return the options of a run that are among a command's settings."""
    from hil.controller.pipeline.options import Options

    names = RunSettings.__dataclass_fields__.keys() & settings.keys()
    return Options(**{name: settings[name] for name in names}, **more)


@contextmanager
def workshop(workers: int | None = None) -> Iterator[RunContext]:
    """Open the cache and isolated processes."""
    from hil.controller.storage.cache import Cache
    from hil.controller.storage.isolated import Isolated
    from hil.controller.storage.run_context import RunContext

    with Isolated(workers) as isolated:
        yield RunContext(Cache(), isolated)


def given_options() -> dict[str, str]:
    """Return the options of the command line that runs now: parameter -> the option's name, such as ``--seed``."""
    context = click.get_current_context()
    found: dict[str, str] = {}
    for option in context.command.params:
        name = str(option.name)
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            found.setdefault(name, option.opts[0])
    return found


def with_project(settings: S) -> S:
    """Return the settings with those of models from the project file, but for what the command line gives."""
    project = click.get_current_context().meta.get(PROJECT)
    if project is None:
        return settings
    given = given_options()
    own = {
        pattern: {name: value for name, value in values.items() if name not in given}
        for pattern, values in project.models.items()
    }
    return replace(settings, per_model=own)


def profiled_counts(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts of iterations of a run under the profiler, as far as the command line gives none."""
    if not settings["profile"]:
        return {}
    return {name: count for name, count in PROFILED_COUNTS.items() if name not in given_options()}


def refuse_beside_resume(*others: str) -> None:
    """Refuse options beside ``--resume``, but for these: a run is resumed with its own settings."""
    for name, option in given_options().items():
        if name not in others:
            raise UsageError(
                f"{option} cannot be given with --resume",
                hint="a run goes on as it was begun; for other settings start a new one",
            )
