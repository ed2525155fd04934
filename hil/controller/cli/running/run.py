"""`hil run`: run models on a board and compare the outputs with a CPU reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.automatic_history import add_to_history
from hil.controller.cli.commands import make_command
from hil.controller.cli.options import (
    FILE,
    MODEL,
    add_project_settings,
    arithmetic_option,
    cache_options,
    choose_profiled_counts,
    generate_option,
    input_options,
    instructions_option,
    iteration_options,
    json_option,
    label_option,
    limit_options,
    profile_options,
    reference_options,
    refuse_with_resume,
    run_option,
    runs_option,
    split_targets,
    target_options,
    target_program_options,
    tolerance_options,
)
from hil.controller.cli.screen import Screen, answer, answer_matrix, print_cases
from hil.controller.cli.usage.candidates import complete_runs


@make_command(
    epilog="""\b
Examples:
  hil run example:digits_cnn --runtime-hw-type sim --iterations 20 --warmup 3
  hil run example:digits_cnn --runtime iree --runtime onnxruntime --board rpi4 --board rpi5"""
)
@click.argument("models", nargs=-1, type=MODEL, metavar="MODEL...")
@target_options
@target_program_options
@cache_options
@input_options
@generate_option
@reference_options
@tolerance_options
@arithmetic_option
@iteration_options
@instructions_option
@run_option("energy")
@limit_options
@profile_options
@click.option("--flagfile", type=FILE, metavar="FILE", help="Flag file of iree-run-module.")
@label_option
@runs_option
@click.option("--resume", default="", metavar="ID", help="Continue an interrupted run.", shell_complete=complete_runs)
@json_option
def run(models: tuple[Path, ...], resume: str, as_json: bool, **settings: Any) -> int:
    """Compile MODELs, run them on a board, and compare the outputs with a CPU reference.

    Several models are compiled in parallel while the board runs. Results are stored continuously in --out. With several
    values of --board, --runtime-hw-type or --runtime, each combination is a target. The result is then a table with a
    row per model and a column per target.
    """
    from hil.controller.pipeline.settings.options import Job
    from hil.controller.storage.runs import MATRIX, RunStore
    from hil.controller.workloads.run_job import run_job

    if resume:
        refuse_with_resume("models", "resume", "out", "as_json")
    settings |= choose_profiled_counts(settings)
    targets = split_targets(settings, "runtime", "board", "hw_type")
    job = add_project_settings(Job(models=models, **settings))
    stored = RunStore(job.out).find_folder(resume) if resume else None
    with Screen(quiet=as_json) as screen:
        if len(targets) > 1 or (stored and (stored / MATRIX).exists()):
            from hil.controller.workloads.matrix.workloads import resume_job_matrix, run_job_matrix

            made = resume_job_matrix(stored, screen=screen) if stored else run_job_matrix(job, targets, screen=screen)
            add_to_history(made[0])
            return answer_matrix(as_json, *made)
        record = run_job(job, resume=resume, screen=screen)
    add_to_history(record.folder or None)
    return answer(as_json, record, show=lambda: print_cases(record))
