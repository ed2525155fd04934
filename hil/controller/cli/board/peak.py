"""`hil board peak`: measure the peaks of a board for rooflines."""

from __future__ import annotations

from typing import Any

import click

from hil.controller.cli.board.options import add_board_place, choose_place
from hil.controller.cli.commands import make_command, read_project_board
from hil.controller.cli.options import check_seconds, json_option, run_options, wait_option
from hil.controller.cli.screen import Screen, answer
from hil.errors import UsageError

_TYPES = ("f32", "f16", "int8")


@make_command("peak", epilog="Example: hil board peak sim --dtype f32")
@add_board_place
@run_options("runtime", "device", "compile_flags", "timeout")
@wait_option
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(_TYPES),
    help="Type to measure; repeatable (default: f32 and int8; on a GPU also f16).",
)
@click.option(
    "--min-time",
    "min_time_s",
    default=1.0,
    show_default=True,
    metavar="S",
    callback=check_seconds,
    help="Measured time per size, in seconds.",
)
@click.option(
    "--memory",
    "memory_mib",
    type=int,
    metavar="MIB",
    help="Maximum size of the arrays (default: a tenth of the board's memory, at most 768).",
)
@click.option("--stored", is_flag=True, help="Show the stored peaks of the board, without a measurement.")
@json_option
def measure_peak(as_json: bool, stored: bool, **settings: Any) -> int:
    """Measure the highest operations and bytes per second of a board, and store them.

    The programs are matrix multiplications, and sums of arrays that are larger than the caches. The board's compiler,
    runtime and device run them like a model. `hil profile roofline` compares profiles with the stored peaks.
    """
    from hil.controller.analysis.roofline.peak_store import find_data_sheet, list_peaks
    from hil.controller.analysis.roofline.show_peaks import list_all_lines
    from hil.controller.pipeline.settings.options import Job
    from hil.controller.records.measurements.roofline import PeakReport
    from hil.controller.workloads.board_peaks.job import PeakJob, measure_board

    own = {name: settings.pop(name) for name in ("dtypes", "min_time_s", "memory_mib")}
    place = {name: settings[name] for name in ("identity", "known_hosts", "accept_new_host_key")}
    if not (settings["addr"] or settings["board"] or settings["hw_type"]):
        settings["board"], settings["hw_type"] = read_project_board()
    place |= {"board": settings["addr"] or settings["board"], "hw_type": settings["hw_type"]}
    choice = choose_place(settings)
    if stored:
        found = [*list_peaks(choice.name), *filter(None, [find_data_sheet(choice.name)])]
        if not found:
            raise UsageError(f"no stored peaks of board {choice.name}", hint=f"run: hil board peak {choice.name}")
        return answer(as_json, PeakReport(board=choice.name, peaks=found, file=""), *list_all_lines(found))
    job = Job(**settings, **place)
    with Screen(quiet=as_json) as screen:
        peaks, file = measure_board(PeakJob(job, **own), choice, screen)
    report = PeakReport(board=choice.name, peaks=[peaks], file=str(file))
    return answer(as_json, report, *list_all_lines([peaks]), f"stored in {file}")
