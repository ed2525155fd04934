"""`hil eval`: score a model on a dataset, on a board and on a CPU reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hil.controller.cli.automatic_history import add_to_history
from hil.controller.cli.commands import make_command
from hil.controller.cli.options import (
    MODEL,
    add_project_settings,
    board_options,
    json_option,
    label_option,
    limit_options,
    model_options,
    refuse_with_resume,
    run_option,
    runs_option,
)
from hil.controller.cli.screen import Screen, answer
from hil.controller.cli.usage.candidates import choose_names, complete_stored
from hil.errors import UsageError


@make_command(
    "eval",
    epilog="Example: hil eval example:digits_cnn --dataset example:digits_test --metric top1",
)
@click.argument("model", required=False, type=MODEL)
@click.option(
    "--dataset", type=MODEL, metavar="DIR|FILE", help="Samples with labels: a directory, .npz, .csv or .jsonl."
)
@click.option(
    "--metric",
    default="",
    metavar="NAME|FILE.py",
    shell_complete=choose_names("top1", "top5", "map", "wer", "mse", files=True),
    help="top1, top5, map, wer, mse, or a Python file: FILE.py[:FUNCTION].",
)
@click.option(
    "--output", "scored_output", default="", metavar="NAME", help="Output to score (default: the model's only output)."
)
@click.option(
    "--max-drop",
    type=float,
    metavar="PERCENT",
    help="Exit with 1 if the score is worse than the reference's by more than PERCENT; stop when the result is clear.",
)
@board_options
@model_options
@run_option("seed", help="Seed for the sample order and the bootstrap.")
@click.option(
    "--reference-model",
    type=MODEL,
    metavar="FILE",
    help="Model of the reference, such as the model before quantization (default: MODEL).",
)
@run_option("references", help="Reference to score: onnxruntime, iree-llvm-cpu, ... (default: by the model's format).")
@limit_options
@label_option
@runs_option
@click.option(
    "--resume",
    default="",
    metavar="ID",
    help="Continue an interrupted evaluation.",
    shell_complete=complete_stored("eval.json"),
)
@json_option
def evaluate(model: Path | None, resume: str, as_json: bool, **settings: Any) -> int:
    """Run the samples of a dataset on a board and on a CPU reference, and compare the scores of MODEL.

    The program is loaded once. The difference has a paired 95 % interval. Each finished sample is stored.
    """
    from hil.controller.pipeline.settings.options import Job
    from hil.controller.records.decisions.evaluation import EvaluationSettings
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.workloads.evaluation.job import run_evaluation
    from hil.controller.workloads.evaluation.show import print_evaluation

    own = {name: settings.pop(name) for name in ("dataset", "metric", "scored_output", "max_drop", "reference_model")}
    chosen = None
    if resume:
        refuse_with_resume("resume", "out", "as_json")
    else:
        given = {"MODEL": model, "--dataset": own["dataset"], "--metric": own["metric"]}
        if missing := [name for name, value in given.items() if not value]:
            raise UsageError(f"missing {', '.join(missing)}", hint="hil eval MODEL --dataset DIR --metric top1")
        chosen = EvaluationSettings(
            dataset=str(own["dataset"]),
            metric=own["metric"],
            output=own["scored_output"],
            reference_model=str(own["reference_model"] or ""),
            max_drop=own["max_drop"],
        )
    job = add_project_settings(Job(models=(model,) if model else (), **settings))
    with Screen(quiet=as_json) as screen:
        record = run_evaluation(job, chosen, resume=resume, screen=screen)
    add_to_history(record.folder)
    return answer(as_json, record, show=lambda: print_evaluation(make_table_console(), record))


# The verb's name, which is also a built-in function.
eval = evaluate
