"""Options that several verbs share, and their values as the library wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.choice import BoardChoice

F = TypeVar("F", bound=Callable[..., Any])


def board_options(command: F) -> F:
    """What names a board and how it is reached: the arguments of :func:`hil.controller.choice.choose`."""
    options = [
        click.option(
            "--board",
            default="",
            metavar="ADDR|NAME",
            help="USER@HOST, ssh:ALIAS, a name, a config file, unix:PATH or HOST:PORT.",
        ),
        click.option(
            "--runtime-hw-type",
            "hw_type",
            default="",
            metavar="TYPE",
            help="Kind of hardware: sim, sim-f16, ... (default sim).",
        ),
        click.option("--identity", type=click.Path(path_type=Path), metavar="FILE", help="Private key for SSH."),
        click.option(
            "--known-hosts",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Pinned host keys (default: ~/.ssh/known_hosts).",
        ),
        click.option("--accept-new-host-key", is_flag=True, help="Pin the key of a host that was never seen."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def chosen_board(settings: dict[str, Any]) -> BoardChoice:
    """The board that :func:`board_options` name; takes theirs out of a command's settings.

    Raises:
        UsageError: there is no such board.
    """
    from hil.controller.choice import choose

    names = ("identity", "known_hosts", "accept_new_host_key")
    return choose(settings.pop("board"), settings.pop("hw_type"), **{name: settings.pop(name) for name in names})


def model_options(command: F) -> F:
    """What both `run` and `compile` need to read and compile a model."""
    options = [
        click.option("--runtime", default="", metavar="NAME", help="iree or onnxruntime (default: the board's)."),
        click.option("--function", default="", metavar="F", help="Entry point, where there are several."),
        click.option("--dim", "dims", multiple=True, metavar="N=SIZE", help="Value of a symbolic dimension."),
        click.option(
            "--compile-flag", "compile_flags", multiple=True, metavar="FLAG", help="Added to the board's flags."
        ),
        click.option("--debug-ir", type=click.Path(path_type=Path), metavar="DIR", help="Dump the compiler's IR here."),
        click.option("--recompute-cache", is_flag=True, help="Ignore cached programs and reference results."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def json_option(command: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout and nothing else.")(
        command
    )


def seconds(_: click.Context, option: click.Parameter, value: float) -> float:
    """For an option that takes seconds: refuse what nobody can wait.

    Raises:
        UsageError: it is negative, infinite or no number at all.
    """
    from hil.controller.arguments import SECONDS, checked

    return float(checked(option.opts[0], value, SECONDS))


def parse_dims(texts: tuple[str, ...]) -> dict[str, int]:
    """``N=4`` -> {"N": 4}.

    Raises:
        UsageError: it is not a name and a number of at least 0.
    """
    dims = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value.isdigit()):
            raise UsageError(f"--dim {text!r} is not NAME=SIZE", hint="for example --dim N=1")
        dims[name] = int(value)
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
