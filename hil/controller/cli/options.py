"""Options that several verbs share, in the same words everywhere, and their values as the library wants them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hil.controller.backends.runtime_registry import RUNTIMES
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.devices.board_resolver import BoardChoice

F = TypeVar("F", bound=Callable[..., Any])

_PATH = click.Path(path_type=Path)


def seconds(_: click.Context, option: click.Parameter, value: float) -> float:
    """For an option that takes seconds: refuse what nobody can wait.

    Raises:
        UsageError: it is negative, infinite or no number at all.
    """
    from hil.controller.pipeline.arguments import SECONDS, checked

    return float(checked(option.opts[0], value, SECONDS))


def once(_: click.Context, option: click.Parameter, values: tuple[str, ...]) -> str:
    """For an option of which one might think that it repeats: refuse a second one.

    Raises:
        UsageError: there are two.
    """
    if len(values) > 1:
        told = f"{option.opts[0]} is given {len(values)} times: {', '.join(values)}"
        raise UsageError(told, hint="name one, and call the command again for another")
    return "".join(values)


def options(*several: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator; help lists them in this order."""

    def add(command: F) -> F:
        for option in reversed(several):
            command = option(command)
        return command

    return add


def _hardware(board: Callable[[F], F]) -> Callable[[F], F]:
    return options(
        board,
        click.option(
            "--runtime-hw-type",
            "hw_type",
            default="",
            is_eager=True,
            metavar="TYPE",
            help="Kind of hardware: sim, sim-f16, ... (default sim).",
        ),
        click.option("--identity", type=_PATH, metavar="FILE", help="Private key for SSH."),
        click.option(
            "--known-hosts", type=_PATH, metavar="FILE", help="Pinned host keys (default: ~/.ssh/known_hosts)."
        ),
        click.option("--accept-new-host-key", is_flag=True, help="Pin the key of a host that was never seen."),
    )


def _named(context: click.Context, _: click.Parameter, value: Any) -> Any:
    """For --board: without one, the board that HIL_BOARD names, so that it is stored with what ran on it."""
    if value or context.resilient_parsing:
        return value
    from hil.controller.devices.board_resolver import named_board

    board = named_board(context.params.get("hw_type", ""))
    if not board:
        return value
    return (board,) if isinstance(value, tuple) else board


_WHICH = "USER@HOST, ssh:ALIAS, a name, a config file, unix:PATH, HOST:PORT or farm:SELECTOR (default: HIL_BOARD)"
# What names a board and how it is reached: the arguments of hil.controller.devices.board_resolver.choose. Then the
# same for several.
board_options = _hardware(click.option("--board", default="", callback=_named, metavar="ADDR|NAME", help=f"{_WHICH}."))
boards_options = _hardware(
    click.option(
        "--board",
        "boards",
        multiple=True,
        callback=_named,
        metavar="ADDR|NAME",
        help=f"{_WHICH}; repeats: boards share the work.",
    )
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


def fault_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a simulator of the command's own."""
    fault = click.option(
        "--fault",
        "faults",
        multiple=True,
        metavar="FAULT",
        help="Of a simulator: crash, hang, corrupt, drop, slow, ... (docs/simulator.md). Repeats.",
    )
    sandbox = click.option(
        "--sandbox/--no-sandbox",
        default=None,
        expose_value=False,
        callback=_choose_sandbox,
        help="Of a simulator: programs have no network and no files to write (default: where the kernel allows it).",
    )
    return fault(sandbox(command))


def _choose_sandbox(_: click.Context, __: click.Parameter, wanted: bool | None) -> None:
    """Tell simulators, in whatever process they are started."""
    if wanted is not None:
        os.environ["HIL_SANDBOX"] = "required" if wanted else "off"


dim_option = click.option(
    "--dim", "dims", multiple=True, metavar="NAME=SIZE", help="Value of a symbolic dimension. Repeats."
)
group_option = click.option(
    "--group",
    type=click.Choice(["node", "fused"]),
    default="node",
    show_default=True,
    help="What a layer is: a node, or what compilers fuse (Conv+Relu).",
)
seed_option = click.option("--seed", default=0, show_default=True, help="Of random inputs.")
input_option = click.option(
    "--input", "inputs", multiple=True, metavar="[NAME=]FILE", help="x.npy, x.npz, x.pb or 4x8xf32=@x.bin; else random."
)
range_option = click.option("--input-range", default="", metavar="LOW:HIGH", help="Of the random inputs' values.")
input_options = options(input_option, seed_option, range_option)
allow_blind_option = click.option(
    "--allow-blind",
    "allow_blind",
    multiple=True,
    metavar="OUTPUT",
    help="Pass this output though no tolerance could tell a wrong answer from a right one (BLIND). * as in file names; "
    "repeats.",
)
tolerance_options = options(
    click.option("--rtol", type=float, help="Relative tolerance (default: the flow's or the case's own, or by dtype)."),
    click.option(
        "--atol",
        type=float,
        help="Absolute tolerance (default: the flow's or the case's own, or by dtype and the reference's scale).",
    ),
    allow_blind_option,
)
reference_options = options(
    click.option(
        "--reference",
        "references",
        multiple=True,
        metavar="NAME",
        help="onnxruntime, iree-llvm-cpu, onnx-reference, ...; repeats.",
    ),
    click.option("--expected", multiple=True, metavar="[NAME=]FILE", help="Expected outputs instead of a reference."),
)
iteration_options = options(
    click.option("--iterations", default=1, show_default=True, help="Timed runs."),
    click.option("--warmup", default=0, show_default=True, help="Untimed runs before."),
)
no_fallback_option = click.option(
    "--no-fallback", is_flag=True, help="Fail (FALLBACK) where any node runs on another device than it was told to."
)
recompute_option = click.option("--recompute-cache", is_flag=True, help="Ignore cached programs and reference results.")
cache_options = options(
    click.option(
        "--debug-ir",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Dump the compiler's IR here, in a suite a folder a case.",
    ),
    recompute_option,
)
compile_profile_option = click.option(
    "--compile-time-profile",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Compile once more with timing on: passes, dispatches, executables and estimates, as CSV and as a trace.",
)
# What every verb that compiles one model needs: first what says which program it becomes.
program_options = options(
    click.option("--runtime", default="", metavar="NAME", help=f"{', '.join(RUNTIMES)}, ... (default: the board's)."),
    click.option("--function", default="", metavar="F", help="Entry point, where there are several."),
    dim_option,
    click.option("--compile-flag", "compile_flags", multiple=True, metavar="FLAG", help="Added to the board's flags."),
)
model_options = options(program_options, cache_options)
runs_option = click.option("--out", type=_PATH, metavar="DIR", help="Where runs are stored (default: hil-runs).")
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout and nothing else.")


def limit_option(name: str) -> Callable[[F], F]:
    """The limit of a case's steps, in seconds, as ``timeout``; ``name`` is the option's."""
    return click.option(
        name,
        "timeout",
        default=60.0,
        show_default=True,
        metavar="S",
        callback=seconds,
        help="Limit of loading, of the runs together, and of each reference.",
    )


timeout_option = limit_option("--timeout")


def flow_option(default: str) -> Callable[[F], F]:
    """--flow, once.

    Args:
        default: the flow's name where none is given; "" is none.
    """
    return click.option(
        "--flow",
        multiple=True,
        callback=once,
        default=[default] if default else [],
        show_default=bool(default),
        metavar="F",
        help="A flow's name (hil flows), FILE or FILE:NAME.",
    )


def chosen_board(settings: dict[str, Any]) -> BoardChoice:
    """The board that :data:`board_options` name; takes theirs out of a command's settings.

    Raises:
        UsageError: there is no such board.
    """
    from hil.controller.devices.board_resolver import choose

    names = ("identity", "known_hosts", "accept_new_host_key")
    return choose(settings.pop("board"), settings.pop("hw_type"), **{name: settings.pop(name) for name in names})


def refuse_beside_resume(context: click.Context, *others: str) -> None:
    """Refuse whatever else was typed beside ``--resume``: a run goes on as it was begun.

    Args:
        context: the command's.
        others: the parameters that may be given all the same.

    Raises:
        UsageError: there is another one.
    """
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if option.name not in others and source is click.core.ParameterSource.COMMANDLINE:
            raise UsageError(
                f"{option.opts[0]} cannot be given with --resume",
                hint="a run goes on as it was begun; for other settings start a new one",
            )


def parse_dims(texts: tuple[str, ...], option: str = "--dim") -> dict[str, int]:
    """``N=4`` -> {"N": 4}.

    Args:
        texts: what was typed.
        option: the option's name, for messages.

    Raises:
        UsageError: it is not a name and a number of at least 0, or a name has two sizes.
    """
    dims: dict[str, int] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value.isdecimal()):
            raise UsageError(f"{option} {text!r} is not NAME=SIZE", hint=f"for example {option} N=1")
        if dims.setdefault(name, int(value)) != int(value):
            raise UsageError(f"{option} gives {name} two sizes: {dims[name]} and {int(value)}", hint="one is enough")
    return dims


def parse_range(text: str) -> tuple[float, float] | None:
    """``-1:1`` -> (-1.0, 1.0); "" -> None.

    Raises:
        UsageError: it is not two finite numbers, the lower one first.
    """
    if not text:
        return None
    low, _, high = text.partition(":")
    try:
        found = (float(low), float(high))
    except ValueError:
        found = (1.0, 0.0)
    if not (float("-inf") < found[0] <= found[1] < float("inf")):
        raise UsageError(f"--input-range {text!r} is not LOW:HIGH", hint="for example --input-range -1:1")
    return found
