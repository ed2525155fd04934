"""Write a matrix to the terminal, and as CSV, Markdown, HTML and JUnit."""

from __future__ import annotations

import html
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.etree import ElementTree

from hil.controller.records.matrix import MatrixRecord, StoredTarget
from hil.controller.records.outputs import Origin, list_software_devices
from hil.controller.storage.outcomes import ABSENT, NOT_RUN, classify_outcome
from hil.controller.storage.runs import MATRIX, write_file, write_json
from hil.controller.storage.screen.texts import format_count, format_seconds, line, make_plain, make_table
from hil.controller.workloads.matrix.report import (
    MatrixCell,
    MatrixReport,
    MatrixRow,
    TargetResults,
    load_matrix,
)
from hil.controller.workloads.suites.reports.junit import format_junit_document, make_junit_suite
from hil.controller.workloads.suites.reports.links import iter_links
from hil.controller.workloads.suites.reports.page import digest_page_part
from hil.controller.workloads.suites.reports.summary import COLOURS, escape_text, format_markdown_table, format_name
from hil.controller.workloads.suites.reports.tables import format_csv

if TYPE_CHECKING:
    from rich.console import Console

DIFFERS = "differs"
_SHOWN = 40  # maximum rows on the terminal
_REASONS = 20
_ROWS = 2000  # maximum rows in Markdown; GitHub accepts 1 MiB for a step summary
_MARK = "*"


def write_matrix(report: MatrixReport, folder: Path) -> None:
    """Write matrix.csv, matrix.md, matrix.html and junit.xml, all atomically. Raises StorageError on failure."""
    files = {
        "matrix.csv": format_matrix_csv(report),
        "matrix.md": format_matrix_markdown(report),
        "matrix.html": format_matrix_html(report, folder),
        "junit.xml": format_matrix_junit(report, folder),
    }
    for name, text in files.items():
        write_file(folder / name, text, make_folder=True)


def write_targets(folder: Path, title: str, targets: Sequence[str], origin: Origin | None) -> Path:
    """Create a matrix from the runs in a directory, and write the reports. Return the path of the HTML page.

    Args:
        targets: names of the runs' directories.
        origin: origin of the runs.

    Raises:
        UsageError: a run is unreadable.
        StorageError: the directory cannot be written.
    """
    head = MatrixRecord(
        schema=1,
        id=folder.name,
        title=title,
        created=time.time(),
        origin=origin,
        targets=[StoredTarget(name=name) for name in targets],
    )
    write_json(folder / MATRIX, head.to_json())
    write_matrix(load_matrix(folder), folder)
    return folder / "matrix.html"


def format_matrix_csv(report: MatrixReport) -> str:
    """Return a row per case: whether the case differs, and columns with the targets' outcome and statistics."""
    several = [f"{target.name} {name}" for target in report.targets for name in report.statistics]
    header = ["id", "model", "layer", "op", DIFFERS, *(target.name for target in report.targets), *several]
    rows = (
        [
            *(row.id, row.model, row.layer, row.op, row.differs),
            *(cell.word for cell in row.cells),
            *(cell.statistics.get(name) for cell in row.cells for name in report.statistics),
        ]
        for row in report.rows
    )
    return format_csv(header, rows)


def format_matrix_markdown(report: MatrixReport) -> str:
    """Return the table with differing rows first and marked, then the reasons of failures."""
    rows = sorted(report.rows, key=lambda row: (not row.differs, not row.fails))
    shown = [
        (
            f"**{format_name(row.id)}** {DIFFERS}" if row.differs else format_name(row.id),
            *(escape_text(_format_cell(cell)) for cell in row.cells),
        )
        for row in rows[:_ROWS]
    ]
    totals = ("", *(escape_text(format_totals(target)) for target in report.targets))
    lines = [
        f"## {escape_text(report.title)}: {_summarize_report(report)}\n",
        *(f"> **{escape_text(note)}**\n" for note in report.notes),
        *format_markdown_table(["case", *(escape_text(target.name) for target in report.targets)], [totals, *shown]),
        "",
    ]
    if len(rows) > _ROWS:
        lines.append(f"... and {format_count(len(rows) - _ROWS, 'more case')}: see matrix.csv\n")
    if reasons := list(_list_failures(report, rows[:_ROWS])):
        lines += ["### Reasons\n"]
        lines += [
            f"- {format_name(row.id)}, {escape_text(target.name)}: {escape_text(_format_reason(cell))}"
            for row, target, cell in reasons
        ]
        lines += [""]
    return "\n".join(lines)


def format_matrix_junit(report: MatrixReport, folder: Path) -> str:
    """Return a test suite per target. A target that could not run is an error; differing cases are marked."""
    differing = {make_plain(row.id): _format_outcomes(report, row) for row in report.differing}
    suites = []
    for target in report.targets:
        suite = make_junit_suite(target.run, f"{report.title} {target.name}", target.name, folder)
        for case in suite.findall("testcase"):
            if text := differing.get(case.get("name", "")):
                out = case.find("system-out")
                out = ElementTree.SubElement(case, "system-out") if out is None else out
                out.text = "\n".join(filter(None, (out.text, f"{DIFFERS}: {text}")))
        if target.error is not None:
            case = ElementTree.SubElement(
                suite, "testcase", classname="hil.matrix", name=make_plain(target.name), time="0"
            )
            message = line(target.error.message)
            ElementTree.SubElement(case, "error", message=message, type=make_plain(target.error.outcome or "error"))
        suites.append(suite)
    return format_junit_document(suites)


def _format_outcomes(report: MatrixReport, row: MatrixRow) -> str:
    """Return text such as ``sim PASS, sim-undeclared FAIL``."""
    pairs = zip(report.targets, row.cells, strict=True)
    return ", ".join(f"{target.name} {cell.word}" for target, cell in pairs)


def print_matrix(console: Console, report: MatrixReport, *, where: Path | None = None) -> None:
    """Print the table, then the reasons of failures.

    Differing and failing rows are first; at most 40 rows are printed.
    """
    from rich.padding import Padding
    from rich.text import Text

    console.print(Text(f"{report.title}: {_summarize_report(report)}", style="bold"))
    for note in report.notes:
        console.print(Text(f"  {note}", style="yellow"))
    rows = sorted(report.rows, key=lambda row: (not row.differs, not row.fails))
    heads = ["", "case", *(target.name for target in report.targets)]
    lines = [
        (
            Text(_MARK if row.differs else " ", "bold yellow"),
            Text(row.id, overflow="fold"),
            *(Text(_format_cell(cell), COLOURS[_classify_cell(cell)]) for cell in row.cells),
        )
        for row in rows[:_SHOWN]
    ]
    totals = ["", "", *(Text(format_totals(target), "dim") for target in report.targets)]
    console.print(make_table(heads, [*lines, totals]))
    if len(rows) > _SHOWN:
        console.print(Text(f"and {format_count(len(rows) - _SHOWN, 'more case')}", style="dim"))
    reasons = list(_list_failures(report, rows))
    for row, target, cell in reasons[:_REASONS]:
        console.print(Text.assemble((cell.word, COLOURS[_classify_cell(cell)]), f"  {row.id}  ", (target.name, "bold")))
        console.print(Padding(Text(_format_reason(cell)), (0, 0, 0, 2), expand=False))
        if cell.record is not None and cell.record.repeat:
            console.print(Text(f"  {cell.record.repeat}", style="cyan"), soft_wrap=True)
    if len(reasons) > _REASONS:
        console.print(Text(f"and {len(reasons) - _REASONS} more", style="dim"))
    if where is not None:
        console.print(Text(f"stored in {where}; open {where / 'matrix.html'}"), soft_wrap=True)


def format_totals(target: TargetResults) -> str:
    """Return text such as ``7 PASS, 2 FAIL``."""
    counts = Counter(record.outcome for record in target.run.records)
    if target.run.missing:
        counts[NOT_RUN] = len(target.run.missing)
    if target.error is not None:
        counts[target.error.outcome or "error"] += 0
    return ", ".join(f"{count} {word}" if count else word for word, count in sorted(counts.items())) or "no cases run"


def _summarize_report(report: MatrixReport) -> str:
    cases, targets = format_count(len(report.rows), "case"), format_count(len(report.targets), "target")
    count = len(report.differing)
    how = f"{count} {'differs' if count == 1 else 'differ'}" if count else "no differences"
    return f"{cases} on {targets}, {how}"


def _classify_cell(cell: MatrixCell) -> str:
    return "quiet" if cell.word in (NOT_RUN, ABSENT) else classify_outcome(cell.word)


def _format_cell(cell: MatrixCell) -> str:
    """Return a cell's outcome and device time."""
    record = cell.record
    if record is None or record.device_p50_ns is None:
        return cell.word
    how = " cold" if record.cold else f" ({record.iterations})"
    how += " software" if list_software_devices(record.placement) else ""
    return f"{cell.word} {format_seconds(record.device_p50_ns / 1e9)}{how}"


def _format_reason(cell: MatrixCell) -> str:
    hint = line(cell.record.hint) if cell.record is not None else ""
    return cell.message + (f" (hint: {hint})" if hint else "")


def _list_failures(
    report: MatrixReport, rows: Iterable[MatrixRow]
) -> Iterator[tuple[MatrixRow, TargetResults, MatrixCell]]:
    """Yield the failed cells with messages. Errors of whole targets are in the notes instead."""
    for row in rows:
        for target, cell in zip(report.targets, row.cells, strict=True):
            if cell.record is not None and _classify_cell(cell) in ("fail", "error", "board") and cell.message:
                yield row, target, cell


_STYLE = """
:root { color-scheme: light dark; --line: #8886; --pass: #137343; --fail: #bd2036; --error: #7b35a8; --board: #8f5300;
  --quiet: #5d6673; --mark: #e8b53a33; }
@media (prefers-color-scheme: dark) { :root { --pass: #58c793; --fail: #ff8490; --error: #cf9df0; --board: #f0b865;
  --quiet: #a0aab8; } }
body { margin: 0 auto; padding: 20px; max-width: 1560px; font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 4px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { position: sticky; top: 0; background: Canvas; }
tbody th { font: 12.5px ui-monospace, monospace; overflow-wrap: anywhere; min-width: 180px; }
tr.differs > * { background: var(--mark); }
.pass { color: var(--pass); } .fail { color: var(--fail); } .error { color: var(--error); }
.board { color: var(--board); } .quiet { color: var(--quiet); }
small { display: block; color: var(--quiet); font-weight: 400; }
details > p, details > pre { margin: 4px 0; max-width: 60ch; overflow-wrap: anywhere; white-space: pre-wrap;
  color: CanvasText; }
summary { cursor: pointer; }
#only:checked ~ .scroll tr.same { display: none; }
"""


def format_matrix_html(report: MatrixReport, folder: Path) -> str:
    """Return a page without requests or scripts. Texts from models, tools and boards are data.

    Args:
        folder: the directory of the page. Links to the targets' reports are relative to this directory.
    """
    heads = "".join(f"<th scope=col>{_build_html_head(target, folder)}</th>" for target in report.targets)
    body = "\n".join(_build_html_row(row, report.targets, folder) for row in report.rows)
    notes = "".join(f"<p class=board>{_escape_text(note)}</p>" for note in report.notes)
    policy = f"default-src 'none'; img-src data:; style-src {digest_page_part(_STYLE)}; base-uri 'none'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape_text(report.title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<h1>{_escape_text(report.title)}</h1>
<p>{_escape_text(_summarize_report(report))}</p>
{notes}
<input type="checkbox" id="only"> <label for="only">only differences</label>
<div class="scroll"><table>
<thead><tr><th scope=col>case</th>{heads}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>
</body>
</html>
"""


def _escape_text(text: str) -> str:
    return html.escape(make_plain(text))


def _build_html_head(target: TargetResults, folder: Path) -> str:
    name, page = _escape_text(target.name), target.run.folder / "report.html"
    if page.exists():
        name = f'<a href="{html.escape(quote(os.path.relpath(page, folder)))}">{name}</a>'
    run = target.run
    facts = ", ".join(filter(None, (run.flow, run.runtime if run.runtime != run.flow else "", ", ".join(run.boards))))
    return f"{name}<small>{_escape_text(facts)}</small><small>{_escape_text(format_totals(target))}</small>"


def _build_html_row(row: MatrixRow, targets: Sequence[TargetResults], folder: Path) -> str:
    mark = f"<small>{DIFFERS}</small>" if row.differs else ""
    cells = "".join(
        f"<td class={_classify_cell(cell)}>{_build_html_cell(cell, target, folder)}</td>"
        for target, cell in zip(targets, row.cells, strict=True)
    )
    return f"<tr class={DIFFERS if row.differs else 'same'}><th scope=row>{_escape_text(row.id)}{mark}</th>{cells}</tr>"


def _build_html_cell(cell: MatrixCell, target: TargetResults, folder: Path) -> str:
    numbers = _escape_text(_format_numbers(cell))
    word = f"{_escape_text(cell.word)}<small>{numbers}</small>" if numbers else _escape_text(cell.word)
    parts = [f"<p>{_escape_text(part)}</p>" for part in (cell.message, cell.record.hint if cell.record else "") if part]
    if cell.record is not None and cell.record.repeat and parts:
        parts.append(f"<pre>{_escape_text(cell.record.repeat)}</pre>")
    if cell.record is not None and parts:
        links = iter_links(target.run, cell.record, folder)
        parts += [f'<a href="{html.escape(quote(where))}">{_escape_text(what)}</a> ' for what, where in links]
    return f"<details><summary>{word}</summary>{''.join(parts)}</details>" if parts else word


def _format_numbers(cell: MatrixCell) -> str:
    """Return text such as ``max abs 2.9e-06, SQNR 138 dB, 59 us (20)``."""
    found = cell.statistics
    parts = [
        f"{name} {_format_number(found[key])}{unit}"
        for key, name, unit in (("max_abs", "max abs", ""), ("sqnr_db", "SQNR", " dB"))
        if key in found
    ]
    if "device_p50_ms" in found:
        how = "cold" if found.get("cold") else format_count(int(found["iterations"]), "iteration")
        parts.append(f"{format_seconds(found['device_p50_ms'] / 1e3)} ({how})")
    return ", ".join(parts)


def _format_number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
