"""`hil farm status`, `boards`, `top`, `events` and `watch`: show a farm's state and history."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.farm.options import connect_farm
from hil.controller.cli.farm.tables import (
    ATTEMPTS,
    EVENTS,
    JOBS,
    USERS,
    describe_latency,
    line,
    list_quarantined,
    make_boards_table,
    make_plain,
    make_table,
    show,
    summarize_farm,
    to_local_time,
)
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.times import parse_past
from hil.controller.farm.client.turns import add_turns, turn_text
from hil.controller.farm.client.wording import format_labels
from hil.controller.farm.messages import BoardState, JobState, parse_job
from hil.controller.records.commands.farm import (
    EventList,
    FarmBoardList,
    FarmStatus,
    JobReport,
    StatsReport,
    SubmissionStatus,
)
from hil.controller.records.lab.farm import FarmAttempt, FarmBoard, FarmEvent, FarmJob, FarmStats, JobDetails
from hil.errors import UsageError, did_you_mean, format_expected

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hil.controller.farm.client.client import FarmClient

T = TypeVar("T")
_MAX_ROWS = 100_000
# Default job count to show, and jobs per request.
_JOBS_SHOWN, _PAGE = 20, 5_000
_MIN_JOBS = 20
# Maximum number of later events that may be stored before a delayed event.
_BEHIND = 500
# Numbers of events to request. hil tries them in this order and stops at the first number that suffices.
_EVENTS = (200, 5_000, 100_000)
# Number of lines that are not table rows: summary, headers, separator, cursor.
_OTHER_LINES = 8
_MIN_LINES = 4
limit_option = click.option(
    "--limit",
    default=20,
    show_default=True,
    type=click.IntRange(1, _MAX_ROWS),
    metavar="N",
    help="Maximum number of events, the newest first.",
)


@make_command(
    epilog="""\b
Examples:
  hil farm status
  hil farm status --mine --failed --since "mon 9:00"
  hil farm status 17.3 --json"""
)
@click.argument("job", required=False, metavar="[JOB]")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in JobState]),
    help="Show only jobs in this state. Repeatable.",
)
@click.option("--user", default="", metavar="USER", help="Show only this user's jobs.")
@click.option("--mine", is_flag=True, help="Show only your jobs.")
@click.option("--failed", is_flag=True, help="Show only finished jobs without success.")
@click.option(
    "--since", default="", metavar="TIME", help="Show only jobs queued after: 2h, 3d, 9:00, mon (local time)."
)
@click.option(
    "--limit",
    type=click.IntRange(1, _MAX_ROWS),
    metavar="N",
    help=f"Maximum number of newest jobs (default: {_JOBS_SHOWN}; with --json all).",
)
@json_option
def status(
    job: str | None,
    states: tuple[str, ...],
    user: str,
    mine: bool,
    failed: bool,
    since: str,
    limit: int | None,
    as_json: bool,
) -> None:
    """Show boards, the queue and the newest jobs; or a JOB, or all jobs of a submission."""
    given = {"--state": states, "--user": user, "--mine": mine, "--failed": failed, "--since": since}
    if job and (options := [option for option, value in given.items() if value]):
        raise UsageError(f"{options[0]} cannot be used with a JOB")
    if mine and user:
        raise UsageError("--mine and --user are mutually exclusive", hint="use only one of them")
    after = parse_past(since, "--since").timestamp() if since else 0.0
    with connect_farm() as farm:
        if job:
            _show_job(farm, job, as_json)
            return
        user = farm.ask("me").user if mine else user
        chosen: dict[str, Any] = {"state": list(states), "user": user}
        chosen |= {name: value for name, value in (("failed", failed), ("since", after)) if value}
        stats: FarmStats = farm.ask("stats", **chosen)
        rows = _list_jobs(farm, chosen, limit if limit or as_json else _JOBS_SHOWN)
        rows = add_turns(farm.ask, rows)
        known: list[FarmBoard] = [] if as_json else farm.ask("boards")
        if user and not (rows or mine):
            _note_unknown_user(farm, user)
    if as_json:
        answer(True, FarmStatus(stats=stats, jobs=rows))
    else:
        jobs = [line(""), make_table(JOBS, rows)] if rows else []
        omitted = stats.matching - len(rows)
        more = (
            [line((f"... and {omitted} older jobs: --limit N shows N jobs, --json shows all", "dim"))]
            if omitted > 0
            else []
        )
        show(*summarize_farm(stats, sum(bool(board.job) for board in known)), *list_quarantined(known), *jobs, *more)


def _note_unknown_user(farm: FarmClient, user: str) -> None:
    """Print a message for a user without jobs: a script may expect no jobs, so this is not an error."""
    users = {job.user for job in farm.ask("jobs", state=[], user="", limit=_PAGE)}
    if user not in users:
        hint = did_you_mean(user, sorted(users)) or format_expected(sorted(users), "users with jobs: ")
        print_message(f"hil: no job of the user {user!r}" + (f"\n  hint: {hint.rstrip()}" if hint else ""))


def _list_jobs(farm: FarmClient, chosen: dict[str, Any], limit: int | None) -> list[FarmJob]:
    """Return the newest jobs and all running jobs, the oldest first; without a limit all jobs.

    Args:
        chosen: arguments of the query ``jobs`` that select jobs.
    """
    rows: list[FarmJob] = farm.ask("jobs", **chosen, limit=limit or _PAGE)
    page = rows
    while limit is None and len(page) == _PAGE:
        page = farm.ask("jobs", **chosen, limit=_PAGE, before=page[0].name)
        # Older gateways ignore `before` and return the same page.
        if page and _number(page[-1]) >= _number(rows[0]):
            break
        rows = [*page, *rows]
    failed, since = chosen.get("failed", False), chosen.get("since", 0.0)
    if not (limit is None or chosen["state"] or failed):
        # Show all running jobs, even if many newer jobs are queued.
        running = farm.ask("jobs", **{**chosen, "state": [JobState.RUNNING.value]}, limit=limit)
        rows = sorted({row.name: row for row in (*running, *rows)}.values(), key=_number)
    # Older gateways ignore `failed` and `since`.
    return [row for row in rows if _is_chosen(row, failed=failed, since=since)]


def _is_chosen(job: FarmJob, *, failed: bool, since: float) -> bool:
    is_late = datetime.fromisoformat(job.queued_at).timestamp() >= since
    return is_late and not (failed and (job.state != JobState.DONE.value or not job.exit_code))


def _number(job: FarmJob) -> tuple[int, int]:
    submission, number = parse_job(job.name)
    return submission, number or 0


def _show_job(farm: FarmClient, name: str, as_json: bool) -> None:
    """Show a job with its attempts, or all jobs of a larger submission."""
    submission, number = parse_job(name)
    rows: list[FarmJob] = farm.ask("jobs", submission=submission, limit=_MAX_ROWS) if number is None else []
    if len(rows) > 1:
        rows = add_turns(farm.ask, rows)
        answer(as_json, SubmissionStatus(submission=submission, jobs=rows), show=lambda: show(make_table(JOBS, rows)))
        return
    found: JobDetails = farm.ask("job", name=name)
    [job] = add_turns(farm.ask, [found])
    if as_json:
        answer(True, JobReport(job=job))
        return
    asked = {"selector": job.selector, "board": job.pinned, "priority": job.priority, "project": job.project}
    asked["further boards"] = "; ".join(" ".join(filter(None, (one.board, one.selector))) or "any" for one in job.more)
    asked["waits"] = turn_text(job)
    wishes = [line((f"{label}: ", "bold"), text) for label, text in asked.items() if text]
    more = [line(""), make_table(ATTEMPTS, _number_attempts(job.attempts_made))] if job.attempts_made else []
    show(make_table(JOBS, [job]), line(""), *wishes, *more)


def _number_attempts(leases: Sequence[FarmAttempt]) -> list[tuple[int, FarmAttempt]]:
    """Return each lease with the number of its attempt. An attempt with multiple boards has multiple leases."""
    number, found = 0, []
    for lease in leases:
        number += lease.part == 0
        found.append((number, lease))
    return found


@make_command(epilog='Example: hil farm boards --select "arch=aarch64, mem>=1GiB"')
@click.option("--select", "text", default="", metavar="SELECTOR", help="Show only boards that match this selector.")
@click.option("--wide", is_flag=True, help="Show all labels in full: CPU features, kernel, libc, ...")
@json_option
def boards(text: str, wide: bool, as_json: bool) -> None:
    """List the boards: state, reason, current jobs and labels."""
    from hil.controller.farm import selector

    wanted = selector.parse(text)
    with connect_farm() as farm:
        rows: list[FarmBoard] = farm.ask("boards")
    labels = {row.name: row.labels for row in rows}
    found = [row for row in rows if wanted.matches(labels[row.name])]
    if as_json:
        answer(True, FarmBoardList(boards=found))
    elif found:
        show(make_boards_table(found, labels=not wide))
        for row in found if wide else ():
            click.echo(f"{make_plain(row.name)}: {make_plain(format_labels(row.labels, wide=True))}")
    elif not rows:
        print_message("the farm has no boards; to add a machine's boards: hil farm host")
    else:
        print_message("no board matches; closest boards:")
        for name, misses in selector.find_nearest(wanted, labels):
            print_message(f"  {name}: {', '.join(misses)}")


@make_command(epilog="Example: hil farm top --json")
@json_option
def top(as_json: bool) -> None:
    """Show board usage and waiting jobs by user, and how long jobs wait.

    Fair sharing uses the board time of users. Older use counts less.
    """
    with connect_farm() as farm:
        stats: FarmStats = farm.ask("stats")
    if as_json:
        answer(True, StatsReport(stats=stats))
        return
    rows = sorted(stats.users, key=lambda user: (-user.running, -user.board_s, user.user))
    users = [line(""), make_table(USERS, rows)] if rows else []
    show(*summarize_farm(stats), describe_latency(stats), *users)


@make_command(epilog="Example: hil farm events --board rpi5")
@click.option("--board", default="", metavar="NAME", help="Show only events of this board.")
@click.option("--job", default="", metavar="J", help="Show only events of this job.")
@limit_option
@json_option
def events(board: str, job: str, limit: int, as_json: bool) -> None:
    """List events of boards, jobs, hosts and gateways, with reasons."""
    with connect_farm() as farm:
        rows: list[FarmEvent] = farm.ask("events", board=board, job=job, limit=limit)
    if as_json:
        answer(True, EventList(events=rows))
    elif rows:
        show(make_table(EVENTS, rows))
    else:
        print_message("no events")


@make_command(epilog="Example: hil farm watch")
@click.option(
    "--every",
    "every_s",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.1, 3600),
    metavar="S",
    help="Refresh interval in seconds.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each event as a line of JSON.")
def watch(every_s: float, as_json: bool) -> int:
    """Show the boards and the queue live, until Ctrl-C.

    Without a terminal on stdout, prints each event as a line.
    """
    from hil.controller.storage.screen.console import make_table_console

    with connect_farm() as farm, contextlib.suppress(KeyboardInterrupt):
        if make_table_console().is_terminal and not as_json:
            _show_live(farm, every_s)
        else:
            _print_events(farm, every_s, as_json)
    return 0


def _show_live(farm: FarmClient, every_s: float) -> None:
    from rich.live import Live

    from hil.controller.storage.screen.console import make_table_console

    out = make_table_console()
    with Live(console=out, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            most = max(out.height, _MIN_JOBS)
            jobs = [job for state in JobState for job in farm.ask("jobs", state=[state.value], limit=most)]
            live.update(view(farm.ask("stats"), farm.ask("boards"), jobs, *out.size), refresh=True)
            time.sleep(max(every_s - (time.monotonic() - began), 0.05))


def view(
    stats: FarmStats, boards: Sequence[FarmBoard], jobs: Sequence[FarmJob], width: int, height: int
) -> RenderableType:
    """Return a view of the farm in at most ``height`` lines.

    Unhealthy and busy boards are first. Jobs are ordered by state: running, queued, ended.
    """
    from rich.console import Group

    lines = max(height - _OTHER_LINES, _MIN_LINES)
    by_state = {state: [job for job in jobs if job.state == state.value] for state in JobState}
    ended = sorted(by_state[JobState.DONE] + by_state[JobState.CANCELLED], key=lambda job: str(job.finished_at))
    ordered = [*by_state[JobState.RUNNING], *by_state[JobState.QUEUED], *reversed(ended)]
    some_boards = _cut_rows(sorted(boards, key=_sort_by_interest), max(lines - len(ordered), lines // 2))
    more_boards = len(boards) - len(some_boards)
    some_jobs = _cut_rows(ordered, lines - len(some_boards) - bool(more_boards))
    open_jobs = sum(stats.jobs.get(state.value, 0) for state in (JobState.QUEUED, JobState.RUNNING))
    more_jobs = open_jobs - sum(not job.finished_at for job in some_jobs)
    parts: list[RenderableType] = [
        *summarize_farm(stats, sum(bool(board.job) for board in boards)),
        describe_latency(stats),
    ]
    parts += [line(""), make_boards_table(some_boards, width, labels=False)]
    parts += [line((f"... and {more_boards} more", "dim"))] if more_boards else []
    parts += [line(""), make_table(JOBS, some_jobs, width)] if some_jobs else []
    parts += [line((f"... and {more_jobs} more running or waiting", "dim"))] if more_jobs > 0 else []
    return Group(*parts)


def _cut_rows(rows: Sequence[T], lines: int) -> Sequence[T]:
    """Return the rows that fit. If some do not fit, leave a line for the number of omitted rows."""
    return rows if len(rows) <= lines else rows[: max(lines - 1, 0)]


def _sort_by_interest(board: FarmBoard) -> tuple[bool, bool, str]:
    well = board.state in (BoardState.ONLINE.value, BoardState.MAINTENANCE.value, BoardState.OFFLINE.value)
    return well, not board.job, board.name


def _print_events(farm: FarmClient, every_s: float, as_json: bool) -> None:
    """Print new events, each only once. Events that were stored late are printed after newer events."""
    known = {event.id for event in farm.ask("events", limit=_BEHIND)}
    lowest = min(known, default=0)
    while True:
        time.sleep(every_s)
        for limit in _EVENTS:
            found: list[FarmEvent] = farm.ask("events", limit=limit)
            new = [event for event in found if event.id > lowest and event.id not in known]
            if len(new) < limit:
                break
        known |= {event.id for event in new}
        lowest = max(lowest, max(known, default=0) - _BEHIND)
        known = {number for number in known if number >= lowest}
        for event in new:
            where = " ".join(filter(None, (event.what, event.job, event.board, event.host)))
            reason = event.reason and f": {event.reason}"
            click.echo(
                json.dumps(event.to_json())
                if as_json
                else f"{to_local_time(event.at)}  {make_plain(where)}{make_plain(reason)}"
            )
