"""`hil history`: keep measurements over time, with the state of the source tree and the board."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hil.controller.cli.commands import group, read_project_runs
from hil.controller.cli.history_place import make_history_option
from hil.controller.cli.options import FILE, combine_options, json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_runs, complete_runtimes
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.pipeline.settings.history_settings import HistorySettings
    from hil.controller.records.measurements.history import AddedEntries
    from hil.controller.storage.history.store import HistoryStore

history_option = make_history_option("[history] in hil.toml, or hil-runs/history")
source_options = combine_options(
    click.option("--commit", default="", metavar="ID", help="Commit of the results (default: the run's)."),
    click.option("--branch", default="", metavar="NAME", help="Branch of the results (default: the run's)."),
)
# Formats of hil.controller.workloads.history.foreign, copied here because the module is imported on use.
_FORMATS = ("google-benchmark", "benchmark-model", "trtexec", "polygraphy")


def open_history(chosen: HistorySettings | None, *, create: bool = False) -> HistoryStore:
    """Open the given history, or the history that the project file defines."""
    from hil.controller.pipeline.settings.project import find_history
    from hil.controller.storage.history.store import HistoryStore

    settings = chosen or find_history(Path())
    return HistoryStore.open(settings.place, create=create, quota=settings.quota, baseline=settings.baseline)


@group(epilog="Example: hil history show digits_cnn")
def history() -> None:
    """Keep measurements over time, with commits, boards and programs."""


@history.command(epilog="Example: hil history add latest --commit 1a2b3c4 --branch main")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs)
@source_options
@history_option
@json_option
def add(runs: Sequence[str], commit: str, branch: str, chosen: HistorySettings | None, as_json: bool) -> int:
    """Add the cases of stored RUNs: runs, benches, suite runs and matrices.

    RUN is a directory, a name or the start of a name in hil-runs or hil-suites, or `latest`. Adding a run again has no
    effect. Programs that are still available are stored, too.
    """
    from hil.controller.storage.session_folders import find_session_folder, list_roots
    from hil.controller.web.readers import RECORDS
    from hil.controller.workloads.history.collect import Collector
    from hil.controller.workloads.history.source_state import SourceOptions

    collector = Collector(SourceOptions(commit, branch))
    for run in runs:
        collector.collect(find_session_folder(run, list_roots(read_project_runs()), RECORDS))
    found = collector.found
    with open_history(chosen, create=True) as store:
        report = store.add(found.entries, found.programs.values())
    report.skipped[:0] = found.skipped
    return _show_added(report, as_json)


@history.command("import", epilog="Example: hil history import times.json --model resnet50 --board orin")
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option("--format", "kind", type=click.Choice(_FORMATS), help="Format of the files (default: by content).")
@click.option("--model", default="", metavar="NAME", help="Model (default: from the file, or the file's name).")
@click.option("--board", default="", metavar="NAME", help="Board (default: from the file).")
@click.option(
    "--runtime",
    default="",
    metavar="NAME",
    help="Runtime (default: from the file).",
    shell_complete=complete_runtimes,
)
@source_options
@history_option
@json_option
def import_files(
    files: Sequence[Path],
    kind: str | None,
    model: str,
    board: str,
    runtime: str,
    commit: str,
    branch: str,
    chosen: HistorySettings | None,
    as_json: bool,
) -> int:
    """Import measurements of other tools.

    FILE is JSON of Google Benchmark, a log of TFLite's benchmark_model, JSON of trtexec --exportTimes, or JSON of
    polygraphy run --save-outputs. Importing a file again has no effect.
    """
    from hil.controller.workloads.history.foreign import ForeignNames, read_foreign
    from hil.controller.workloads.history.source_state import SourceOptions

    state = SourceOptions(commit, branch).state_of(None)
    names = ForeignNames(model, board, runtime)
    entries = [entry for file in files for entry in read_foreign(file, kind or "", names, state)]
    with open_history(chosen, create=True) as store:
        report = store.add(entries)
    return _show_added(report, as_json)


def _show_added(report: AddedEntries, as_json: bool) -> int:
    from hil.controller.storage.screen.texts import format_count

    if not as_json:
        for text in report.skipped:
            print_message(f"skipped: {text}")
    present = f", {report.present} present" if report.present else ""
    evicted = f", {format_count(report.evicted, 'program')} deleted to fit the quota" if report.evicted else ""
    entries = f"{report.added} {'entry' if report.added == 1 else 'entries'}"
    text = f"added {entries}{present}, {format_count(report.programs, 'program')}{evicted}"
    return answer(as_json, report, text)


@history.command(epilog="Example: hil history ls")
@history_option
@json_option
def ls(chosen: HistorySettings | None, as_json: bool) -> int:
    """List the series: measurements of a case on a board, with a runtime and flags."""
    from hil.controller.records.measurements.history import SeriesList
    from hil.controller.workloads.history.tables import SERIES_HEADS, describe_series

    with open_history(chosen) as store:
        found = SeriesList(history=str(store.place), series=store.series())
    rows = [describe_series(one) for one in found.series]
    return answer(as_json, found, show=lambda: _print_table(SERIES_HEADS, rows, ("runs", "median")))


@history.command(epilog="Example: hil history show digits_cnn --json")
@click.argument("series", metavar="SERIES")
@history_option
@json_option
def show(series: str, chosen: HistorySettings | None, as_json: bool) -> int:
    """Show the entries of a SERIES, oldest first.

    SERIES is the ID or the start of an ID that `hil history ls` prints, a case or a model. `+` marks a commit with
    uncommitted changes. The spread is the interquartile range relative to the median.
    """
    from hil.controller.records.measurements.history import SeriesHistory
    from hil.controller.workloads.history.entry_changes import describe_changes
    from hil.controller.workloads.history.tables import describe_change, describe_entries, describe_key, list_notes

    with open_history(chosen) as store:
        summary = store.find_series(series)
        entries = list(store.entries(summary.id))
    found = SeriesHistory(id=summary.id, key=summary.key, entries=entries, changes=describe_changes(entries))

    def print_entries() -> None:
        click.echo(f"{found.id}  {describe_key(found.key)}")
        heads, rows = describe_entries(found.entries, is_evaluation=found.key.kind == "eval")
        _print_table(heads, rows, heads[2 : heads.index("outcome")])
        for change in found.changes:
            click.echo(describe_change(change))
        for entry in found.entries:
            for text in list_notes(entry):
                click.echo(f"{entry.run} {entry.case}: {text}")

    return answer(as_json, found, show=print_entries)


@history.command(epilog="Example: hil history export --to csv > history.csv")
@click.argument("series", nargs=-1, metavar="[SERIES...]")
@click.option(
    "--to",
    type=click.Choice(["jsonl", "csv"]),
    default="jsonl",
    show_default=True,
    help="Format: a JSON document per line with all samples, or CSV without samples.",
)
@history_option
def export(series: Sequence[str], to: str, chosen: HistorySettings | None) -> None:
    """Print the entries of all series, or of each SERIES, oldest first."""
    from hil.controller.workloads.history.tables import write_csv

    with open_history(chosen) as store:
        names = [store.find_series(one).id for one in series] or [""]
        entries = (entry for name in names for entry in store.entries(name))
        if to == "csv":
            click.echo(write_csv(entries), nl=False)
            return
        for entry in entries:
            sys.stdout.write(json.dumps(entry.to_json(), allow_nan=False) + "\n")


@history.command(epilog="Example: hil history annotate 1a2b3c4 'known: new compiler'")
@click.argument("target", metavar="COMMIT|BRANCH|RUN|RUN:CASE", shell_complete=complete_runs)
@click.argument("text", metavar="TEXT")
@history_option
@json_option
def annotate(target: str, text: str, chosen: HistorySettings | None, as_json: bool) -> int:
    """Add a note to all entries of a commit or a run, or to the entry of a case.

    A BRANCH is the commit of its newest entry.
    """
    from hil.controller.records.measurements.history import AddedAnnotation

    if not text.strip():
        raise UsageError("the note is empty", hint="hil history annotate COMMIT 'known: new compiler'")
    with open_history(chosen) as store:
        note, count = store.annotate(target, text)
    entries = f"{count} {'entry' if count == 1 else 'entries'}"
    return answer(as_json, AddedAnnotation(annotation=note, entries=count), f"annotated {entries}")


@history.command(epilog="Example: hil history accept 1a2b3c4")
@click.argument("target", metavar="COMMIT|BRANCH|RUN|RUN:CASE", shell_complete=complete_runs)
@history_option
@json_option
def accept(target: str, chosen: HistorySettings | None, as_json: bool) -> int:
    """Accept the results of a commit or a run as normal.

    `hil gate` then compares later programs with the accepted programs. A BRANCH is the commit of its newest entry.
    """
    from hil.controller.records.measurements.history import AcceptedEntries

    with open_history(chosen) as store:
        count = store.accept(target)
    entries = f"{count} {'entry' if count == 1 else 'entries'}"
    return answer(as_json, AcceptedEntries(entries=count), f"accepted {entries}")


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> None:
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.storage.screen.texts import make_table, show

    show(make_table_console(), make_table(heads, rows, numbers=numbers, whole=heads[:1]))
