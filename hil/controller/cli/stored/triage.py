"""`hil triage`: list and change the owners and states of failures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hil.controller.cli.commands import group
from hil.controller.cli.options import FILE, json_option
from hil.controller.cli.screen import answer, print_message
from hil.controller.cli.usage.candidates import complete_boards, complete_flows, complete_runtimes
from hil.controller.records.decisions.triage import TRIAGE_STATES
from hil.core.files import suggest_path
from hil.errors import UsageError

if TYPE_CHECKING:
    from hil.controller.cli.options import F
    from hil.controller.records.decisions.triage import TriageEntry

file_option = click.option(
    "--file",
    "path",
    type=FILE,
    default=Path("hil-triage.json"),
    show_default=True,
    metavar="FILE",
    help="Triage file.",
)


_COMPLETIONS = {"runtime": complete_runtimes, "board": complete_boards, "flow": complete_flows}


def scope_options(command: F) -> F:
    """Add the options that limit an entry to some cases."""
    for name, text in (
        ("runtime", "Runtime, or a pattern (default: all)."),
        ("board", "Board or hardware type, or a pattern (default: all)."),
        ("flow", "Flow, or a pattern (default: all)."),
        ("suite", "Suite, or a pattern (default: all)."),
    ):
        complete = _COMPLETIONS.get(name)
        command = click.option(f"--{name}", default="", metavar="NAME", help=text, shell_complete=complete)(command)
    return command


@group(epilog="Example: hil triage set 'conv1_*' --state known --owner ada --issue https://example.com/7")
def triage() -> None:
    """Record owner, state, issue and note of failing cases.

    `hil suite run`, `hil gate` and pytest ignore known failures with --known FILE. `hil web` shows and changes the file
    hil-triage.json of its first directory, or else of the working directory.
    """


@triage.command("list", epilog="Example: hil triage list --state known --json")
@click.option("--state", type=click.Choice(TRIAGE_STATES), help="Show only entries with this state.")
@click.option(
    "--file",
    "source",
    default="hil-triage.json",
    show_default=True,
    metavar="FILE|URL",
    help="Triage file, expected.toml, or the URL of hil web.",
)
@json_option
def list_entries(source: str, state: str | None, as_json: bool) -> int:
    """List the entries."""
    from hil.controller.records.decisions.triage import TriageDocument
    from hil.controller.web.publish.known_failures import load_known

    found = [entry for entry in load_known(source).entries if state in (None, entry.state)]
    document = TriageDocument(schema=1, entries=found)
    return answer(as_json, document, show=lambda: _print_entries(found))


@triage.command(
    "set", epilog="Example: hil triage set digits_cnn_full_model --board evk1 --state wontfix --until 2030-12-31"
)
@click.argument("case", metavar="CASE")
@scope_options
@click.option("--state", type=click.Choice(TRIAGE_STATES), help="State (default: keep, or new).")
@click.option(
    "--outcome", "outcomes", multiple=True, metavar="OUTCOME", help="Outcome that is known, or SLOWER. Repeatable."
)
@click.option("--owner", metavar="NAME", help="Person or team that works on the failure.")
@click.option("--issue", metavar="URL", help="URL or number of an issue.")
@click.option("--note", metavar="TEXT", help="Reason or next step.")
@click.option("--until", metavar="DATE", help="Last day of --state wontfix, as YYYY-MM-DD.")
@file_option
@json_option
def set_entry(case: str, path: Path, as_json: bool, **given: Any) -> int:
    """Add or change the entry of a CASE: an ID or a pattern. Options that are not given keep their values."""
    changed = _change(
        path,
        case,
        {name: given.pop(name) for name in ("suite", "flow", "board", "runtime")},
        {
            name: list(value) if name == "outcomes" else value
            for name, value in given.items()
            if value not in (None, ())
        },
    )
    return _answer_entry(as_json, changed)


@triage.command("remove", epilog="Example: hil triage remove digits_cnn_full_model --board evk1")
@click.argument("case", metavar="CASE")
@scope_options
@file_option
@json_option
def remove(case: str, path: Path, as_json: bool, **scope: str) -> int:
    """Remove the entry of a CASE. The options must be those of the entry."""
    from hil.controller.records.decisions.triage import TriageDocument
    from hil.controller.workloads.triage.entries import find_same, make_entry, remove_entry
    from hil.controller.workloads.triage.triage_file import update_triage

    wanted = make_entry(case=case, state="new", **scope)

    def drop(entries: Sequence[TriageEntry]) -> Sequence[TriageEntry]:
        if find_same(entries, wanted) is None:
            raise UsageError(f"no entry for {case!r} in {path}", hint="see hil triage list")
        return remove_entry(entries, wanted)

    left = list(update_triage(path, drop).entries)
    return answer(as_json, TriageDocument(schema=1, entries=left), f"removed {case}")


@triage.command(epilog="Example: hil triage export --suite nets -o nets/expected.toml")
@click.option("--suite", default="", metavar="NAME", help="Export only entries for this suite (default: all).")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="File to write (default: stdout).")
@file_option
def export(suite: str, output: Path | None, path: Path) -> None:
    """Write known failures as a list of expected failures, `expected.toml`."""
    from hil.controller.storage.runs import write_file
    from hil.controller.workloads.triage.exchange import export_expectations, list_patterns
    from hil.controller.workloads.triage.triage_file import read_triage

    _require_file(path)
    text, left_out = export_expectations(read_triage(path).entries, suite=suite, today=date.today())
    for line in left_out:
        print_message(f"left out: {line}")
    if patterns := list_patterns(text):
        shown = ", ".join(patterns[:3]) + (f" and {len(patterns) - 3} more" if len(patterns) > 3 else "")
        print_message(
            f"note: passing cases that match {shown} become XPASS and fail the suite; run the suite, "
            "then list only its failing cases: hil suite expect RUN --update"
        )
    if output is None:
        click.echo(text.rstrip() or "# no known failures")
    else:
        write_file(output, text)
        click.echo(f"wrote {output}")


@triage.command("import", epilog="Example: hil triage import nets/expected.toml --suite nets")
@click.argument("expected", type=FILE, metavar="EXPECTED")
@click.option("--suite", default="", metavar="NAME", help="Suite of the entries (default: all suites).")
@click.option("--owner", default="", metavar="NAME", help="Owner of new entries.")
@file_option
@json_option
def import_entries(expected: Path, suite: str, owner: str, path: Path, as_json: bool) -> int:
    """Add the entries of a list of expected failures. Owners of existing entries are kept."""
    from hil.controller.records.decisions.triage import TriageDocument
    from hil.controller.workloads.suites.expected import parse, read_text
    from hil.controller.workloads.triage.exchange import import_expectations
    from hil.controller.workloads.triage.triage_file import update_triage

    _require_file(expected)
    expectations = parse(read_text(expected), expected)
    counts: list[int] = []

    def merge(entries: Sequence[TriageEntry]) -> Sequence[TriageEntry]:
        found, count = import_expectations(entries, expectations, suite=suite, owner=owner, now=time.time())
        counts.append(count)
        return found

    found = list(update_triage(path, merge).entries)
    text = f"imported {counts[0]} entr{'y' if counts[0] == 1 else 'ies'} into {path}"
    return answer(as_json, TriageDocument(schema=1, entries=found), text)


def _change(path: Path, case: str, scope: dict[str, str], given: dict[str, Any]) -> TriageEntry:
    """Add or change an entry, and return it."""
    from hil.controller.workloads.triage.entries import find_same, is_expired, make_entry, put_entry
    from hil.controller.workloads.triage.triage_file import update_triage

    made: list[TriageEntry] = []

    def change(entries: Sequence[TriageEntry]) -> Sequence[TriageEntry]:
        same = find_same(entries, make_entry(case=case, state="new", **scope))
        values: dict[str, Any] = {"case": case, "state": "new", **scope} if same is None else same.to_json()
        if given.get("state") not in (None, "wontfix"):
            values["until"] = None
        if "outcomes" in given:
            values["stage"] = ""
        made.append(make_entry(**{**values, **given, "changed": time.time()}))
        today = date.today()
        if "until" in given and is_expired(made[0], today):
            hint = f"today is {today}; give today or a later date"
            raise UsageError(f"--until {made[0].until} is in the past", hint=hint)
        return put_entry(entries, made[0])

    update_triage(path, change)
    return made[0]


def _answer_entry(as_json: bool, entry: TriageEntry) -> int:
    from hil.controller.records.decisions.triage import TriageDocument

    return answer(as_json, TriageDocument(schema=1, entries=[entry]), show=lambda: _print_entries([entry]))


def _require_file(path: Path) -> None:
    from hil.controller.storage.paths import path_exists

    if not path_exists(path):
        raise UsageError(
            f"file {path} not found",
            hint=f"{suggest_path(path)}give another file, or create entries with hil triage set",
        )


def _print_entries(entries: Sequence[TriageEntry]) -> None:
    from hil.controller.storage.screen.console import make_table_console
    from hil.controller.storage.screen.texts import make_table

    heads = ("state", "case", "suite", "flow", "board", "outcome", "owner", "issue", "note")
    if not entries:
        click.echo("no entries")
        return
    make_table_console().print(make_table(heads, map(_describe_entry, entries), whole=("state", "case")))


def _describe_entry(entry: TriageEntry) -> tuple[str, ...]:
    return (
        f"{entry.state} until {entry.until}" if entry.until else entry.state,
        *(entry.case, entry.suite, entry.flow, entry.board, ", ".join(entry.outcomes)),
        *(entry.owner, entry.issue, entry.note),
    )
