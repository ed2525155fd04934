"""`hil bench`: measure a model's speed on a board, and compare two models."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import click

from hil.controller.cli.automatic_history import add_to_history
from hil.controller.cli.commands import make_command
from hil.controller.cli.options import (
    FILE,
    add_project_settings,
    arithmetic_option,
    board_options,
    check_seconds,
    generate_option,
    input_options,
    instructions_option,
    json_option,
    label_option,
    limit_options,
    list_given_options,
    model_options,
    reference_options,
    repetition_options,
    runs_option,
    tolerance_options,
)
from hil.controller.cli.screen import Screen, answer
from hil.controller.cli.times import parse_duration
from hil.controller.cli.usage.candidates import complete_models, complete_stored
from hil.core.examples import locate_example
from hil.errors import UsageError


@make_command(
    epilog="Example: hil bench example:digits_cnn --runtime-hw-type sim --min-time 0.5",
    # flags of IREE's tools may follow --flagfile
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, metavar="[MODEL [MODEL_B]]", shell_complete=complete_models)
@board_options
@click.option(
    "--flagfile",
    type=FILE,
    metavar="FILE",
    help="Flag file of iree-benchmark-module (program, function, inputs, expected outputs); more flags may follow.",
)
@click.option(
    "--min-time",
    "min_time_s",
    default=2.0,
    show_default=True,
    metavar="S",
    callback=check_seconds,
    help="Measured compute time per program, in seconds.",
)
@click.option(
    "--sustained",
    "sustained_s",
    metavar="TIME",
    callback=lambda _, option, value: value and parse_duration(value, option.opts[0]),
    help="Measure for TIME (90s, 30m, 2h) without pauses, and show how the times change.",
)
@click.option(
    "--iterations", type=int, metavar="N", help="Number of timed iterations per program, instead of --min-time."
)
@click.option(
    "--warmup", type=int, metavar="N", help="Number of untimed iterations before the timed ones (default: about 50 ms)."
)
@click.option(
    "--concurrency", default=1, show_default=True, metavar="N", help="Number of programs that run concurrently."
)
@click.option(
    "--against",
    default="",
    metavar="RUN",
    help="Repeat a stored bench unchanged, and compare MODEL with it.",
    shell_complete=complete_stored("bench.json"),
)
@click.option(
    "--min-effect",
    default=3.0,
    show_default=True,
    metavar="PERCENT",
    help="Ignore differences smaller than PERCENT.",
)
@click.option(
    "--fail-if-slower",
    type=float,
    metavar="PERCENT",
    help="Exit with 1 if the second model is slower by more than PERCENT.",
)
@click.option(
    "--settle",
    "settle_s",
    type=float,
    metavar="S",
    help="Wait until the board is steady before measuring, for at most S seconds.",
)
@click.option(
    "--energy/--no-energy",
    default=None,
    help="Measure the energy with the board's meter (default: if the board has one).",
)
@click.option("--no-check", is_flag=True, help="Skip the comparison with a reference.")
@model_options
@input_options
@generate_option
@reference_options
@tolerance_options
@repetition_options
@instructions_option
@arithmetic_option
@limit_options
@click.option("--benchmark-out", type=FILE, metavar="FILE", help="Write Google Benchmark's JSON to FILE.")
@label_option
@runs_option
@json_option
def bench(arguments: tuple[str, ...], as_json: bool, **settings: Any) -> int:
    """Measure the speed of MODEL on a board with the board's clock, or compare it with MODEL_B.

    Two programs are measured alternately on the same board, and reloaded for every round. Only differences beyond noise
    are reported. The outputs are first compared with a CPU reference: incorrect programs are not measured.
    """
    from hil.controller.analysis.bench.job import run_bench
    from hil.controller.analysis.bench.show import print_bench
    from hil.controller.analysis.bench.stats import BenchJob
    from hil.controller.pipeline.settings.flagfiles import read_flagfile
    from hil.controller.pipeline.settings.options import Job
    from hil.controller.storage.screen.console import make_table_console

    models, later = _separate_arguments(arguments, bool(settings["flagfile"]))
    lengths = {"min_time_s": "--min-time", "iterations": "--iterations", "sustained_s": "--sustained"}
    if len(both := [flag for name, flag in lengths.items() if name in list_given_options()]) > 1:
        raise UsageError(f"{both[1]} and {both[0]} are mutually exclusive", hint="use only one of them")
    allowed = settings.pop("fail_if_slower")
    names = (
        *("min_time_s", "iterations", "warmup", "concurrency", "against", "benchmark_out", "settle_s", "sustained_s"),
        "energy",
    )
    own = {name: settings.pop(name) for name in names}
    own["min_effect"] = settings.pop("min_effect") / 100
    own["fail_if_slower"] = None if allowed is None else allowed / 100
    own["check"] = not settings.pop("no_check")
    job = add_project_settings(Job(models=models, **settings))
    if own["energy"] is None and job.energy:
        own["energy"] = True
    if job.flagfile:
        job = read_flagfile(job, later)
    with Screen(quiet=as_json) as screen:
        record = run_bench(BenchJob(job, **own), screen=screen)
    add_to_history(record.folder)
    return answer(as_json, record, show=lambda: print_bench(make_table_console(), record))


def _separate_arguments(arguments: tuple[str, ...], has_flagfile: bool) -> tuple[tuple[Path, ...], list[str]]:
    """Separate the models from the flags of IREE's tools. Such flags require a flag file."""
    flags = [one for one in arguments if one.startswith("-")]
    if flags and not has_flagfile:
        context = click.get_current_context()
        known = [name for option in context.command.params for name in option.opts]
        name = flags[0].partition("=")[0]
        raise click.NoSuchOption(name, possibilities=difflib.get_close_matches(name, known), ctx=context)
    models = tuple(Path(locate_example(one)) for one in arguments if not one.startswith("-"))
    if not models and not has_flagfile:
        raise click.MissingParameter(ctx=click.get_current_context(), param_type="argument", param_hint="'MODEL'")
    return models, flags
