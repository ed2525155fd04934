"""Draws docs/images/suite-report*.png: a real run's HTML report at two widths. Called by make_report_screenshot."""

from __future__ import annotations

import tempfile
from pathlib import Path

from screenshots import IMAGES, installed_browser, run_hil, tell_size

COMMAND = ["suite", "run", "@models", "--flow", "iree", "--out", "hil-suites/models"]
PICTURES = {"suite-report.png": (1280, 1240), "suite-report-narrow.png": (390, 1240)}
LARGEST = 200_000  # bytes


def main() -> None:
    from support.browser import Page

    browser = installed_browser()
    with tempfile.TemporaryDirectory() as folder:
        run_hil(COMMAND, folder, codes=(0, 1, 3))
        report = Path(folder) / COMMAND[-1] / "report.html"
        for name, (width, height) in PICTURES.items():
            with Page(browser, width=width, height=height) as page:
                page.open(report.as_uri())
                # The first case of the table that was compared, unfolded.
                page.run("showCase((sorted(chosen()).find(one => one.outputs) || DATA.cases[0]).id); scrollTo(0, 0)")
                page.screenshot(IMAGES / name)
            tell_size(IMAGES / name, LARGEST)


if __name__ == "__main__":
    main()
