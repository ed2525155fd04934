"""Options, value conversions and board selection shared by commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hil.controller.cli.commands import PROJECT, ProjectOption, RunOption, use_project_board, use_project_key
from hil.controller.cli.usage.candidates import (
    OF_SETTINGS,
    ModelPath,
    complete_boards,
    complete_faults,
    complete_file,
    complete_flows,
    complete_runtimes,
    complete_types,
)
from hil.controller.pipeline.settings.options import (
    PROFILED_COUNTS,
    CaseSettings,
    RunSettings,
    flag_of,
    list_specs,
    parse_seconds,
)
from hil.core.runtimes import RUNTIMES
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.devices.board_choice import BoardChoice
    from hil.controller.pipeline.settings.options import Options
    from hil.controller.workloads.matrix.targets import MatrixTarget
    from hil.controller.workloads.triage.entries import TriageList

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=CaseSettings)

FILE = click.Path(path_type=Path)
MODEL = ModelPath(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
# SSH connection settings.
SSH = ("identity", "known_hosts", "accept_new_host_key")

_SPECS = list_specs(RunSettings)
_DEFAULTS = RunSettings()


def check_seconds(_: click.Context, option: click.Parameter, value: float) -> float:
    """Validate the value of an option in seconds."""
    return parse_seconds(value, option.opts[0])


def run_option(name: str, flag: str = "", **more: Any) -> Callable[[F], F]:
    """Create a command's option from its definition in :mod:`hil.controller.pipeline.settings.options`.

    Args:
        name: the field of :class:`RunSettings`, and the command's parameter name.
        flag: long name in place of the default.
        more: click arguments that override the arguments of the definition.
    """
    spec, default = _SPECS[name], getattr(_DEFAULTS, name)
    settings: dict[str, Any] = {"help": spec.help, "metavar": spec.metavar}
    if complete := OF_SETTINGS.get(name):
        settings["shell_complete"] = complete
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
    """Combine run options into one decorator. Help lists the options in this order."""
    return combine_options(*map(run_option, names))


def check_once(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> str:
    """Return the value of an option. Raises UsageError if the option is repeated."""
    if len(values) > 1:
        message = f"{option.opts[0]} is specified {len(values)} times: {', '.join(values)}"
        raise UsageError(message, hint="specify one value per command")
    return "".join(values)


def combine_options(*several: Callable[[F], F]) -> Callable[[F], F]:
    """Combine options into one decorator. Help lists the options in this order."""

    def add(command: F) -> F:
        for option in reversed(several):
            command = option(command)
        return command

    return add


def _make_hardware_options(board: Callable[[F], F], *, repeats: bool = False) -> Callable[[F], F]:
    more = "; repeatable: each value is a target" if repeats else ""
    return combine_options(
        board,
        click.option(
            "--runtime-hw-type",
            "hw_type",
            default=() if repeats else "",
            multiple=repeats,
            is_eager=True,
            metavar="TYPE",
            shell_complete=complete_types,
            help=f"Hardware type: sim, sim-f16, ... (default sim){more}.",
        ),
        click.option("--identity", type=FILE, metavar="FILE", help="Private key for SSH."),
        click.option(
            "--known-hosts", type=FILE, metavar="FILE", help="Pinned host keys (default: ~/.ssh/known_hosts)."
        ),
        click.option("--accept-new-host-key", is_flag=True, help="Pin the host key of an unknown host."),
    )


def _default_board(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Default --board to HIL_BOARD or to the project file's board and type, so that the run records them."""
    if value or context.resilient_parsing:
        return value
    from hil.controller.devices.choosing.board_resolver import get_named_board

    hw_type = "".join(context.params.get("hw_type", ""))
    board = get_named_board(hw_type)
    if not board and not hw_type and isinstance(option, ProjectOption):
        board, hw_type = use_project_board(context)
        if hw_type:
            context.params["hw_type"] = (hw_type,) if isinstance(value, tuple) else hw_type
    if not board:
        return value
    return (board,) if isinstance(value, tuple) else board


_BOARD_FORMS = "USER@HOST, ssh:ALIAS, a name, a config file, unix:PATH, HOST:PORT or farm:SELECTOR"


def _make_board_option(name: str, more: str, *, is_stored: bool = False, **settings: Any) -> Callable[[F], F]:
    """Return the option --board.

    Args:
        is_stored: True if stored results or an argument select the board, so the project file's board does not apply.
    """
    default = "HIL_BOARD" if is_stored else "HIL_BOARD, then hil.toml"
    return click.option(
        "--board",
        name,
        cls=click.Option if is_stored else ProjectOption,
        callback=_default_board,
        metavar="ADDR|NAME",
        help=f"{_BOARD_FORMS} (default: {default}){more}.",
        shell_complete=complete_boards,
        **settings,
    )


# Options for the board's name and connection, which are arguments of
# hil.controller.devices.choosing.board_resolver.choose. The other variants are for commands whose stored results or
# arguments select the board, for commands with multiple targets, and for boards that share the cases.
board_options = _make_hardware_options(_make_board_option("board", "", default=""))
stored_board_options = _make_hardware_options(_make_board_option("board", "", is_stored=True, default=""))
target_options = _make_hardware_options(
    _make_board_option("board", "; repeatable: each value is a target", multiple=True), repeats=True
)
boards_options = combine_options(
    _make_hardware_options(
        _make_board_option("boards", "; repeatable: boards share the work", multiple=True), repeats=True
    ),
    click.option("--each-board", is_flag=True, help="Make each --board a target that runs all cases."),
)
wait_option = click.option(
    "--wait",
    "wait_s",
    default=60.0,
    show_default=True,
    metavar="S",
    callback=check_seconds,
    help="Seconds to wait for a busy board.",
)


def _choose_sandbox(_: click.Context, __: click.Parameter, wanted: bool | None) -> None:
    """Set HIL_SANDBOX, so that the option also applies to simulators in child processes."""
    if wanted is not None:
        os.environ["HIL_SANDBOX"] = "required" if wanted else "off"


def _choose_fresh(_: click.Context, __: click.Parameter, wanted: bool) -> None:
    if wanted:
        os.environ["HIL_SIMULATOR"] = "fresh"


# Options for a simulator that the command starts.
fault_option = combine_options(
    click.option(
        "--fault",
        "faults",
        multiple=True,
        metavar="FAULT",
        shell_complete=complete_faults,
        help="Simulator fault: crash, hang, corrupt, drop, slow, ... (docs/simulator.md). Repeatable.",
    ),
    click.option(
        "--sandbox/--no-sandbox",
        default=None,
        expose_value=False,
        callback=_choose_sandbox,
        help="Run the simulator's programs without network and writable files (default: if the kernel supports it).",
    ),
    click.option(
        "--fresh",
        is_flag=True,
        expose_value=False,
        callback=_choose_fresh,
        help="Start a new simulator instead of reusing one, and stop it when the command ends.",
    ),
)


def _show_live(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Show the output of tools on stderr until the command ends."""
    if wanted and not context.resilient_parsing:
        from hil.controller.storage.screen import live

        context.with_resource(live.show_output(lambda text: click.echo(text, err=True)))


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=_show_live,
    help="Show the live output of compilers, importers, references and workers.",
)
# Options for all commands that run programs on a board.
limit_options = combine_options(run_options("timeout", "no_fallback"), wait_option, verbose_option, fault_option)
group_option = click.option(
    "--group",
    type=click.Choice(["node", "fused"]),
    default="node",
    show_default=True,
    help="Definition of a layer: a node, or nodes that compilers fuse (Conv+Relu).",
)
input_options = run_options("inputs", "seed", "input_range")
generate_option = run_option("generate", type=FILE)
tolerance_options = run_options("rtol", "atol", "accept", "allow_blind", "allow_flush")
arithmetic_option = run_options("arithmetic")
instructions_option = run_options("instructions")
reference_options = run_options("references", "expected", "require_independent")
repetition_options = run_options("repeat", "fresh_load", "recompile", "allow_unstable")
iteration_options = combine_options(run_options("iterations", "warmup"), repetition_options)
cache_options = run_options("debug_ir", "debug_ir_passes", "recompute")
compile_profile_option = click.option(
    "--compile-time-profile",
    type=FOLDER,
    metavar="DIR",
    help="Also profile the compiler: write passes, dispatches with estimated costs, and executables to DIR.",
)
# For all commands that run models. A suite creates a subdirectory in DIR for each case.
profile_options = combine_options(
    click.option(
        "--profile",
        type=FOLDER,
        metavar="DIR",
        help="Also run under the runtime's profiler, and write a Perfetto trace and a table of operations to DIR. "
        f"Suites use a subdirectory per case. Default: {PROFILED_COUNTS['iterations']} iterations after "
        f"{PROFILED_COUNTS['warmup']} warm-ups.",
    ),
    compile_profile_option,
)
# Options for all commands that compile a single model. The first options determine the program.
program_options = combine_options(
    run_option("runtime", help=f"Runtime: {', '.join(RUNTIMES)}, ... (default: the board's)."),
    run_options("device", "function", "dims", "compile_flags"),
)
model_options = combine_options(program_options, cache_options)

_RUNTIMES_HELP = f"Runtime: {', '.join(RUNTIMES)}, ... (default: {{}}); repeatable: each value is a target."
# The same options for commands with multiple targets.
target_program_options = combine_options(
    run_option("runtime", multiple=True, default=(), help=_RUNTIMES_HELP.format("the board's")),
    run_options("device", "function", "dims", "compile_flags"),
)
# The option --runtime of suites. The project file does not set it, because flows have a runtime.
flow_runtime_option = click.option(
    "--runtime",
    multiple=True,
    metavar="NAME",
    help=_RUNTIMES_HELP.format("the flow's"),
    shell_complete=complete_runtimes,
)


def _load_known(context: click.Context, _: click.Parameter, value: str | None) -> TriageList | None:
    # Shell completion must not query a server.
    if value is None or context.resilient_parsing:
        return None
    from hil.controller.web.publish.known_failures import load_known

    return load_known(value)


known_option = click.option(
    "--known",
    metavar="FILE|URL",
    callback=_load_known,
    shell_complete=complete_file,
    help="Do not fail for known failures: a triage file, or the URL of hil web.",
)
label_option = run_option("labels")
runs_option = click.option(
    "--out",
    type=FILE,
    cls=ProjectOption,
    key="out",
    metavar="DIR",
    help="Directory for runs (default: from hil.toml, or hil-runs).",
)
result_folders_option = click.option(
    "--runs", multiple=True, type=FOLDER, metavar="DIR", help="Directory of stored results (default: .). Repeatable."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def make_flow_option(default: str, *, repeats: bool = False) -> Callable[[F], F]:
    """Return the option --flow. With ``repeats``, every value is a target."""
    more = "; repeatable: each value is a target" if repeats else ""
    return click.option(
        "--flow",
        cls=ProjectOption,
        # Without a default, the option excludes others, such as --runtime.
        key="flow" if default else "",
        multiple=True,
        callback=None if repeats else check_once,
        default=[default] if default else [],
        show_default=bool(default),
        metavar="FLOW",
        shell_complete=complete_flows,
        help=f"Flow name (hil flows), FILE or FILE:NAME{more}.",
    )


def is_default_flow() -> bool:
    """Return whether neither the command line nor the project file selects a flow for the current command."""
    context = click.get_current_context()
    is_default = context.get_parameter_source("flow") is click.core.ParameterSource.DEFAULT
    return is_default and not use_project_key(context, "flow")


def split_targets(settings: dict[str, Any], *fields: str) -> tuple[MatrixTarget, ...]:
    """Return the targets of repeated options. Set the fields to their common values in the settings."""
    from hil.controller.workloads.matrix.targets import combine_targets

    targets = combine_targets({field: settings[field] for field in fields})
    settings |= {field: "".join(settings[field]) if len(settings[field]) == 1 else "" for field in fields}
    return targets


def choose_board(settings: dict[str, Any]) -> BoardChoice:
    """Return the board selected by :data:`board_options`. Remove their values from a command's settings."""
    from hil.controller.devices.board_choice import use_device
    from hil.controller.devices.choosing.board_resolver import choose

    choice = choose(settings.pop("board"), settings.pop("hw_type"), **{name: settings.pop(name) for name in SSH})
    return use_device(choice, settings.get("runtime", ""), settings.get("device", ""))


def run_settings(settings: dict[str, Any], **more: Any) -> Options:
    """Return the run options in a command's settings."""
    from hil.controller.pipeline.settings.options import Options

    names = RunSettings.__dataclass_fields__.keys() & settings.keys()
    return Options(**{name: settings[name] for name in names}, **more)


def list_given_options() -> dict[str, str]:
    """Return parameter -> option name, such as ``--seed``, for the options on the current command line."""
    context = click.get_current_context()
    found: dict[str, str] = {}
    for option in context.command.params:
        name = str(option.name)
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            found.setdefault(name, option.opts[0])
    return found


def add_project_settings(settings: S) -> S:
    """Add the project file's settings for models. Options on the command line override them."""
    project = click.get_current_context().meta.get(PROJECT)
    if project is None:
        return settings
    given = set(list_given_options())
    if "flow" in given:  # a flow has a runtime
        given.add("runtime")
    own = {
        pattern: {name: value for name, value in values.items() if name not in given}
        for pattern, values in project.models.items()
    }
    return replace(settings, per_model=own)


def choose_profiled_counts(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the default iteration counts of a profiled run that the command line does not override."""
    if not settings["profile"]:
        return {}
    return {name: count for name, count in PROFILED_COUNTS.items() if name not in list_given_options()}


def refuse_with_resume(*others: str) -> None:
    """Raise UsageError for options other than ``--resume`` and ``others``: a resumed run uses the stored settings."""
    for name, option in list_given_options().items():
        if name not in others:
            raise UsageError(
                f"{option} cannot be given with --resume",
                hint="a resumed run uses the original settings; to change them, start a new run",
            )
