"""What a suite's run tells people and machines: CSV, JUnit, Markdown, HTML, the last screen, and two runs side by side.

All of it is made from the run's ``suite.json`` and ``results.jsonl`` and can be made again at any time.
"""

from __future__ import annotations

from pathlib import Path

from hil.controller.storage.runs import write_file
from hil.controller.workloads.suites.reports.junit import junit_xml
from hil.controller.workloads.suites.reports.links import draw_pictures
from hil.controller.workloads.suites.reports.page import report_html
from hil.controller.workloads.suites.reports.results import load_run
from hil.controller.workloads.suites.reports.summary import summary_markdown
from hil.controller.workloads.suites.reports.tables import cases_csv, outputs_csv

_FILES = {
    "results.csv": cases_csv,
    "outputs.csv": outputs_csv,
    "junit.xml": junit_xml,
    "summary.md": summary_markdown,
    "report.html": report_html,
}


def write_reports(folder: Path) -> None:
    """Write results.csv, outputs.csv, junit.xml, summary.md and report.html of a run, each atomically, and pictures.

    Args:
        folder: the run's; it may still be going on, or have been cut off: then the reports say what is missing.

    Raises:
        UsageError: the folder holds no suite run.
        StorageError: it cannot be written.
    """
    run = load_run(folder)
    if not run.interrupted:
        draw_pictures(run)
    for name, make in _FILES.items():
        write_file(folder / name, make(run))
