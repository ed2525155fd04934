"""Options and output of `hil layers --dispatches`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.analysis.bisect import read_board_values, repeat_options
from hil.controller.cli.options import (
    FILE,
    add_project_settings,
    board_options,
    choose_board,
    combine_options,
    limit_options,
    list_given_options,
    run_option,
    run_options,
)
from hil.controller.cli.screen import Screen, answer
from hil.core.runtimes import DEFAULT_RUNTIME
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.records.decisions.bisect import BisectFinding
    from hil.controller.records.measurements.dispatches import DispatchList
    from hil.controller.records.run import StoredSpec

_RUN_OPTIONS = ("device", "function", "compile_flags", "recompute", "rtol", "atol", "instructions")
_COUNTS = {"iterations": 10, "warmup": 2}
# Parameters that require --dispatches, and parameters that exclude it.
_OWN = (
    *("keys", "out", "board", "hw_type", "identity", "known_hosts", "accept_new_host_key"),
    *(*_RUN_OPTIONS, *_COUNTS, "timeout", "no_fallback", "wait_s", "faults"),
)
_OTHERS = ("group", "start", "end", "save", "node_data", "by", "values", "inputs")

dispatch_options = combine_options(
    click.option("--dispatches", is_flag=True, help="Run each dispatch of the IREE program alone on the board."),
    click.option(
        "--dispatch",
        "keys",
        multiple=True,
        metavar="KEY",
        help="With --dispatches: run only this dispatch. Repeatable.",
    ),
    click.option("--out", type=FILE, metavar="DIR", help="With --dispatches: store results and failing dispatches."),
    board_options,
    run_options(*_RUN_OPTIONS),
    run_option("iterations", default=_COUNTS["iterations"]),
    run_option("warmup", default=_COUNTS["warmup"]),
    limit_options,
)


def split_dispatch_settings(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the options for dispatches from a command's settings. Return them, or None without --dispatches.

    Raises:
        UsageError: an option needs --dispatches, or --dispatches excludes it.
    """
    wanted, given = settings.pop("dispatches"), list_given_options()
    own = {name: settings.pop(name) for name in _OWN}
    for name in _OTHERS if wanted else _OWN:
        if name in given:
            why = "cannot be used with --dispatches" if wanted else "requires --dispatches"
            raise UsageError(f"{given[name]} {why}", option=given[name])
    return {**own, "dims": settings["dims"], "seed": settings["seed"]} if wanted else None


def run_dispatches(model: Path, settings: dict[str, Any], *, as_json: bool) -> int:
    """Run a model's dispatches and print the results. Return the exit code."""
    from hil.controller.analysis.dispatches.check import check_dispatches
    from hil.controller.devices.board_choice import use_device
    from hil.controller.pipeline.settings.options import Options
    from hil.controller.storage.run_context import open_context

    where = read_board_values(settings)
    choice = use_device(choose_board(settings), DEFAULT_RUNTIME, settings["device"])
    more = {name: settings.pop(name) for name in ("keys", "faults", "wait_s", "out")}
    options = add_project_settings(Options(**settings))
    repeat = repeat_options(where, options, more["faults"])
    with Screen(quiet=as_json) as screen, open_context() as context:
        found = check_dispatches(
            model, choice, context=context, screen=screen, options=options, board_options=repeat, **more
        )
    lines = [f"results in {found.folder}"] if found.folder else []
    if first := next((one.run for one in found.dispatches if one.run), ""):
        lines.append(f"repeat the first with: {first}")
    return answer(as_json, found, *lines, show=lambda: _print_dispatches(found))


def _print_dispatches(found: DispatchList) -> None:
    from hil.controller.analysis.dispatches.check import list_reasons
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.storage.screen.texts import format_seconds, make_table
    from hil.core.results import Outcome

    has_counts = any(one.instructions is not None for one in found.dispatches)
    rows = []
    for one in found.dispatches:
        time = format_seconds(None if one.device_p50_ns is None else float(one.device_p50_ns) / 1e9)
        nodes = ", ".join(one.nodes) or "-"
        sides = (_describe_specs(one.inputs), _describe_specs(one.outputs))
        compiled = format_seconds(None if one.compile_s is None else float(one.compile_s))
        error = _describe_error(one.finding)
        counted = "-" if one.instructions is None else f"{one.instructions:,.0f}"
        counts = [counted] if has_counts else []
        rows.append((one.key, nodes, *sides, one.finding.outcome.value, error, time, *counts, compiled))
    numbers = ("max abs", "p50", *["instructions"] * has_counts, "compile")
    console = make_table_console()
    heads = ("dispatch", "nodes", "inputs", "outputs", "outcome", *numbers)
    console.print(make_table(heads, rows, numbers=numbers, whole=("outcome",)))
    for reason in list_reasons(found):
        console.print(reason, style="dim", markup=False, highlight=False, soft_wrap=True)
    passed = sum(one.finding.outcome is Outcome.PASS for one in found.dispatches)
    click.echo(f"{passed} of {len(found.dispatches)} dispatches passed on {found.board}")


def _describe_specs(specs: list[StoredSpec]) -> str:
    from hil.core.tensors import type_text

    return ", ".join(type_text(spec.dtype, spec.shape) for spec in specs) or "-"


def _describe_error(finding: BisectFinding) -> str:
    if any(one.nonfinite for one in finding.outputs):
        return "NaN/Inf"
    return "-" if finding.max_abs is None else f"{float(finding.max_abs):.3g}"
