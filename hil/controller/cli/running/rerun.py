"""`hil rerun`: repeat a stored measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import add_project_settings, json_option, runs_option, stored_board_options
from hil.controller.cli.screen import Screen, answer
from hil.controller.cli.usage.candidates import complete_stored

if TYPE_CHECKING:
    from hil.controller.records.measurements.rerun import RerunRecord


@make_command(epilog="Example: hil rerun latest --settle 60")
@click.argument("run", shell_complete=complete_stored("bench.json"))
@stored_board_options
@click.option(
    "--settle", "settle_s", type=float, metavar="S", help="Wait until the board is steady, at most S seconds."
)
@click.option(
    "--min-effect", default=3.0, show_default=True, metavar="PERCENT", help="Ignore differences smaller than PERCENT."
)
@runs_option
@json_option
def rerun(run: str, as_json: bool, settle_s: float | None, min_effect: float, **settings: Any) -> int:
    """Repeat the stored bench RUN on its board, and report what differs.

    RUN is an ID, a directory, a file bench.json, or `latest`. hil runs the stored program with the stored inputs.
    """
    from hil.controller.analysis.bench.rerun import rerun_bench
    from hil.controller.pipeline.settings.options import Job

    job = add_project_settings(Job(models=(), **settings))
    with Screen(quiet=as_json) as screen:
        found = rerun_bench(run, job, settle_s=settle_s, min_effect=min_effect / 100, screen=screen)
    return answer(as_json, found, show=lambda: _print_rerun(found))


def _print_rerun(found: RerunRecord) -> None:
    from hil.controller.analysis.bench.show import format_median
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.storage.screen.texts import keep_units, make_table, show

    console = make_table_console()
    rows = [
        (title, one.outcome, one.grade.grade if one.grade else "-", keep_units(format_median(one.times)), one.id)
        for title, one in (("stored", found.stored), ("now", found.now))
        if one.times
    ]
    show(console, make_table(("", "outcome", "grade", "median", "run"), rows))
    lines = [f"not comparable: {reason}" for reason in found.not_comparable]
    if found.comparison is not None:
        interval = found.comparison.interval
        limits = f"{interval.level:.0%}: {interval.low:.3f} to {interval.high:.3f}"
        lines.append(f"{found.comparison.verdict}: now {found.comparison.ratio:.3f} times the stored median ({limits})")
    lines += [f"differs: {one.name}: {one.stored or '-'} -> {one.now or '-'}" for one in found.differences]
    if not found.differences:
        lines.append("board, versions and conditions are the same")
    for line in (*lines, f"stored in {found.now.folder}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
