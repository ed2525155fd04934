"""Draws docs/images/suite-report*.png: a real run's HTML report at two widths. Called by make_report_screenshot."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = ["suite", "run", "models", "--flow", "iree", "--out", "hil-suites/models"]
PICTURES = {"suite-report.png": (1280, 1240), "suite-report-narrow.png": (390, 1240)}
LARGEST = 200_000  # bytes


def main(root: Path) -> None:
    sys.path.insert(0, str(root / "tests"))
    from browser import NAMES, Page, find_browser

    browser = find_browser()
    if browser is None:
        sys.exit(f"no browser on PATH ({', '.join(NAMES)}); on Debian and Ubuntu: apt install chromium")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run([sys.executable, "-m", "hil.controller.cli.main", *COMMAND], cwd=folder, env=environment)
        if done.returncode not in (0, 1, 3):
            sys.exit(f"hil {' '.join(COMMAND)} ended with exit code {done.returncode}")
        report = Path(folder) / COMMAND[-1] / "report.html"
        for name, (width, height) in PICTURES.items():
            with Page(browser, width=width, height=height) as page:
                page.open(report.as_uri())
                # The first case of the table that was compared, unfolded.
                page.run("showCase((sorted(chosen()).find(one => one.outputs) || DATA.cases[0]).id); scrollTo(0, 0)")
                target = root / "docs" / "images" / name
                page.screenshot(target)
            size = target.stat().st_size
            if size > LARGEST:
                sys.exit(f"{target.relative_to(root)} has {size} bytes, more than {LARGEST}")
            print(f"{target.relative_to(root)}: {size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
