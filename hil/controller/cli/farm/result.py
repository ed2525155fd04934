"""`hil farm logs`, `result` and `cancel`: follow jobs and show their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import UNSET

from hil.controller.cli.commands import make_command
from hil.controller.cli.farm.options import connect_farm
from hil.controller.cli.farm.tables import make_plain
from hil.controller.cli.options import FOLDER, json_option
from hil.controller.cli.screen import Bars, answer, answer_matrix, print_message
from hil.controller.farm.messages import ENDED, JobState, Kind
from hil.controller.records.commands.farm import CancelReport, EndedJobReport, FarmResult, LogList
from hil.controller.records.lab.farm import CancelledJobs, LogPiece
from hil.core.results import choose_exit_code
from hil.errors import FarmUnreachable, NoSuchBoard, UsageError

if TYPE_CHECKING:
    from hil.controller.farm.client.client import FarmClient
    from hil.controller.farm.client.results import EndedJob
    from hil.controller.farm.client.submitting import SubmitReceipt
    from hil.protocol.v1 import farm_pb2 as pb

_job = click.argument("job", metavar="JOB")


@make_command(epilog="Example: hil farm logs 17 -f")
@_job
@click.option("-f", "--follow", "live", is_flag=True, help="Follow the output until the job ends.")
@json_option
def logs(job: str, live: bool, as_json: bool) -> int:
    """Show the output of a JOB: 17 for a submission, 17.3 for one of its jobs."""
    if live and as_json:
        raise UsageError(
            "--json and --follow are mutually exclusive: --json prints one document", hint="use only one of them"
        )
    with connect_farm() as farm:
        if live:
            _follow(farm, [job], click.echo)
            return 0
        pieces: list[LogPiece] = farm.ask("logs", name=job)
    several = len({piece.job for piece in pieces}) > 1
    lines = [(piece.job, line) for piece in pieces for line in piece.text.splitlines()]
    return answer(as_json, LogList(logs=pieces), *(f"{name}  {line}" if several else line for name, line in lines))


@make_command(epilog="Example: hil farm result 17 --out hil-runs/from-farm")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@click.option("--out", type=FOLDER, metavar="DIR", help="Download the results to DIR.")
@json_option
def result(jobs: tuple[str, ...], out: Path | None, as_json: bool) -> int:
    """Show the result of a JOB and exit with its exit code.

    Multiple JOBs form a table with a row per case and a column per JOB.

    --out also downloads the run's directory, in the form in which `hil run` creates it. The parts of a suite become one
    suite run with all reports, by default in hil-suites.
    """
    with connect_farm() as farm:
        if len(jobs) > 1:
            return _show_targets(farm, {job: job for job in jobs}, out=out, as_json=as_json)
        return _show(farm, jobs[0], out=out, as_json=as_json)


@make_command(epilog="Example: hil farm cancel 17")
@_job
@json_option
def cancel(job: str, as_json: bool) -> None:
    """Cancel a queued or running JOB, or all such jobs of a submission."""
    with connect_farm() as farm:
        jobs: CancelledJobs = farm.do("cancel", name=job)
    text = f"cancelled {', '.join(jobs.cancelled)}" if jobs.cancelled else f"{job} has already ended"
    answer(as_json, CancelReport(cancelled=jobs.cancelled), text)


def wait_for(farm: FarmClient, submission: int, jobs: Sequence[str], *, logs: bool, as_json: bool) -> int:
    """Follow jobs until they end, and show their results. Return the exit code.

    Raises:
        KeyboardInterrupt: Ctrl-C; the jobs continue.
        FarmUnreachable: the gateway did not respond in time; the jobs continue.
        NoSuchBoard: no board can run the jobs; they stay in the queue.
    """
    try:
        _follow(farm, jobs, None if as_json else print_message, logs=logs)
    except (KeyboardInterrupt, FarmUnreachable, NoSuchBoard):
        print_message(
            f"job {submission} continues: hil farm logs {submission} -f follows it, "
            f"hil farm cancel {submission} cancels it"
        )
        raise
    return _show(farm, str(submission), out=None, as_json=as_json)


def wait_for_targets(farm: FarmClient, sent: Mapping[str, SubmitReceipt], *, logs: bool, as_json: bool) -> int:
    """Follow the jobs of all targets, and show a table with the results. Raises the errors of :func:`wait_for`."""
    jobs = [job for one in sent.values() for job in one.jobs]
    numbers = " ".join(str(one.submission) for one in sent.values())
    try:
        _follow(farm, jobs, None if as_json else print_message, logs=logs)
    except (KeyboardInterrupt, FarmUnreachable, NoSuchBoard):
        print_message(f"jobs {numbers} continue: show their results with hil farm result {numbers}")
        raise
    return _show_targets(farm, {name: str(one.submission) for name, one in sent.items()}, out=None, as_json=as_json)


def _show_targets(farm: FarmClient, names: Mapping[str, str], *, out: Path | None, as_json: bool) -> int:
    from hil.controller.farm.client.results import fetch_targets

    return answer_matrix(as_json, *fetch_targets(farm, names, out))


def _follow(farm: FarmClient, jobs: Sequence[str], tell: Callable[[str], None] | None, *, logs: bool = True) -> None:
    """Show the states of jobs until all have ended, with a bar or with ``tell``.

    Without ``logs``, show only notable changes.
    """
    states: dict[str, str] = {}
    unrunnable: dict[str, str] = {}
    blocked: dict[str, str] = {}
    with Bars(tell is None or len(jobs) < 2, ("bar", "count", "{task.description}", "time"), 32) as bars:
        task = bars.add("queued", len(jobs))
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
                lines = [_format_state(job)] if moved and (logs or _is_news(job, bars.are_shown)) else []
                # Jobs in a submission wait for the same boards.
                if job.blocked and job.blocked not in blocked.values():
                    lines.append(f"{job.name}  waits: {make_plain(job.blocked)}")
                blocked[job.name] = job.blocked
                done = sum(state in ENDED for state in states.values())
                running = sum(state == JobState.RUNNING.value for state in states.values())
                bars.update(task, completed=done, description=f"{running} running")
            for line in lines:
                if bars.are_shown:
                    bars.note(line, "")
                elif tell:
                    tell(line)
            waiting = [name for name, state in states.items() if state not in ENDED]
            if waiting and len(states) >= len(jobs) and all(unrunnable[name] for name in waiting):
                raise NoSuchBoard(
                    f"no board can run job {waiting[0]}: {unrunnable[waiting[0]]}",
                    hint="for details: hil farm boards, hil farm events; to recheck a board: hil farm resume BOARD",
                )


def _is_news(job: pb.JobStatus, bar: bool) -> bool:
    """Return True if a job's change is worth showing among many jobs."""
    if job.state in ENDED:
        return not bar or job.exit_code != 0
    return bool(job.attempts and job.reason)


def _format_state(job: pb.JobStatus) -> str:
    """Return a line about a job's new state."""
    if job.state == JobState.RUNNING.value:
        again = f", attempt {job.attempts}" if job.attempts > 1 else ""
        return f"{job.name}  runs on {', '.join(job.boards) or job.board}{again}"
    if job.state in ENDED:
        on = f" on {', '.join(job.boards) or job.board}" if job.board else ""
        return f"{job.name}  {job.outcome or job.state}{on}  {job.reason}".rstrip()
    why = f" for retry: {job.reason}" if job.attempts and job.reason else ""
    return f"{job.name}  {job.state}{why}"


def _show(farm: FarmClient, name: str, *, out: Path | None, as_json: bool) -> int:
    """Show the results of jobs and return their exit code.

    Fetch the files for suites, and for other jobs if ``out`` is set.
    """
    from hil.controller.farm.client.client import convert_answer_errors
    from hil.controller.farm.client.results import fetch_run, fetch_suite, read_outcomes

    def show() -> None:
        with convert_answer_errors():  # invalid records from the gateway become an error
            _print(ended, document, out)

    ended = read_outcomes(farm, name)
    rows = [EndedJobReport(name=one.name, **msgspec.structs.asdict(one.result)) for one in ended]
    document = FarmResult(name=name, jobs=rows, exit_code=_choose_exit_code(ended))
    if all(one.spec.kind is Kind.SUITE for one in ended):
        document.suite = fetch_suite(farm, ended, out).to_document()
        document.jobs = [row.replace(record=UNSET) for row in rows]
    elif out is not None:
        for one in ended:
            fetch_run(farm, one, _choose_folder(one, ended, out))
        document.folder = str(out)
    return answer(as_json, document, show=show)


def _choose_exit_code(ended: Sequence[EndedJob]) -> int:
    """Return the exit code of a command, or the most severe exit code of other jobs."""
    if len(ended) == 1 and ended[0].spec.kind is Kind.COMMAND:
        return ended[0].result.exit_code
    return choose_exit_code([one.result.exit_code for one in ended])


def _choose_folder(one: EndedJob, ended: Sequence[EndedJob], out: Path) -> Path:
    return out if len(ended) == 1 else out / one.name


def _print(ended: Sequence[EndedJob], document: FarmResult, out: Path | None) -> None:
    from hil.controller.pipeline.records.print_case import print_case
    from hil.controller.storage.screen.console import Console

    console = Console()
    if document.suite is not UNSET:
        from hil.controller.workloads.suites.reports.summary import print_summary

        print_summary(console, Path(document.suite.folder))
        return
    for one in ended:
        cases = one.run.cases if one.result.record.get("cases") else []
        for case in cases:
            print_case(console, case)
        if not cases:
            outcome = one.result.outcome or ("ended" if one.result.exit_code == 0 else "failed")
            click.echo(f"{outcome}  job {one.name}  {one.result.reason}".rstrip())
        if one.result.files and out:
            click.echo(f"  stored in {_choose_folder(one, ended, out)}")
        elif one.result.files:
            name = one.name if len(ended) > 1 else document.name
            click.echo(f"  hil farm result {name} --out DIR downloads the results")
