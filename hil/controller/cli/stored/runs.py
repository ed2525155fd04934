"""`hil runs`: list, show, export and delete stored runs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hil.controller.cli.commands import group
from hil.controller.cli.options import json_option, runs_option
from hil.controller.cli.screen import answer, answer_matrix, print_cases


@group(epilog="Example: hil runs show latest")
def runs() -> None:
    """List, show, export and delete stored runs."""


@runs.command("list", epilog="Example: hil runs list --json")
@runs_option
@json_option
def list_runs(out: Path | None, as_json: bool) -> None:
    """List the stored runs, oldest first."""
    from hil.controller.records.commands.stored import RunList
    from hil.controller.storage.runs import RunStore

    rows = RunStore(out).list_summaries()
    width = max((len(row.id) for row in rows), default=0)
    # The run's name contains the time in UTC.
    lines = [
        f"{row.id:{width}}  {row.outcome or 'unfinished':15}  {row.board or '-':9}  {row.models}"
        + (f"  ({row.origin})" if row.origin else "")
        for row in rows
    ]
    answer(as_json, RunList(runs=rows), *lines)


@runs.command(epilog="Example: hil runs show latest")
@click.argument("run", metavar="ID")
@runs_option
@json_option
def show(run: str, out: Path | None, as_json: bool) -> None:
    """Show a stored run, or a matrix of runs.

    Specify an ID, the start of an ID, `latest`, a directory, or MATRIX/TARGET for one run of a matrix.
    """
    from hil.controller.storage.origin import format_origin
    from hil.controller.storage.runs import RECORD, RunStore
    from hil.controller.storage.screen.console import make_table_console
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
@click.argument("run", metavar="ID")
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
@runs_option
@json_option
def gc(keep: int, older_than: float, out: Path | None, as_json: bool) -> None:
    """Delete finished runs."""
    from hil.controller.records.commands.stored import DeletedRuns
    from hil.controller.storage.runs import RunStore

    gone = RunStore(out).gc(keep, older_than * 86400)
    answer(as_json, DeletedRuns(deleted=gone), f"deleted {len(gone)} run{'' if len(gone) == 1 else 's'}")
