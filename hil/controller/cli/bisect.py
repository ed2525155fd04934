"""`hil bisect`: the first layer that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.options import (
    board_options,
    chosen_board,
    json_option,
    model_options,
    parse_dims,
    parse_range,
    seconds,
)

if TYPE_CHECKING:
    from hil.controller.pipeline import Options


@click.command(epilog="Example: hil bisect examples/digits/digits_cnn.onnx --runtime-hw-type sim-f16 --plot growth.png")
@click.argument("model", type=click.Path(path_type=Path))
@board_options
@model_options
@click.option("--flow", default="", metavar="NAME", help="Instead of --runtime: iree-O3, int8-..., or a file.")
@click.option(
    "--artifact-model",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compile FILE and compare it with MODEL: the same layers, perhaps other weights.",
)
@click.option("--isolated", is_flag=True, help="Only each layer alone, fed with the reference's values.")
@click.option("--cumulative", is_flag=True, help="Only all layers in one run of the whole model.")
@click.option(
    "--group", default="node", type=click.Choice(["node", "fused"]), show_default=True, help="What makes a layer."
)
@click.option(
    "--input", "inputs", multiple=True, metavar="[NAME=]FILE", help="x.npy, x.npz, x.pb or 4x8xf32=@x.bin; else random."
)
@click.option("--seed", default=0, show_default=True, help="Of the random inputs.")
@click.option("--input-range", default="", metavar="LOW:HIGH", help="Of the random inputs' values.")
@click.option("--rtol", type=float, help="Relative tolerance (default: by dtype).")
@click.option("--atol", type=float, help="Absolute tolerance (default: by dtype).")
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    metavar="S",
    callback=seconds,
    help="Limit of each load, run and reference.",
)
@click.option(
    "--wait", "wait_s", default=60.0, show_default=True, metavar="S", callback=seconds, help="For a busy board."
)
@click.option("--fault", "faults", multiple=True, metavar="FAULT", help="Of a simulator: see docs/simulator.md.")
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="A picture of the error by depth: .png, .svg."
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep logs, and what is wrong, in DIR.")
@json_option
def bisect(model: Path, as_json: bool, plot: Path | None, out: Path | None, **settings: Any) -> int:
    """Find the first layer of MODEL, an ONNX model, whose answer leaves tolerance on a board.

    Each layer is run alone on what the reference computed (isolated), and all of them in one run of the whole model
    with its intermediates as outputs (cumulative). As outputs keep a compiler from fusing layers across them, the
    model as it is runs too: where that alone is wrong, it comes of fusion.
    """
    from hil.controller.bisect.find import bisect as find
    from hil.controller.bisect.growth import check_picture, plot_growth
    from hil.controller.bisect.result import WAYS
    from hil.controller.cache import Cache
    from hil.controller.cli.screen import Screen, print_json
    from hil.controller.flows import load_flow
    from hil.controller.isolated import Isolated
    from hil.controller.pipeline import Options, Workshop
    from hil.errors import UsageError

    ways = [way for way in WAYS if settings.pop(way)] or WAYS
    name = settings.pop("flow")
    if name and settings["runtime"]:
        raise UsageError("--flow names a runtime already", hint="give --flow or --runtime, not both")
    flow = load_flow(name) if name else None
    if plot:
        check_picture(plot)
    where = {"--board": settings["board"], "--runtime-hw-type": settings["hw_type"]}
    choice = chosen_board(settings)
    more = {key: settings.pop(key) for key in ("artifact_model", "group", "faults", "wait_s")}
    options = Options(
        dims=parse_dims(settings.pop("dims")),
        input_range=parse_range(settings.pop("input_range")),
        recompute=settings.pop("recompute_cache"),
        **settings,
    )
    with Screen(quiet=as_json or not sys.stderr.isatty()) as screen, Isolated() as isolated:
        found = find(
            model,
            choice,
            shop=Workshop(Cache(), isolated),
            screen=screen,
            options=options,
            flow=flow,
            ways=ways,
            out=out,
            **more,
        )
    if plot:
        plot_growth(plot, found)
    if as_json:
        print_json(found.to_json())
    else:
        from rich.console import Console

        from hil.controller.bisect.table import print_bisection

        print_bisection(Console(), found)
        if plot:
            click.echo(f"plot in {plot}")
        if out:
            from hil.controller.bisect.keep import repeat_command
            from hil.controller.bisect.subject import with_flow

            click.echo(f"kept in {out}")
            if layer := found.first_wrong("isolated"):
                click.echo(f"again: {repeat_command(out, layer.name, _words(where, with_flow(options, flow)))}")
    return found.exit_code


def _words(where: dict[str, str], options: Options) -> list[str]:
    """The options of `hil run` that say the same: which board, how compiled, how judged."""
    named = {**where, "--runtime": options.runtime, "--rtol": options.rtol, "--atol": options.atol}
    words = [word for name, value in named.items() if value not in ("", None) for word in (name, str(value))]
    return [*words, *(word for flag in options.compile_flags for word in ("--compile-flag", flag))]
