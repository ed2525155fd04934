"""`hil reduce`: reduce a failing model to the smallest model with the same failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import (
    FILE,
    MODEL,
    add_project_settings,
    arithmetic_option,
    board_options,
    input_options,
    iteration_options,
    json_option,
    label_option,
    limit_options,
    list_given_options,
    model_options,
    reference_options,
    refuse_with_resume,
    runs_option,
    tolerance_options,
)
from hil.controller.cli.screen import Screen, answer
from hil.controller.cli.usage.candidates import complete_runs, complete_stored
from hil.errors import UsageError

# Options that a stored run does not define.
_OF_REDUCTION = frozenset({"source", "case", "max_runs", "out", "signing_key", "as_json", "board", "hw_type", "faults"})


@make_command(
    epilog="""\b
Examples:
  hil reduce example:digits_cnn --runtime onnxruntime --fault crash:needs=conv2
  hil reduce latest --max-runs 20
  hil reduce example:digits_cnn --slow 0.6"""
)
@click.argument("source", required=False, type=MODEL, metavar="MODEL|RUN", shell_complete=complete_runs)
@board_options
@model_options
@input_options
@reference_options
@tolerance_options
@arithmetic_option
@iteration_options
@limit_options
@click.option("--case", default="", metavar="NAME", help="Failed case of RUN (default: the first).")
@click.option(
    "--max-runs",
    type=click.IntRange(3, 10_000),
    default=64,
    show_default=True,
    metavar="N",
    help="Maximum number of runs on the board.",
)
@click.option(
    "--slow",
    type=click.FloatRange(0, 1, min_open=True),
    is_flag=False,
    flag_value=0.5,
    default=None,
    metavar="SHARE",
    help="Find the smallest model that takes this share of the time (default: 0.5), instead of a failing model.",
)
@click.option("--sign", "signing_key", type=FILE, metavar="KEY", help="Private ed25519 key to sign the bundle.")
@label_option
@runs_option
@click.option(
    "--resume",
    default="",
    metavar="ID",
    help="Continue an interrupted reduction.",
    shell_complete=complete_stored("reduce.json"),
)
@json_option
def reduce(
    source: Path | None,
    case: str,
    max_runs: int,
    slow: float | None,
    signing_key: Path | None,
    resume: str,
    as_json: bool,
    **settings: Any,
) -> int:
    """Reduce a failing MODEL, or a failed case of a stored RUN, to the smallest model with the same failure.

    hil runs each smaller model on the board. A model replaces the smallest model so far if it fails in the same way:
    same outcome, stage, and kind of difference or error message. The result is a directory with the model, the inputs,
    the outputs of board and reference, a bug report in Markdown, and a bundle. The exit code is that of the failure.

    With --slow, the model does not fail but is slow, and hil finds the part that takes most of the time.
    """
    from hil.controller.pipeline.settings.options import Job
    from hil.controller.storage.paths import is_file
    from hil.controller.storage.run_context import open_context
    from hil.controller.workloads.reduce.candidates.sources import find_reduction, restore_job
    from hil.controller.workloads.reduce.reducing import reduce_model
    from hil.controller.workloads.reduce.show import print_reduction

    where: Path | None = None
    if resume:
        refuse_with_resume("resume", "out", "as_json", "signing_key")
        where = find_reduction(settings["out"], resume)
        job = Job(out=settings["out"])
    elif source is None:
        raise UsageError("missing argument MODEL|RUN", hint="hil reduce MODEL, or hil reduce --help")
    elif is_file(source):
        if case:
            raise UsageError("--case needs a stored run", hint="hil reduce RUN --case NAME")
        job = add_project_settings(Job(models=(source,), **settings))
    else:
        for name, option in list_given_options().items():
            if name not in _OF_REDUCTION:
                raise UsageError(f"{option} cannot be given with a stored run", hint="hil uses the options of the run")
        job = restore_job(settings["out"], str(source), case)
        given = {name: settings[name] for name in ("board", "hw_type", "faults") if name in list_given_options()}
        job = replace(job, **given)
    with Screen(quiet=as_json) as screen, open_context() as context:
        record = reduce_model(
            job, context=context, screen=screen, max_runs=max_runs, slow=slow, resume=where, signing_key=signing_key
        )
    return answer(as_json, record, show=lambda: print_reduction(record))
