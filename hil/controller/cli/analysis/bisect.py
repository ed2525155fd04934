"""`hil bisect`: find the first layer that is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.farm.options import connect_farm
from hil.controller.cli.options import (
    FILE,
    MODEL,
    SSH,
    add_project_settings,
    arithmetic_option,
    choose_board,
    generate_option,
    group_option,
    input_options,
    json_option,
    label_option,
    limit_options,
    list_given_options,
    make_flow_option,
    model_options,
    run_option,
    target_options,
    tolerance_options,
)
from hil.controller.cli.screen import Screen, answer, print_web_link
from hil.controller.farm import selector
from hil.core.text import convert_to_json
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.devices.board_choice import BoardChoice
    from hil.controller.pipeline.settings.options import Options
    from hil.controller.records.decisions.stack_search import TriedBoard
    from hil.controller.records.lab.farm import BoardPermission, FarmBoard
    from hil.controller.records.stack import StackPart


@make_command(
    epilog="""\b
Examples:
  hil bisect example:digits_cnn --runtime-hw-type sim-f16 --plot growth.png
  hil bisect example:digits_cnn --over driver --board farm:hw_type=rpi5"""
)
@click.argument("model", type=MODEL)
@target_options
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
@click.option(
    "--over",
    default="",
    metavar="PART",
    help="Find the version of driver, firmware, board or another part of the stack that changes the answer.",
)
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1, 100), help="Runs per board, with --over.")
@click.option("--resume", is_flag=True, help="Continue the interrupted search of --over in --out.")
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
def bisect(
    model: Path,
    as_json: bool,
    plot: Path | None,
    out: Path | None,
    over: str,
    runs: int,
    resume: bool,
    **settings: Any,
) -> int:
    """Find the first layer of an ONNX MODEL with outputs out of tolerance on a board.

    Each layer runs alone on the reference's values (isolated). The whole model also runs with all intermediate values
    as outputs (cumulative). These outputs prevent the compiler from fusing layers, so the unchanged model runs too: if
    only this run fails, the cause is fusion. hil runs layers that generate random numbers, but does not judge them.
    In the whole model, hil also does not judge layers that depend on random numbers.

    With --generate, the prompts run first. The layers then receive the inputs of the first wrong call.

    With --over, MODEL runs unchanged on multiple boards with different stacks: on each --board, and on all boards that
    match farm:SELECTOR. hil compares the boards that pass and fail, and names the version that changes the answer.
    """
    from hil.controller.analysis.bisect.find import bisect as find
    from hil.controller.analysis.bisect.find import repeat_command
    from hil.controller.analysis.bisect.result import WAYS, plot_growth, print_bisection
    from hil.controller.analysis.bisect.subject import apply_flow
    from hil.controller.models.flows.flow_registry import load_flow
    from hil.controller.pipeline.settings.options import Options
    from hil.controller.storage.run_context import open_context
    from hil.controller.storage.screen.console import Console
    from hil.controller.storage.screen.pictures import check_picture

    if over:
        _refuse_layer_options()
        return _search_stack(model, over, runs, out, resume=resume, as_json=as_json, settings=settings)
    if resume:
        raise UsageError("--resume requires --over", hint="hil bisect without --over cannot be resumed")
    for key in ("board", "hw_type"):
        values = settings[key]
        if len(values) > 1:
            option = "--board" if key == "board" else "--runtime-hw-type"
            raise UsageError(f"several values of {option} require --over", hint="--over driver", option=option)
        settings[key] = "".join(values)
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


# States in which a board of a farm runs jobs, now or after its check.
_AVAILABLE = ("online", "suspect")
# Options for layers, which --over does not use.
_OF_LAYERS = ("plot", "artifact_model", "isolated", "cumulative", "group", "flow", "generate")


def _refuse_layer_options() -> None:
    """Raise UsageError for an option that --over does not use."""
    given = list_given_options()
    if option := next((given[name] for name in _OF_LAYERS if name in given), ""):
        raise UsageError(f"--over and {option} are mutually exclusive", hint="--over runs the unchanged model")


def _search_stack(
    model: Path, over: str, runs: int, out: Path | None, *, resume: bool, as_json: bool, settings: dict[str, Any]
) -> int:
    from hil.controller.devices.board_choice import use_device
    from hil.controller.devices.choosing.board_resolver import choose
    from hil.controller.pipeline.settings.options import Options
    from hil.controller.storage.run_context import open_context
    from hil.controller.storage.screen.console import Console
    from hil.controller.workloads.stack_search.run import StackSearch, make_choices
    from hil.controller.workloads.stack_search.show import print_search

    for name in ("isolated", "cumulative", "artifact_model", "group", "flow"):
        settings.pop(name)
    boards, unavailable = list_boards(settings.pop("board"))
    hw_types = settings.pop("hw_type")
    ssh = {name: settings.pop(name) for name in SSH}
    if len(hw_types) > 1:
        raise UsageError("--over uses one hardware type", option="--runtime-hw-type")
    hw_type = "".join(hw_types)
    faults, wait_s = settings.pop("faults"), settings.pop("wait_s")
    options = add_project_settings(Options(**settings))

    def choose_with_device(board: str) -> BoardChoice:
        return use_device(choose(board, hw_type, **ssh), options.runtime, options.device)

    search = StackSearch(
        over=over.strip(),
        model=model,
        choices=make_choices(boards, choose_with_device),
        unavailable=unavailable,
        options=options,
        faults=faults,
        wait_s=wait_s,
        runs=runs,
        request=convert_to_json({"model": str(model.resolve()), "hw_type": hw_type, "faults": faults, **settings}),
        out=out,
        resume=resume,
    )
    with Screen(quiet=as_json) as screen, open_context() as context:
        found = search.run(context, screen)
    lines = [f"results in {out}"] if out else []
    return answer(as_json, found, *lines, show=lambda: print_search(Console(), found))


def list_boards(boards: Sequence[str]) -> tuple[list[str], list[TriedBoard]]:
    """Return the values of --board, with ``farm:SELECTOR`` replaced by each matching board of the farm.

    The second list contains the matching boards that run no jobs now, with their state as the reason. A suspect board
    runs jobs after its check.

    Raises UsageError if no matching board runs jobs.
    """
    from hil.controller.records.decisions.stack_search import TriedBoard

    found: list[str] = []
    unavailable: dict[str, TriedBoard] = {}
    for board in boards:
        prefix, separator, text = board.partition(":")
        if prefix != "farm" or not separator:
            found.append(board)
            continue
        wanted = selector.parse(text.strip())
        with connect_farm() as farm:
            matching: list[FarmBoard] = [one for one in farm.ask("boards") if wanted.matches(one.labels)]
            permissions: list[BoardPermission] = farm.ask("access")
        forbidden = {one.board for one in permissions if not one.allowed}
        problems = {one.name: _explain_unavailable(one, forbidden) for one in matching}
        labels = {one.name: one.labels for one in matching}
        for name, reason in problems.items():
            request = f'farm:name="{name}"'
            if reason:
                stack = _list_labelled_parts(labels[name])
                unavailable[request] = TriedBoard(
                    request=request, name=name, stack=stack, answer="board error", reason=reason
                )
            else:
                found.append(request)
        if all(problems.values()):
            reasons = "".join(f"; {name}: {reason}" for name, reason in problems.items())
            raise UsageError(f"no online board matches {board}{reasons}", hint="hil farm boards", option="--board")
    return found, list(unavailable.values())


def _list_labelled_parts(labels: Mapping[str, Any]) -> list[StackPart]:
    """Return the parts of the stack that a board of the farm has as labels."""
    from hil.controller.farm.messages import STACK_LABEL
    from hil.controller.records.stack import StackPart

    return [
        StackPart(name=name.removeprefix(STACK_LABEL), version=str(value), source="config", detail=f"label {name}")
        for name, value in labels.items()
        if name.startswith(STACK_LABEL)
    ]


def _explain_unavailable(board: FarmBoard, forbidden: Collection[str]) -> str:
    """Return why a board of the farm runs no jobs of the user now; "" if it does."""
    if board.name in forbidden:
        return "you may not use the board (hil farm access)"
    if board.state in _AVAILABLE:
        return ""
    return f"the board is {board.state}" + (f": {board.reason}" if board.reason else "")


def read_board_values(settings: dict[str, Any]) -> dict[str, Any]:
    """Return option -> value of a command's board options, for :func:`repeat_options`."""
    named = {"--board": "board", "--runtime-hw-type": "hw_type", "--identity": "identity"}
    named |= {"--known-hosts": "known_hosts"}
    return {option: settings[name] for option, name in named.items()}


def repeat_options(where: dict[str, Any], options: Options, faults: Sequence[str]) -> list[str]:
    """Return the equivalent options of `hil run`: board, compilation, tolerances, faults."""
    named = {
        **where,
        "--runtime": options.runtime,
        "--device": options.device,
        "--rtol": options.rtol,
        "--atol": options.atol,
    }
    found = [text for name, value in named.items() if value not in ("", None) for text in (name, str(value))]
    found += ["--no-fallback"] * options.no_fallback
    repeated = {
        "--compile-flag": options.compile_flags,
        "--allow-blind": options.allow_blind,
        "--allow-flush": options.allow_flush,
        "--fault": faults,
    }
    return [*found, *(text for option, values in repeated.items() for value in values for text in (option, value))]
