"""`hil bisect`: find the first layer that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import (
    FILE,
    MODEL,
    add_project_settings,
    arithmetic_option,
    board_options,
    choose_board,
    generate_option,
    group_option,
    input_options,
    json_option,
    label_option,
    limit_options,
    make_flow_option,
    model_options,
    run_option,
    tolerance_options,
)
from hil.controller.cli.screen import Screen, answer, print_web_link
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.pipeline.settings.options import Options


@make_command(epilog="Example: hil bisect example:digits_cnn --runtime-hw-type sim-f16 --plot growth.png")
@click.argument("model", type=MODEL)
@board_options
@model_options
@make_flow_option("")
@click.option(
    "--artifact-model",
    type=FILE,
    metavar="FILE",
    help="Compile FILE instead of MODEL, and compare it with MODEL. FILE needs the same layers; weights may differ.",
)
@click.option("--isolated", is_flag=True, help="Only run each layer alone, on the reference's values.")
@click.option("--cumulative", is_flag=True, help="Only run the whole model once, with all layers as outputs.")
@group_option
@input_options
@generate_option
@run_option("references", help="Reference for intermediate values: onnxruntime (default), onnx-reference. Repeatable.")
@tolerance_options
@arithmetic_option
@limit_options
@label_option
@click.option("--plot", type=FILE, metavar="FILE", help="Plot the error by depth: .png, .svg.")
@click.option("--out", type=FILE, metavar="DIR", help="Store logs and failing layers in DIR.")
@json_option
def bisect(model: Path, as_json: bool, plot: Path | None, out: Path | None, **settings: Any) -> int:
    """Find the first layer of an ONNX MODEL with outputs out of tolerance on a board.

    Each layer runs alone on the reference's values (isolated). The whole model also runs with all intermediate values
    as outputs (cumulative). These outputs prevent the compiler from fusing layers, so the unchanged model runs too: if
    only this run fails, the cause is fusion. hil runs layers that generate random numbers, but does not judge them.
    In the whole model, hil also does not judge layers that depend on random numbers.

    With --generate, the prompts run first. The layers then receive the inputs of the first wrong call.
    """
    from hil.controller.analysis.bisect.find import bisect as find
    from hil.controller.analysis.bisect.find import repeat_command
    from hil.controller.analysis.bisect.result import WAYS, plot_growth, print_bisection
    from hil.controller.analysis.bisect.subject import apply_flow
    from hil.controller.models.flows import load_flow
    from hil.controller.pipeline.settings.options import Options
    from hil.controller.storage.run_context import open_context
    from hil.controller.storage.screen.console import Console
    from hil.controller.storage.screen.pictures import check_picture

    ways = [way for way in WAYS if settings.pop(way)] or WAYS
    name = settings.pop("flow")
    if name and settings["runtime"]:
        raise UsageError(
            "--flow and --runtime are mutually exclusive: a flow includes a runtime", hint="use only one of them"
        )
    flow = load_flow(name) if name else None
    if plot:
        check_picture(plot)
    where = read_board_values(settings)
    choice = choose_board(settings)
    more = {key: settings.pop(key) for key in ("artifact_model", "group", "faults", "wait_s")}
    options = add_project_settings(Options(**settings))
    with Screen(quiet=as_json) as screen, open_context() as context:
        found = find(
            model, choice, context=context, screen=screen, options=options, flow=flow, ways=ways, out=out, **more
        )
    if plot:
        plot_growth(plot, found)
    lines = [f"plot in {plot}"] if plot else []
    if out:
        print_web_link(out)
        lines.append(f"results in {out}")
        if found.first_isolated is not None:
            arguments = repeat_options(where, apply_flow(options, flow), more["faults"])
            lines.append(f"repeat with: {repeat_command(out, found.first_isolated, arguments)}")
    return answer(as_json, found, *lines, show=lambda: print_bisection(Console(), found))


def read_board_values(settings: dict[str, Any]) -> dict[str, Any]:
    """Return option -> value of a command's board options, for :func:`repeat_options`."""
    named = {"--board": "board", "--runtime-hw-type": "hw_type", "--identity": "identity"}
    named |= {"--known-hosts": "known_hosts"}
    return {option: settings[name] for option, name in named.items()}


def repeat_options(where: dict[str, Any], options: Options, faults: Sequence[str]) -> list[str]:
    """Return the equivalent options of `hil run`: board, compilation, tolerances, faults."""
    named = {**where, "--runtime": options.runtime, "--rtol": options.rtol, "--atol": options.atol}
    found = [text for name, value in named.items() if value not in ("", None) for text in (name, str(value))]
    found += ["--no-fallback"] * options.no_fallback
    repeated = {
        "--compile-flag": options.compile_flags,
        "--allow-blind": options.allow_blind,
        "--allow-flush": options.allow_flush,
        "--fault": faults,
    }
    return [*found, *(text for option, values in repeated.items() for value in values for text in (option, value))]
