"""`hil gate`: decide whether a commit makes answers wrong or programs slower."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import make_command
from hil.controller.cli.options import (
    FILE,
    check_seconds,
    json_option,
    known_option,
    stored_board_options,
    wait_option,
)
from hil.controller.cli.screen import Screen, answer, print_web_link
from hil.controller.cli.stored.history import history_option
from hil.controller.cli.usage.candidates import complete_boards, complete_list, complete_stored
from hil.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from hil.controller.pipeline.settings.history_settings import HistorySettings
    from hil.controller.records.decisions.gate import GateRecord
    from hil.controller.workloads.triage.entries import TriageList


def _list_verdicts() -> tuple[str, ...]:
    from hil.controller.records.decisions.gate import GATE_VERDICTS
    from hil.controller.workloads.gate.run import UNMEASURED

    return (*GATE_VERDICTS, UNMEASURED)


def _parse_verdicts(_: click.Context, __: click.Parameter, value: str) -> tuple[str, ...]:
    """Parse --fail-on."""
    known = _list_verdicts()
    named = tuple(filter(None, (one.strip() for one in value.split(","))))
    for one in named:
        if one not in known:
            raise UsageError(
                f"--fail-on: unknown verdict {one!r}",
                hint=f"{did_you_mean(one, known)}verdicts: {', '.join(known)}",
            )
    return named


@make_command(epilog="Example: hil gate --baseline main --markdown gate.md")
@click.option("--baseline", default="", metavar="BRANCH", help="Branch to compare with (default: main, or hil.toml's).")
@click.option(
    "--commit", default="", metavar="ID", help="Commit or branch to judge (default: that of the working tree)."
)
@click.option(
    "--fail-on",
    default="regressed,broken",
    show_default=True,
    callback=_parse_verdicts,
    metavar="VERDICTS",
    shell_complete=complete_list(_list_verdicts),
    help="Verdicts that cause exit code 1, separated by commas.",
)
@known_option
@click.option(
    "--min-effect", default=2.0, show_default=True, metavar="PERCENT", help="Smallest change of time to detect."
)
@click.option(
    "--budget",
    "budget_s",
    default=300.0,
    show_default=True,
    callback=check_seconds,
    metavar="S",
    help="Maximum board time for all suspects together, and for each commit of --bisect.",
)
@click.option(
    "--bisect",
    metavar="COMMAND",
    help="Find the commit of each failure; COMMAND builds a commit in a temporary worktree ('' builds nothing).",
)
@click.option(
    "--over",
    default="commit",
    show_default=True,
    metavar="AXIS",
    help="Search another axis than commits: flag, compiler=V1,V2 or driver=V1,V2, oldest version first.",
)
@click.option(
    "--build-timeout",
    "build_timeout_s",
    default=1800.0,
    show_default=True,
    callback=check_seconds,
    metavar="S",
    help="Maximum duration of the command of --bisect.",
)
@click.option(
    "--second-board",
    default="",
    metavar="NAME|USER@HOST",
    shell_complete=complete_boards,
    help="Measure a suspect on this board if the first board fails or has changed.",
)
@history_option
@stored_board_options
@wait_option
@click.option("--markdown", type=FILE, metavar="FILE", help="Write a summary for a pull request to FILE.")
@click.option("--junit", type=FILE, metavar="FILE", help="Write JUnit XML to FILE.")
@click.option("--sarif", type=FILE, metavar="FILE", help="Write SARIF 2.1.0 for code scanning to FILE.")
@click.option(
    "--resume",
    default="",
    metavar="RUN",
    help="Continue an interrupted gate.",
    shell_complete=complete_stored(root="hil-gates"),
)
@click.option("--out", type=FILE, metavar="DIR", help="Directory for gates (default: hil-gates).")
@json_option
def gate(
    chosen: HistorySettings | None,
    baseline: str,
    as_json: bool,
    markdown: Path | None,
    junit: Path | None,
    sarif: Path | None,
    known: TriageList | None,
    **settings: Any,
) -> int:
    """Judge a commit by its measurements in the history, and run suspect programs again.

    If the history shows a change, hil runs the baseline's program and the new program in turns on the same board. hil
    stops when the result is clear or the board time is used up. Exit code: 0 without failures, 1 for verdicts of
    --fail-on, 4 if a board failed.

    With --bisect, hil also finds the first bad commit of each broken or slower program. hil checks out commits in a
    temporary git worktree, and builds them there with the shell command; HIL_COMMIT is the commit. hil skips commits
    that do not build or import, and runs in which the board failed.

    With --over, hil searches changed compiler flags, or versions of a compiler or driver. With a command, HIL_COMPILER
    or HIL_DRIVER is the version.
    """
    from hil.controller.pipeline.settings.options import Job
    from hil.controller.pipeline.settings.project import find_history
    from hil.controller.storage.history.store import HistoryStore
    from hil.controller.storage.run_context import open_context
    from hil.controller.storage.runs import write_file
    from hil.controller.workloads.gate.reports import make_annotations, make_junit, make_markdown, make_sarif
    from hil.controller.workloads.gate.run import GateJob, run_gate
    from hil.controller.workloads.triage.entries import TriageList

    history = chosen or find_history(Path())
    own = {
        name: settings.pop(name)
        for name in ("commit", "fail_on", "budget_s", "second_board", "resume", "bisect", "over", "build_timeout_s")
    }
    min_effect = settings.pop("min_effect") / 100
    if not 0 < min_effect < 1:
        raise UsageError(f"invalid --min-effect {100 * min_effect:g}: expected more than 0 and less than 100 percent")
    own["known"] = known or TriageList()
    job = GateJob(Job(**settings), baseline or history.baseline, min_effect=min_effect, **own)
    with (
        Screen(quiet=as_json) as screen,
        open_context() as context,
        HistoryStore.open(history.place, quota=history.quota, baseline=job.baseline) as store,
    ):
        record = run_gate(job, store, context, screen)
    for file, make in ((markdown, make_markdown), (junit, make_junit), (sarif, make_sarif)):
        if file is not None:
            write_file(file, make(record))
    print_web_link(record.folder)
    annotations = list(make_annotations(record)) if os.environ.get("GITHUB_ACTIONS") == "true" and not as_json else []
    return answer(as_json, record, *annotations, show=lambda: _print_gate(record))


def _print_gate(record: GateRecord) -> None:
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.storage.screen.texts import make_table
    from hil.controller.workloads.gate.verdict_texts import HEADS, describe_total, describe_verdict, list_details

    console = make_table_console()
    rows = [describe_verdict(one) for one in record.verdicts]
    console.print(make_table(HEADS, rows, numbers=("baseline", "this commit", "rounds"), whole=("verdict",)))
    for one in record.verdicts:
        if details := list(list_details(one)):
            click.echo(f"{one.key.case}: {one.verdict}")
            for text in details:
                click.echo(f"  {text}")
    click.echo(describe_total(record))
    if not record.finished:
        again = "" if record.bisect is None else f" --bisect {shlex.quote(record.bisect)}"
        again += "" if record.over == "commit" else f" --over {shlex.quote(record.over)}"
        boards = sorted({one.second_board for one in record.verdicts if one.second_board})
        again += "".join(f" --second-board {shlex.quote(one)}" for one in boards)
        click.echo(f"interrupted; continue with: hil gate --resume {record.id}{again}")
    click.echo(f"stored in {record.folder}")
