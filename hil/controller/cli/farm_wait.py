"""Following jobs on the terminal, and what they came to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.screen import answer
from hil.controller.farm.messages import JobState
from hil.errors import FarmUnreachable, NoSuchBoard

if TYPE_CHECKING:
    from hil.controller.farm.client import FarmClient
    from hil.controller.farm.results import EndedJob
    from hil.protocol.v1 import farm_pb2 as pb

_OVER = (JobState.DONE.value, JobState.CANCELLED.value)


def wait_for(farm: FarmClient, submission: int, jobs: Sequence[str], *, logs: bool, as_json: bool) -> int:
    """Follow jobs until they end and show what they came to; their exit code.

    Args:
        as_json: as one document, and nothing else.

    Raises:
        KeyboardInterrupt: Ctrl-C; the jobs go on.
        FarmUnreachable: no gateway answers for too long; the jobs go on.
        NoSuchBoard: no board can run them; they stay in the queue.
    """
    try:
        from hil.controller.farm.results import outcomes

        follow(farm, jobs, print_line=_quiet if as_json else _on_stderr, logs=logs)
    except (KeyboardInterrupt, FarmUnreachable, NoSuchBoard):
        click.echo(
            f"job {submission} goes on: hil farm logs {submission} -f follows it, hil farm cancel {submission} ends it",
            err=True,
        )
        raise
    return show(farm, str(submission), outcomes(farm, str(submission)), out=None, as_json=as_json)


def follow(farm: FarmClient, jobs: Sequence[str], *, print_line: Callable[[str], None], logs: bool = True) -> None:
    """Show where jobs are, and what they print, until all have ended; with a bar where there are several.

    Args:
        logs: also what they print; without it, of the jobs that go well only the end is told, or the bar.

    Raises:
        NoSuchBoard: no board can run any of those that have not ended; they stay in the queue.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from hil.controller.storage.console import Console

    console = Console(stderr=True)
    columns = (BarColumn(bar_width=32), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = print_line is not _quiet and len(jobs) > 1 and sys.stderr.isatty()
    states: dict[str, str] = {}
    unrunnable: dict[str, str] = {}
    with Progress(*columns, console=console, transient=True, disable=not bar) as progress:
        task = progress.add_task("queued", total=len(jobs))
        for reply in farm.follow(jobs, logs=logs):
            kind = reply.WhichOneof("kind")
            lines: list[str] = []
            if kind == "log":
                prefix = f"{reply.log.job}  " if len(jobs) > 1 else ""
                lines = [f"{prefix}{line}" for line in reply.log.text.splitlines()]
            elif kind == "job":
                job = reply.job
                moved = states.get(job.name) != job.state
                states[job.name], unrunnable[job.name] = job.state, job.unrunnable
                lines = [_moved(job)] if moved and (logs or _is_news(job, bar)) else []
                done = sum(state in _OVER for state in states.values())
                running = sum(state == JobState.RUNNING.value for state in states.values())
                progress.update(task, completed=done, description=f"{running} running")
            for line in lines:
                if bar:
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
                else:
                    print_line(line)
            waiting = [name for name, state in states.items() if state not in _OVER]
            if waiting and len(states) >= len(jobs) and all(unrunnable[name] for name in waiting):
                raise NoSuchBoard(
                    f"no board can run job {waiting[0]}: {unrunnable[waiting[0]]}",
                    hint="hil farm boards and events tell more; hil farm resume BOARD has one checked again",
                )


def _is_news(job: pb.JobStatus, bar: bool) -> bool:
    """Return whether one of many jobs is worth a line."""
    if job.state in _OVER:
        return not bar or job.exit_code != 0
    return bool(job.attempts and job.reason)


def _moved(job: pb.JobStatus) -> str:
    """Return a line that says where a job is now."""
    if job.state == JobState.RUNNING.value:
        again = f", attempt {job.attempts}" if job.attempts > 1 else ""
        return f"{job.name}  runs on {job.board}{again}"
    if job.state in _OVER:
        on = f" on {job.board}" if job.board else ""
        return f"{job.name}  {job.outcome or job.state}{on}  {job.reason}".rstrip()
    why = f" again: {job.reason}" if job.attempts and job.reason else ""
    return f"{job.name}  {job.state}{why}"


def _quiet(line: str) -> None:
    """Say nothing."""


def _on_stderr(line: str) -> None:
    click.echo(line, err=True)


def show(farm: FarmClient, name: str, ended: Sequence[EndedJob], *, out: Path | None, as_json: bool) -> int:
    """Show what jobs came to, fetching it where it is a suite or where ``out`` says so; their exit code."""
    from hil.controller.farm.results import exit_code, fetch_run, fetch_suite, is_suite

    code = exit_code(ended)
    document: dict[str, Any] = {"name": name}
    rows = [{"name": one.name, **one.result.to_json()} for one in ended]
    if is_suite(ended):
        run = fetch_suite(farm, ended, out)
        cases = [record.to_json() for record in run.records()]
        document["suite"] = {**run.head, "folder": str(run.folder), "cases": cases}
        rows = [{key: value for key, value in row.items() if key != "record"} for row in rows]
    elif out is not None:
        for one in ended:
            folder = out if len(ended) == 1 else out / one.name
            fetch_run(farm, one, folder)
        document["folder"] = str(out)
    answer(as_json, {**document, "jobs": rows, "exit_code": code})
    if not as_json:
        _print(ended, document, out)
    return code


def _print(ended: Sequence[EndedJob], document: dict[str, Any], out: Path | None) -> None:
    from hil.controller.pipeline.record import print_case
    from hil.controller.storage.console import Console
    from hil.core.results import Timings

    console = Console()
    if "suite" in document:
        from hil.controller.workloads.suites.reports.summary import print_summary

        print_summary(console, Path(document["suite"]["folder"]))
        return
    for one in ended:
        cases = one.result.record.get("cases") or []
        for case in cases:
            # The database keeps keys in an order of its own.
            timings = {one.name: case["timings"][one.name] for one in fields(Timings) if one.name in case["timings"]}
            print_case(console, {**case, "timings": timings})
        if not cases:
            told = one.result.outcome or ("ended" if one.result.exit_code == 0 else "failed")
            click.echo(f"{told}  job {one.name}  {one.result.reason}".rstrip())
        if one.result.files:
            name = one.name if len(ended) > 1 else document["name"]
            where = out if out is None or len(ended) == 1 else out / one.name
            kept = f"hil farm result {name} --out DIR fetches what it made" if where is None else f"stored in {where}"
            click.echo(f"  {kept}")
