"""Reports on suite runs: CSV, JUnit, Markdown, HTML, the terminal summary, and comparisons of two runs.

Reports are generated from ``suite.json`` and ``results.jsonl`` and can be regenerated at any time.
"""

from __future__ import annotations

from pathlib import Path

from hil.controller.storage.runs import write_file
from hil.controller.workloads.suites.reports.junit import format_junit
from hil.controller.workloads.suites.reports.links import draw_pictures
from hil.controller.workloads.suites.reports.page import report_html
from hil.controller.workloads.suites.reports.results import load_run
from hil.controller.workloads.suites.reports.summary import format_summary_markdown
from hil.controller.workloads.suites.reports.tables import format_cases_csv, format_outputs_csv

_FILES = {
    "results.csv": format_cases_csv,
    "outputs.csv": format_outputs_csv,
    "junit.xml": format_junit,
    "summary.md": format_summary_markdown,
    "report.html": report_html,
}


def write_reports(folder: Path) -> None:
    """Write results.csv, outputs.csv, junit.xml, summary.md, report.html and pictures of a run. All writes are atomic.

    Args:
        folder: the run's directory. The run may be unfinished; then the reports list the missing cases.

    Raises:
        UsageError: the directory is not a suite run.
        StorageError: a file cannot be written.
    """
    run = load_run(folder)
    if not run.interrupted:
        draw_pictures(run)
    for name, make in _FILES.items():
        write_file(folder / name, make(run))
