"""`hil runs`: list, show, export and delete stored runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import group
from hil.controller.cli.options import json_option, runs_option
from hil.controller.cli.screen import answer, answer_matrix, confirm, print_cases, print_message
from hil.controller.cli.usage.candidates import complete_runs
from hil.errors import did_you_mean, format_expected

if TYPE_CHECKING:
    from hil.controller.records.commands.stored import RunSummary


@group(epilog="Example: hil runs show latest")
def runs() -> None:
    """List, show, export and delete stored runs."""


def _parse_since(_: click.Context, option: click.Parameter, value: str) -> float:
    """Return a moment in seconds since the epoch."""
    if not value:
        return 0.0
    from hil.controller.cli.times import parse_past

    return parse_past(value, option.opts[0]).timestamp()


@runs.command("list", epilog="Example: hil runs list --label nightly --since 2d --limit 10")
@click.option("--label", "labels", multiple=True, metavar="TEXT", help="List only runs with this label. Repeatable.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="List only the N newest of these runs.")
@click.option(
    "--since",
    default="",
    callback=_parse_since,
    metavar="TIME",
    help="List only newer runs: 2d, 12h, 2026-11-30 (local time).",
)
@runs_option
@json_option
def list_runs(labels: tuple[str, ...], limit: int | None, since: float, out: Path | None, as_json: bool) -> None:
    """List the stored runs, oldest first."""
    from hil.controller.records.commands.stored import RunList
    from hil.controller.storage.runs import RunStore

    stored = RunStore(out).list_summaries()
    if unknown := set(labels) - {label for row in stored for label in row.labels}:
        _note_unknown_label(unknown, stored)
    rows = [row for row in stored if row.created >= since and set(labels) <= set(row.labels)]
    rows = rows[-limit:] if limit else rows
    width = max((len(row.id) for row in rows), default=0)
    # The run's name contains the time in UTC.
    lines = [
        f"{row.id:{width}}  {row.outcome or 'unfinished':15}  {row.board or '-':9}  {row.models}"
        + (f"  ({row.origin})" if row.origin else "")
        for row in rows
    ]
    answer(as_json, RunList(runs=rows), *lines)


def _note_unknown_label(unknown: Iterable[str], stored: Iterable[RunSummary]) -> None:
    """Print a message for labels without runs: a script may expect no runs, so this is not an error."""
    known = sorted({label for row in stored for label in row.labels})
    for label in sorted(unknown):
        hint = did_you_mean(label, known) or format_expected(known, "known labels: ")
        print_message(f"hil: no run has the label {label!r}" + (f"\n  hint: {hint.rstrip()}" if hint else ""))


@runs.command(epilog="Example: hil runs show latest")
@click.argument("run", metavar="ID", shell_complete=complete_runs)
@runs_option
@json_option
def show(run: str, out: Path | None, as_json: bool) -> None:
    """Show a stored run, or a matrix of runs.

    Specify an ID, the start of an ID, `latest`, a directory, or MATRIX/TARGET for one run of a matrix.
    """
    from hil.controller.storage.runs import RECORD, RunStore
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.storage.sources.origin import format_origin
    from hil.controller.workloads.evaluation.show import print_evaluation
    from hil.controller.workloads.evaluation.stored import find_evaluation

    store = RunStore(out)
    folder = store.find_folder(run)
    if not (folder / RECORD).exists():
        from hil.controller.workloads.matrix.report import load_matrix

        answer_matrix(as_json, folder, load_matrix(folder))
        return
    found = store.open(run)
    record = found.record.replace(folder=str(found.folder))
    origin = format_origin(record.origin)
    evaluation = find_evaluation(found)

    def print_record() -> None:
        if evaluation is None:
            print_cases(record)
        else:
            print_evaluation(make_table_console(), evaluation)

    answer(as_json, record, *([f"from {origin}"] if origin else []), show=print_record)


@runs.command(epilog="Example: hil runs export latest --to llama-bench > bench.json")
@click.argument("run", metavar="ID", shell_complete=complete_runs)
@click.option(
    "--to", required=True, type=click.Choice(["llama-bench"]), help="Format: llama-bench, for timed generations."
)
@runs_option
def export(run: str, to: str, out: Path | None) -> None:
    """Print a stored run in another tool's JSON format.

    llama-bench: a row for the prompt and a row for the steps of each case with --generate.
    """
    from hil.controller.pipeline.records.llama_bench import list_llama_bench_rows
    from hil.controller.storage.runs import RunStore

    click.echo(json.dumps(list_llama_bench_rows(RunStore(out).open(run).record), indent=2))


@runs.command(epilog="Example: hil runs gc --keep 20")
@click.option(
    "--keep", default=20, show_default=True, type=click.IntRange(min=0), help="Number of newest runs to keep."
)
@click.option("--older-than", default=0.0, metavar="DAYS", help="Delete only runs older than this.")
@click.option("--dry-run", is_flag=True, help="List the runs that hil would delete.")
@runs_option
@json_option
def gc(keep: int, older_than: float, dry_run: bool, out: Path | None, as_json: bool) -> None:
    """Delete finished runs."""
    from hil.controller.records.commands.stored import DeletedRuns
    from hil.controller.storage.runs import RunStore

    store = RunStore(out)
    old = store.list_old(keep, older_than * 86400)
    if not dry_run:
        store.delete(old)
    lines = [*(old if dry_run else ()), f"{'would delete' if dry_run else 'deleted'} {_count_runs(old)}"]
    answer(as_json, DeletedRuns(deleted=old, dry_run=dry_run), *lines)


@runs.command(epilog="Example: hil runs rm latest --yes")
@click.argument("names", nargs=-1, required=True, metavar="ID...", shell_complete=complete_runs)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation. Required without a terminal.")
@runs_option
@json_option
def rm(names: tuple[str, ...], yes: bool, out: Path | None, as_json: bool) -> None:
    """Delete finished runs by ID, start of an ID, or `latest`. If hil cannot delete one of them, hil deletes none."""
    from hil.controller.records.commands.stored import DeletedRuns
    from hil.controller.storage.runs import RunStore

    store = RunStore(out)
    gone = list(dict.fromkeys(map(store.find_deletable, names)))
    confirm(f"delete {', '.join(gone)}?", yes=yes)
    store.delete(gone)
    answer(as_json, DeletedRuns(deleted=gone), f"deleted {_count_runs(gone)}")


def _count_runs(ids: Sized) -> str:
    return f"{len(ids)} run{'' if len(ids) == 1 else 's'}"
