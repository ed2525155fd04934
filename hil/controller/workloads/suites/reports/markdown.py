"""Markdown fit for the summary of a CI job, which has to stay below a megabyte."""

from __future__ import annotations

import itertools
import re
import time

from hil.controller.storage.texts import counted, line, seconds
from hil.controller.workloads.suites.record import CaseRecord
from hil.controller.workloads.suites.reports.load import SuiteResults
from hil.controller.workloads.suites.reports.totals import Totals

_LARGEST = 900_000  # bytes; GitHub takes 1 MiB a step
_ROWS = 200
_GROUPS = 30
_SYMBOLS = re.compile(r"([\\`*_{}\[\]<>#|~&$])")
_CODE = re.compile(r"[\w.+:/, -]+", re.ASCII)


def summary_markdown(run: SuiteResults) -> str:
    """Totals, failures by operator and by stage, the failing cases, and the commands that repeat them."""
    totals = Totals.of(run)
    text = "\n".join([*_head(run, totals), *_groups(totals)])
    failing = totals.failing[:_ROWS]
    if not failing:
        return text
    room = (_LARGEST - len(text.encode(errors="replace"))) // 2
    rows = _within(room, [_row(one) for one in failing])
    commands = _within(room, [line(one.repeat, 2000) for one in failing if one.repeat])
    parts = [text, "### What failed\n", "| case | outcome | stage | message |\n|---|---|---|---|", *rows, ""]
    if more := len(totals.failing) - len(rows):
        parts.append(f"... and {counted(more, 'case')} more: report.html and results.csv have them all.\n")
    if commands:
        # A fence is closed by as many backticks as opened it.
        fence = "`" * (1 + max([2, *(len(ticks) for one in commands for ticks in re.findall("`+", one))]))
        parts += ["<details><summary>Commands that repeat them</summary>\n", f"{fence}sh", *commands, f"{fence}\n"]
        parts += ["</details>\n"]
    return "\n".join(parts)


def _row(record: CaseRecord) -> str:
    message = record.message + (f" ({record.confirmed})" if record.confirmed else "")
    return f"| {as_name(record.id)} | {as_text(record.outcome)} | {as_text(record.stage)} | {as_text(line(message))} |"


def _within(room: int, lines: list[str]) -> list[str]:
    """As many of the lines as fit into so many bytes."""
    sizes = itertools.accumulate(len(one.encode(errors="replace")) + 1 for one in lines)
    return [one for one, size in zip(lines, sizes, strict=True) if size <= room]


def _head(run: SuiteResults, totals: Totals) -> list[str]:
    passed = totals.outcomes.get("PASS", 0)
    verdict = (
        f"{counted(len(totals.failing), 'case')} of {len(run.records)} failed"
        if totals.failing
        else (f"{passed} of {len(run.records)} passed")
    )
    boards = ", ".join(run.boards)
    facts = [f"on {as_text(boards)}" if boards else ""]
    if run.started is not None:
        facts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started)))
        if run.finished is not None:
            facts.append(seconds(run.finished - run.started))
    lines = [f"## {as_text(run.suite)}, flow {as_text(run.flow)}: {verdict}\n", ", ".join(filter(None, facts)) + "\n"]
    lines += [f"> **{as_text(note)}**\n" for note in run.notes]
    lines += [
        "| outcome | cases |\n|---|---:|",
        *(f"| {key} | {count} |" for key, count in totals.outcomes.items()),
        "",
    ]
    return lines + ([*(f"- {as_text(words)}" for words in totals.words), ""] if totals.words else [])


def _groups(totals: Totals) -> list[str]:
    if not totals.failing:
        return []
    ops = [
        f"| {as_name(op)} | {count} | {totals.run_by_op[op]} |" for op, count in list(totals.by_op.items())[:_GROUPS]
    ]
    rest = len(totals.by_op) - len(ops)
    return [
        "### Failures by stage\n",
        "| stage | failed |\n|---|---:|",
        *(f"| {as_text(stage)} | {count} |" for stage, count in totals.by_stage.items()),
        "",
        "### Failures by operator\n",
        "| operator | failed | of |\n|---|---:|---:|",
        *ops,
        "",
        *([f"... and {counted(rest, 'operator')} more.\n"] if rest else []),
    ]


def as_name(text: str) -> str:
    """A name as code, where code can hold it."""
    text = line(text)
    return f"`{text}`" if _CODE.fullmatch(text) else as_text(text)


def as_text(text: str) -> str:
    """A text that Markdown and HTML leave as it is."""
    return _SYMBOLS.sub(r"\\\1", line(text))
