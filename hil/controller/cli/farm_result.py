"""`hil farm logs`, `result` and `cancel`: one job, or all of a submission."""

from __future__ import annotations

from pathlib import Path

import click

from hil.controller.cli.options import json_option

_job = click.argument("job", metavar="JOB")


@click.command(epilog="Example: hil farm logs 17 -f")
@_job
@click.option("-f", "--follow", "live", is_flag=True, help="Go on until it has ended.")
@json_option
def logs(job: str, live: bool, as_json: bool) -> int:
    """Show what a JOB printed: a submission as 17, one of its jobs as 17.3."""
    from hil.controller.cli.farm_wait import follow
    from hil.controller.cli.screen import print_json
    from hil.controller.farm.client import FarmClient
    from hil.controller.farm.paths import farm_address
    from hil.errors import UsageError

    if live and as_json:
        raise UsageError("--json is one document, and --follow has no end yet", hint="leave one of them out")
    with FarmClient(farm_address()) as farm:
        if live:
            follow(farm, [job], print_line=click.echo)
            return 0
        pieces = farm.ask("logs", name=job)
    if as_json:
        print_json({"schema": 1, "logs": pieces})
        return 0
    several = len({piece["job"] for piece in pieces}) > 1
    for piece in pieces:
        for line in piece["text"].splitlines():
            click.echo(f"{piece['job']}  {line}" if several else line)
    return 0


@click.command(epilog="Example: hil farm result 17 --out hil-runs/from-farm")
@_job
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Fetch what it made.")
@json_option
def result(job: str, out: Path | None, as_json: bool) -> int:
    """Show how a JOB ended; the exit code is its own.

    With --out also what it made is fetched: the run's folder, as `hil run` makes it. A suite's parts become one suite
    run with all its reports, below hil-suites where --out says nothing.
    """
    from hil.controller.cli.farm_wait import show
    from hil.controller.farm.client import FarmClient
    from hil.controller.farm.paths import farm_address
    from hil.controller.farm.results import outcomes

    with FarmClient(farm_address()) as farm:
        return show(farm, job, outcomes(farm, job), out=out, as_json=as_json)


@click.command(epilog="Example: hil farm cancel 17")
@_job
@json_option
def cancel(job: str, as_json: bool) -> int:
    """End a JOB, or take it out of the queue; of a submission all that have not ended."""
    from hil.controller.cli.screen import print_json
    from hil.controller.farm.client import FarmClient
    from hil.controller.farm.paths import farm_address

    with FarmClient(farm_address()) as farm:
        ended = farm.do("cancel", name=job)["cancelled"]
    if as_json:
        print_json({"schema": 1, "cancelled": ended})
    else:
        click.echo(f"cancelled {', '.join(ended)}" if ended else f"{job} had ended already")
    return 0
