"""`hil farm status`, `boards`, `top` and `events`: what a farm does, and did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.farm_options import connected
from hil.controller.cli.farm_watch import watch
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer
from hil.controller.farm.messages import JobState

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["boards", "events", "status", "top", "watch"]

_MOST = 100_000
limit_option = click.option(
    "--limit",
    default=20,
    show_default=True,
    type=click.IntRange(1, _MOST),
    metavar="N",
    help="At most so many, the newest.",
)


@click.command(
    epilog="""\b
Examples:
  hil farm status
  hil farm status 17.3 --json"""
)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in JobState]),
    help="Only jobs in this state. Repeats.",
)
@click.option("--user", default="", metavar="U", help="Only this user's jobs.")
@limit_option
@json_option
def status(job: str | None, states: tuple[str, ...], user: str, limit: int, as_json: bool) -> None:
    """Show the boards, the queue and the newest jobs; or one JOB, or all jobs of a submission."""
    from hil.errors import UsageError

    if job and (states or user):
        raise UsageError("--state and --user choose from all jobs, and a job is named")
    with connected() as farm:
        if job:
            _show_job(farm, job, as_json)
            return
        stats = farm.ask("stats")
        rows = farm.ask("jobs", state=list(states), user=user, limit=limit)
        if not states:
            # What runs is shown, whatever was queued since.
            running = farm.ask("jobs", state=[JobState.RUNNING.value], user=user, limit=limit)
            rows = _merged(running, rows)
        known = [] if as_json else farm.ask("boards")
    _show_status(stats, rows, known, as_json)


def _merged(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both, each job once, the newest last."""
    from hil.controller.farm.messages import parse_job

    by_name = {row["name"]: row for row in (*some, *others)}
    return sorted(by_name.values(), key=lambda row: (parse_job(row["name"])[0], parse_job(row["name"])[1] or 0))


def _show_status(stats: dict[str, Any], rows: list[dict[str, Any]], known: list[dict[str, Any]], as_json: bool) -> None:
    from hil.controller.cli.farm_tables import jobs_table, line, show, summary, utc_now

    if as_json:
        answer(True, {"stats": stats, "jobs": rows})
        return
    parts = summary(stats, sum(bool(board["job"]) for board in known))
    jobs: list[RenderableType] = [line(""), jobs_table(rows, utc_now())] if rows else []
    show(*parts, *jobs)


def _show_job(farm: Any, name: str, as_json: bool) -> None:
    """One job with its attempts, or the jobs of a submission that has several."""
    from hil.controller.cli.farm_tables import jobs_table, show, utc_now
    from hil.controller.farm.messages import parse_job

    submission, number = parse_job(name)
    rows = farm.ask("jobs", submission=submission, limit=_MOST) if number is None else []
    if len(rows) < 2:
        job = farm.ask("job", name=name)
        answer(as_json, {"job": job})
        if not as_json:
            _print_job(job)
        return
    if as_json:
        answer(True, {"submission": submission, "jobs": rows})
    else:
        show(jobs_table(rows, utc_now()))


def _print_job(job: dict[str, Any]) -> None:
    from hil.controller.cli.farm_tables import attempts_table, jobs_table, line, show, utc_now

    now = utc_now()
    asked = [
        ("selector", job["selector"]),
        ("board", job.get("pinned", "")),
        ("priority", job["priority"]),
        ("project", job["project"]),
    ]
    wishes = [line((f"{label}: ", "bold"), text) for label, text in asked if text]
    parts: list[RenderableType] = [jobs_table([job], now), line(""), *wishes]
    if job["attempts_made"]:
        parts += [line(""), attempts_table(job["attempts_made"], now)]
    show(*parts)


@click.command(epilog='Example: hil farm boards --select "arch=aarch64, mem>=1GiB"')
@click.option("--select", "text", default="", metavar="SELECTOR", help="Only boards that this selector matches.")
@click.option("--wide", is_flag=True, help="All labels, whole: the CPU's features, kernel, libc, ...")
@json_option
def boards(text: str, wide: bool, as_json: bool) -> None:
    """List the boards: how they are and why, what runs on them, and their labels."""
    from hil.controller.cli.farm_tables import boards_table, plain, said_labels, show, utc_now
    from hil.controller.farm import selector

    wanted = selector.parse(text)
    with connected() as farm:
        rows = farm.ask("boards")
    labels = {row["name"]: row["labels"] for row in rows}
    found = [row for row in rows if wanted.matches(labels[row["name"]])]
    if as_json:
        answer(True, {"boards": found})
    elif found:
        show(boards_table(found, utc_now(), labels=not wide))
        for row in found if wide else ():
            click.echo(f"{plain(row['name'])}: {plain(said_labels(row['labels'], wide=True))}")
    elif not rows:
        click.echo("the farm has no boards: hil farm host serves those of a machine", err=True)
    else:
        click.echo("no board matches; the nearest:", err=True)
        for name, misses in selector.nearest(wanted, labels):
            click.echo(f"  {name}: {', '.join(misses)}", err=True)


@click.command(epilog="Example: hil farm top --json")
@json_option
def top(as_json: bool) -> None:
    """Show who has the boards, who waits, and how long jobs wait.

    A user's board time is what counts for sharing: time long ago counts less.
    """
    from hil.controller.cli.farm_tables import latency, line, show, summary, users_table

    with connected() as farm:
        stats = farm.ask("stats")
    if as_json:
        answer(True, {"stats": stats})
        return
    users: list[RenderableType] = [line(""), users_table(stats["users"])] if stats["users"] else []
    show(*summary(stats), latency(stats), *users)


@click.command(epilog="Example: hil farm events --board rpi5")
@click.option("--board", default="", metavar="B", help="Only what happened to this board.")
@click.option("--job", default="", metavar="J", help="Only what happened to this job.")
@limit_option
@json_option
def events(board: str, job: str, limit: int, as_json: bool) -> None:
    """List what happened to boards and jobs, and why."""
    from hil.controller.cli.farm_tables import events_table, show

    with connected() as farm:
        rows = farm.ask("events", board=board, job=job, limit=limit)
    if as_json:
        answer(True, {"events": rows})
    elif rows:
        show(events_table(rows))
    else:
        click.echo("nothing happened", err=True)
