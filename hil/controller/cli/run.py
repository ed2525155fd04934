"""`hil run`: the main job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from hil.controller.cli.options import board_options, json_option, model_options, parse_dims, parse_range, seconds


@click.command(
    epilog="Example: hil run examples/digits/digits_cnn.onnx --runtime-hw-type sim --iterations 20 --warmup 3"
)
@click.argument("models", nargs=-1, type=click.Path(path_type=Path), metavar="MODEL...")
@board_options
@model_options
@click.option(
    "--input", "inputs", multiple=True, metavar="[NAME=]FILE", help="x.npy, x.npz, x.pb or 4x8xf32=@x.bin; else random."
)
@click.option("--seed", default=0, show_default=True, help="Of the random inputs.")
@click.option("--input-range", default="", metavar="LOW:HIGH", help="Of the random inputs' values.")
@click.option(
    "--reference",
    "references",
    multiple=True,
    metavar="NAME",
    help="onnxruntime, iree-llvm-cpu, onnx-reference; repeats.",
)
@click.option("--expected", multiple=True, metavar="[NAME=]FILE", help="Expected outputs instead of a reference.")
@click.option("--rtol", type=float, help="Relative tolerance (default: by dtype).")
@click.option("--atol", type=float, help="Absolute tolerance (default: by dtype).")
@click.option("--iterations", default=1, show_default=True, help="Timed runs.")
@click.option("--warmup", default=0, show_default=True, help="Untimed runs before.")
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    metavar="S",
    callback=seconds,
    help="Limit of loading, of the runs together, of a reference.",
)
@click.option("--flagfile", type=click.Path(path_type=Path), metavar="FILE", help="An iree-run-module flag file.")
@click.option(
    "--wait",
    "wait_s",
    default=60.0,
    show_default=True,
    metavar="S",
    callback=seconds,
    help="How long to wait for a busy board.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="Of a simulator: crash, hang, corrupt, drop, slow, kill-agent.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Where runs are stored (default: hil-runs)."
)
@click.option("--resume", default="", metavar="ID", help="Go on with a run that was cut off.")
@json_option
def run(models: tuple[Path, ...], as_json: bool, **settings: Any) -> int:
    """Compile MODELs, run them on a board, and compare the answers with a CPU reference.

    Several models are compiled in parallel while the board runs. Everything is stored as it comes, below --out.
    """
    from hil.controller.cli.screen import Screen
    from hil.controller.jobs import Job, run_job

    job = Job(models=models, **_job_settings(settings))
    with Screen(quiet=as_json or not sys.stderr.isatty()) as screen:
        record = run_job(job, resume=settings["resume"], screen=screen)
    if as_json:
        from hil.controller.cli.screen import print_json

        print_json(record)
    else:
        screen.show(record)
    return int(record["exit_code"])


def _job_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The command line's values as a job has them."""
    board = ("board", "hw_type", "identity", "known_hosts", "accept_new_host_key")
    plain = ("function", "inputs", "seed", "references", "rtol", "atol", "iterations", "warmup")
    more = ("timeout", "wait_s", "faults", "compile_flags", "debug_ir", "expected", "flagfile", "out")
    return {
        **{name: settings[name] for name in (*board, *plain, *more)},
        "runtime": settings["runtime"],
        "dims": parse_dims(settings["dims"]),
        "input_range": parse_range(settings["input_range"]),
        "recompute": settings["recompute_cache"],
    }
