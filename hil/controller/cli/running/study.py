"""`hil study`: compile training steps with multiple compilers, and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.automatic_history import add_to_history
from hil.controller.cli.commands import group
from hil.controller.cli.options import (
    FILE,
    FOLDER,
    board_options,
    choose_board,
    json_option,
    label_option,
    run_option,
    run_options,
    verbose_option,
    wait_option,
)
from hil.controller.cli.screen import Screen, answer
from hil.controller.cli.usage.candidates import complete_list
from hil.errors import UsageError, did_you_mean


@group()
def study() -> None:
    """Run training steps through multiple compilers, and compare with TensorFlow's training.

    See docs/tfcompile.md.
    """


@study.command(epilog="Example: hil study run examples/tfcompile_study --experiment fc -o fc-study")
@click.argument("folder", metavar="STUDY", type=FILE)
@click.option(
    "--compiler",
    "compilers",
    default="tfcompile,iree",
    show_default=True,
    metavar="NAME,...",
    shell_complete=complete_list(lambda: ("tfcompile", "iree")),
    help="Compilers (tfcompile, iree); the table lists them in this order.",
)
@click.option("--experiment", "only", multiple=True, metavar="NAME", help="Run only this experiment. Repeatable.")
@click.option("--steps", default=5, show_default=True, help="Number of training steps to compare.")
@run_option("seed")
@run_option("rtol", default=1e-4, show_default=True, help="Relative tolerance of every loss and variable.")
@run_option("atol", help="Absolute tolerance (default: by dtype, scale and noise of the tensor).")
@run_options("accept", "allow_blind", "no_fallback")
@board_options
@wait_option
@run_option("timeout", default=300.0, help="Timeout for loading, and for each step.")
@label_option
@click.option(
    "-o",
    "--out",
    type=FOLDER,
    default=Path("hil-study"),
    show_default=True,
    metavar="DIR",
    help="Directory for the table (study.json, .csv, .md) and all other results.",
)
@verbose_option
@click.option("--resume", is_flag=True, help="Continue the study in --out, and keep its finished rows.")
@json_option
def run(folder: Path, compilers: str, only: tuple[str, ...], as_json: bool, **settings: Any) -> int:
    """Run the experiments of a STUDY with compilers on a board, and compare every training step.

    The result has a row for every experiment and compiler, with the failed stage and the message, or with the
    differences of the values.
    """
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.workloads.study.record import Asked, read_study, summarize_rows
    from hil.controller.workloads.study.run import run_study
    from hil.controller.workloads.study.show import list_failures, make_terminal_table
    from hil.controller.workloads.study.toolchains import TOOLCHAINS

    toolchains = [name.strip() for name in compilers.split(",")]
    for name in toolchains:
        if name not in TOOLCHAINS:
            hint = f"{did_you_mean(name, TOOLCHAINS)}expected one of {', '.join(TOOLCHAINS)}"
            raise UsageError(f"unknown compiler {name!r}", hint=hint)
    asked = Asked(
        read_study(folder, only),
        list(dict.fromkeys(toolchains)),
        **{name: settings[name] for name in Asked.__dataclass_fields__ if name in settings},
    )
    choice = choose_board(settings)
    with Screen(quiet=as_json) as screen:
        study = run_study(asked, choice, wait_s=settings["wait_s"], screen=screen)
    add_to_history(asked.out)
    rows = study.rows
    lines = [*list_failures(rows), f"{summarize_rows(rows)}; stored in {asked.out}"]
    return answer(as_json, study, *lines, show=lambda: make_table_console().print(make_terminal_table(rows)))
