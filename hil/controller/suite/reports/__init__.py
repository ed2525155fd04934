"""What a suite's run tells people and machines: CSV, JUnit, Markdown, HTML, the last screen, and two runs side by side.

All of it is made from the run's ``suite.json`` and ``results.jsonl`` and can be made again at any time.
"""

from __future__ import annotations

from pathlib import Path

from hil.controller.suite.reports.diff import RunDiff, diff_runs
from hil.controller.suite.reports.diff_texts import diff_markdown, print_diff
from hil.controller.suite.reports.load import SuiteResults, load_run
from hil.controller.suite.reports.terminal import print_summary

__all__ = [
    "RunDiff",
    "SuiteResults",
    "diff_markdown",
    "diff_runs",
    "load_run",
    "print_diff",
    "print_summary",
    "write_reports",
]


def write_reports(folder: Path) -> None:
    """Write results.csv, outputs.csv, junit.xml, summary.md and report.html of a run, each atomically.

    Args:
        folder: the run's; it may still be going on, or have been cut off: then the reports say what is missing.

    Raises:
        UsageError: the folder holds no suite run.
        StorageError: it cannot be written.
    """
    from hil.controller.suite.reports.junit import junit_xml
    from hil.controller.suite.reports.markdown import summary_markdown
    from hil.controller.suite.reports.page import report_html
    from hil.controller.suite.reports.tables import cases_csv, outputs_csv
    from hil.controller.suite.reports.texts import write_text

    run = load_run(folder)
    for name, make in {
        "results.csv": cases_csv,
        "outputs.csv": outputs_csv,
        "junit.xml": junit_xml,
        "summary.md": summary_markdown,
        "report.html": report_html,
    }.items():
        write_text(folder / name, make(run))
