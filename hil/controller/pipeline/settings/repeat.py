"""Build the command that repeats a run or a case."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hil.controller.models.sizing.sizes import format_range
from hil.controller.pipeline.settings.option_words import format_option_values, format_option_words
from hil.controller.pipeline.settings.options import Job, RunSettings, flag_of, list_specs


def run_command(job: Job, models: Sequence[Path] = ()) -> str:
    """Return the `hil run` command that repeats a job, with the options that can change its results.

    Args:
        models: A subset of the job's models; empty means all.
    """
    usual = Job()
    words = ["hil", "run", *map(str, models or job.models)]
    named: list[tuple[str, Any]] = [
        ("--board", job.board),
        ("--runtime-hw-type", job.hw_type),
        ("--identity", job.identity),
        ("--known-hosts", job.known_hosts),
        ("--flagfile", job.flagfile),
        *(("--fault", fault) for fault in job.faults),
    ]
    for name, spec in list_specs(RunSettings).items():
        value = getattr(job, name)
        if name == "dims":
            value = {**value, **{symbol: format_range(sizes) for symbol, sizes in job.dim_ranges.items()}}
        if not spec.help or not spec.decides or value == getattr(usual, name):
            continue
        named += [(flag_of(name, spec), one) for one in format_option_values(name, value, repeats=spec.repeats)]
    given = [(flag, value) for flag, value in named if value not in (None, "")]
    return shlex.join([*words, *format_option_words(given)])
