"""`hil farm logs`, `result` and `cancel`: one job, or all of a submission."""

from __future__ import annotations

from pathlib import Path

import click

from hil.controller.cli.farm_options import connected
from hil.controller.cli.options import FOLDER, json_option
from hil.controller.cli.screen import answer

_job = click.argument("job", metavar="JOB")


@click.command(epilog="Example: hil farm logs 17 -f")
@_job
@click.option("-f", "--follow", "live", is_flag=True, help="Go on until it has ended.")
@json_option
def logs(job: str, live: bool, as_json: bool) -> int:
    """Show what a JOB printed: a submission as 17, one of its jobs as 17.3."""
    from hil.controller.cli.farm_wait import follow
    from hil.errors import UsageError

    if live and as_json:
        raise UsageError("--json is one document, and --follow has no end yet", hint="leave one of them out")
    with connected() as farm:
        if live:
            follow(farm, [job], print_line=click.echo)
            return 0
        pieces = farm.ask("logs", name=job)
    several = len({piece["job"] for piece in pieces}) > 1
    lines = [(piece["job"], line) for piece in pieces for line in piece["text"].splitlines()]
    answer(as_json, {"logs": pieces}, *(f"{name}  {line}" if several else line for name, line in lines))
    return 0


@click.command(epilog="Example: hil farm result 17 --out hil-runs/from-farm")
@_job
@click.option("--out", type=FOLDER, metavar="DIR", help="Fetch what it made.")
@json_option
def result(job: str, out: Path | None, as_json: bool) -> int:
    """Show how a JOB ended; the exit code is its own.

    With --out also what it made is fetched: the run's folder, as `hil run` makes it. A suite's parts become one suite
    run with all its reports, below hil-suites where --out says nothing.
    """
    from hil.controller.cli.farm_wait import show
    from hil.controller.farm.results import outcomes

    with connected() as farm:
        return show(farm, job, outcomes(farm, job), out=out, as_json=as_json)


@click.command(epilog="Example: hil farm cancel 17")
@_job
@json_option
def cancel(job: str, as_json: bool) -> None:
    """End a JOB, or take it out of the queue; of a submission all that have not ended."""
    with connected() as farm:
        ended = farm.do("cancel", name=job)["cancelled"]
    text = f"cancelled {', '.join(ended)}" if ended else f"{job} had ended already"
    answer(as_json, {"cancelled": ended}, text)
