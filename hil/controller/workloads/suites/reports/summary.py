"""Summarize a suite run on the terminal and in Markdown."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from hil.controller.pipeline.records.evidence import format_evidence
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.outcomes import classify_outcome
from hil.controller.storage.screen.texts import format_count, format_seconds, line
from hil.controller.workloads.suites.reports.links import iter_links
from hil.controller.workloads.suites.reports.results import SuiteResults, Totals, format_timed, list_slowest, load_run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS = {"pass": "green", "fail": "red", "error": "magenta", "board": "yellow", "quiet": "dim"}
# Limits on the terminal.
_FAILING = 20
_GROUPS = 12
# Limits in Markdown. GitHub accepts 1 MiB for a step summary.
_MAX_BYTES = 900_000
_ROWS = 200
_MARKDOWN_GROUPS = 30
_SLOWEST = 10
_SYMBOLS = re.compile(r"([\\`*_{}\[\]<>#|~&$])")
_CODE = re.compile(r"[\w.+:/, -]+", re.ASCII)


def print_summary(console: Console, folder: Path) -> None:
    """Print totals, failures by stage and operator, and the first 20 failing cases with the commands that repeat them.

    Raises:
        UsageError: the directory is not a suite run.
    """
    from rich.padding import Padding
    from rich.text import Text

    run = load_run(folder)
    totals = Totals(run)
    heading = [Text(run.title, style="bold")]
    heading += [Text(f"{count} {key}", style=COLOURS[classify_outcome(key)]) for key, count in totals.outcomes.items()]
    if run.started is not None and run.finished is not None:
        heading.append(Text(format_seconds(run.finished - run.started), style="dim"))
    console.print(Text("   ").join(heading))
    for note in run.notes:
        console.print(Text(f"  {note}", style="yellow"))
    for note in totals.remarks:
        console.print(Text(f"  {note}"))
    if totals.failing:
        console.print(_build_counts_table("failed in stage", totals.by_stage))
        console.print(_build_counts_table("failed at operator", totals.by_op))
    groups = _group_similar(totals.failing)
    for record, others in groups[:_FAILING]:
        head = Text.assemble((record.outcome, COLOURS[classify_outcome(record.outcome)]), "  ", (record.id, "bold"))
        if record.confirmed:
            head.append(f"  {record.confirmed}", style="yellow")
        console.print(head)
        for text in filter(None, (line(record.message), record.hint and f"hint: {line(record.hint)}")):
            console.print(Padding(Text(text), (0, 0, 0, 2), expand=False))
        if record.repeat:
            # Do not wrap, so that users can copy the command.
            console.print(Text(f"  {record.repeat}", style="cyan"), soft_wrap=True)
        if links := list(iter_links(run, record)):
            console.print(Text(f"  files: {_format_places(run, record, links)}", style="dim"), soft_wrap=True)
        if others:
            console.print(Text(f"  and {format_count(others, 'more case')} with the same error", style="dim"))
    if more := sum(1 + others for _, others in groups[_FAILING:]):
        console.print(Text(f"and {format_count(more, 'more failing case')}", style="dim"))
    where, page = (shlex.quote(str(path)) for path in (folder, folder / "report.html"))
    console.print(Text(f"stored in {where}; open {page}"), soft_wrap=True)


def _format_places(run: SuiteResults, record: CaseRecord, links: Sequence[tuple[str, str]]) -> str:
    """Return text such as ``FOLDER (difference.png, inputs, ...), DIR/ID (ir)``, with shell-quoted paths."""
    inside = f"{record.folder}/"
    own = ", ".join(where.removeprefix(inside) for _, where in links if where.startswith(inside))
    places = [f"{shlex.quote(str(run.folder / record.folder))} ({own})"] if own else []
    for what, where in links:
        if what in record.directories:
            places.append(f"{shlex.quote(os.path.normpath(run.folder / where))} ({what})")
    return ", ".join(places)


def _group_similar(failing: Sequence[CaseRecord]) -> list[tuple[CaseRecord, int]]:
    """Group failing cases as (first case, number of other cases).

    Cases that lost the board with the same error form a group.
    """
    found: dict[object, list[CaseRecord]] = {}
    for record in failing:
        lost = classify_outcome(record.outcome) == "board"
        found.setdefault((record.message, record.hint) if lost else record.id, []).append(record)
    return [(alike[0], len(alike) - 1) for alike in found.values()]


def _build_counts_table(title: str, counts: Mapping[str, int]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    shown = list(counts.items())[:_GROUPS]
    text = ", ".join(f"{line(name, 40)} {count}" for name, count in shown)
    rest = sum(counts.values()) - sum(count for _, count in shown)
    table.add_row(Text(f"  {title}", style="dim"), Text(text + (f", others {rest}" if rest else "")))
    return table


def format_summary_markdown(run: SuiteResults) -> str:
    """Return totals, failures by operator and by stage, the failing cases, and the commands that repeat them."""
    totals = Totals(run)
    text = "\n".join([*_build_heading(run, totals), *_build_failure_sections(totals), *_build_slowest_section(run)])
    failing = totals.failing[:_ROWS]
    if not failing:
        return text
    room = (_MAX_BYTES - len(text.encode(errors="replace"))) // 2
    columns, cells = ["case", "outcome", "stage", "message"], [_build_row(one) for one in failing]
    if any(links := [_format_links(run, one) for one in failing]):
        columns, cells = [*columns, "files"], [[*row, link] for row, link in zip(cells, links, strict=True)]
    heads, *rows = format_markdown_table(columns, cells)
    rows = _limit_lines(room, rows)
    commands = _limit_lines(room, [line(one.repeat, 2000) for one in failing if one.repeat])
    parts = [text, "### Failed cases\n", heads, *rows, ""]
    if more := len(totals.failing) - len(rows):
        parts.append(f"... and {format_count(more, 'more case')}: see report.html and results.csv\n")
    facts = [f"- {format_name(one.id)}: {escape_text(text)}" for one in failing if (text := _format_evidence(one))]
    if facts := _limit_lines(room // 2, facts):
        parts += ["<details><summary>Evidence for the verdicts</summary>\n", *facts, "", "</details>\n"]
    if commands:
        # The closing fence needs as many backticks as the opening fence.
        fence = "`" * (1 + max([2, *(len(ticks) for one in commands for ticks in re.findall("`+", one))]))
        parts += ["<details><summary>Commands to repeat the cases</summary>\n", f"{fence}sh", *commands, f"{fence}\n"]
        parts += ["</details>\n"]
    return "\n".join(parts)


def _build_row(record: CaseRecord) -> list[str]:
    message = record.message + (f" ({record.confirmed})" if record.confirmed else "")
    return [format_name(record.id), escape_text(record.outcome), escape_text(record.stage), escape_text(line(message))]


def _format_evidence(record: CaseRecord) -> str:
    return line("; ".join(format_evidence(record)), 2000)


def _format_links(run: SuiteResults, record: CaseRecord) -> str:
    return " ".join(f"[{escape_text(what)}]({quote(where)})" for what, where in iter_links(run, record))


def _limit_lines(room: int, lines: list[str]) -> list[str]:
    """Return the first lines that fit into ``room`` bytes."""
    sizes = itertools.accumulate(len(one.encode(errors="replace")) + 1 for one in lines)
    return [one for one, size in zip(lines, sizes, strict=True) if size <= room]


def _build_heading(run: SuiteResults, totals: Totals) -> list[str]:
    passed, all_cases = totals.outcomes.get("PASS", 0), len(run.records)
    failed = f"{format_count(len(totals.failing), 'case')} of {all_cases} failed" if totals.failing else ""
    facts = [f"on {escape_text(', '.join(run.boards))}" if run.boards else ""]
    if run.started is not None:
        facts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started)))
        if run.finished is not None:
            facts.append(format_seconds(run.finished - run.started))
    return [
        f"## {escape_text(run.suite)}, flow {escape_text(run.flow)}: {failed or f'{passed} of {all_cases} passed'}\n",
        ", ".join(filter(None, facts)) + "\n",
        *(f"> **{escape_text(note)}**\n" for note in run.notes),
        *format_markdown_table(["outcome", "cases"], list(totals.outcomes.items())),
        "",
        *(f"- {escape_text(remark)}" for remark in totals.remarks),
        *([""] if totals.remarks else []),
    ]


def _build_failure_sections(totals: Totals) -> list[str]:
    if not totals.failing:
        return []
    stages = [(escape_text(stage), count) for stage, count in totals.by_stage.items()]
    ops = [(format_name(op), count, totals.run_by_op[op]) for op, count in totals.by_op.items()]
    rest = len(ops) - _MARKDOWN_GROUPS
    return [
        "### Failures by stage\n",
        *format_markdown_table(["stage", "failed"], stages),
        "\n### Failures by operator\n",
        *format_markdown_table(["operator", "failed", "cases"], ops[:_MARKDOWN_GROUPS]),
        "",
        *([f"... and {format_count(rest, 'more operator')}\n"] if rest > 0 else []),
    ]


def _build_slowest_section(run: SuiteResults) -> list[str]:
    ranked, note = list_slowest(run.records)
    if not (ranked or note):
        return []
    rows = [
        (
            format_name(one.id),
            *(format_seconds((ns or 0) / 1e9) for ns in (one.device_p50_ns, one.device_p90_ns)),
            format_timed(one),
        )
        for one in ranked[:_SLOWEST]
    ]
    table = [*format_markdown_table(["case", "median", "90th percentile", "sample"], rows), ""] if rows else []
    more = [f"... and {format_count(len(ranked) - len(rows), 'more case')}: see results.csv\n"]
    more = more if len(ranked) > len(rows) else []
    return ["### Slowest on the device\n", *table, *more, *([f"{escape_text(note)}\n"] if note else [])]


def format_markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str | int]]) -> list[str]:
    """Return the lines of a Markdown table.

    The first item contains the header and the separator line. Number columns are right-aligned.
    """
    rules = ["---:" if rows and isinstance(rows[0][place], int) else "---" for place in range(len(heads))]
    lines = [f"| {' | '.join(map(str, row))} |" for row in (heads, *rows)]
    return [f"{lines[0]}\n|{'|'.join(rules)}|", *lines[1:]]


def format_name(text: str) -> str:
    """Return a name in Markdown: as code if possible."""
    text = line(text)
    return f"`{text}`" if _CODE.fullmatch(text) else escape_text(text)


def escape_text(text: str) -> str:
    """Return a text with the symbols of Markdown and HTML escaped."""
    return _SYMBOLS.sub(r"\\\1", line(text))
