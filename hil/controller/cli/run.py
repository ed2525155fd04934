"""`hil run`: run models on a board and compare the outputs with a CPU reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.commands import command
from hil.controller.cli.options import (
    FILE,
    FOLDER,
    board_options,
    compile_profile_option,
    given_options,
    input_options,
    iteration_options,
    json_option,
    limit_options,
    model_options,
    reference_options,
    refuse_beside_resume,
    runs_option,
    tolerance_options,
)
from hil.controller.cli.screen import Screen, answer, print_cases


@command(epilog="Example: hil run examples/digits/digits_cnn.onnx --runtime-hw-type sim --iterations 20 --warmup 3")
@click.argument("models", nargs=-1, type=FILE, metavar="MODEL...")
@board_options
@model_options
@input_options
@reference_options
@tolerance_options
@iteration_options
@limit_options
@click.option(
    "--profile",
    type=FOLDER,
    metavar="DIR",
    help="Also run under the runtime's profiler and write a Perfetto trace and a table of operations here "
    "(then 10 iterations after 2 warm-ups by default).",
)
@compile_profile_option
@click.option("--flagfile", type=FILE, metavar="FILE", help="An iree-run-module flag file.")
@runs_option
@click.option("--resume", default="", metavar="ID", help="Go on with a run that was cut off.")
@json_option
def run(models: tuple[Path, ...], resume: str, as_json: bool, **settings: Any) -> int:
    """Compile MODELs, run them on a board, and compare the answers with a CPU reference.

    Several models are compiled in parallel while the board runs. Everything is stored as it comes, below --out.
    """
    from hil.controller.pipeline.options import PROFILED_COUNTS, Job
    from hil.controller.workloads.run_job import run_job

    if resume:
        refuse_beside_resume("models", "resume", "out", "as_json")
    if settings["profile"]:
        settings |= {name: count for name, count in PROFILED_COUNTS.items() if name not in given_options()}
    job = Job(models=models, **settings)
    with Screen(quiet=as_json) as screen:
        record = run_job(job, resume=resume, screen=screen)
    return answer(as_json, record, show=lambda: print_cases(record))
