"""The `hil web` benchmark at a small size. Its limits apply to a quiet machine and the full size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_web_benchmark_reports_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.web", "--quick", "--json", "--keep", str(tmp_path)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    rows = {row["case"]: row for row in document["rows"]}
    assert all(row["value"] >= 0 for row in document["rows"])
    for case, bar in (
        ("first index of 900 results, pages being asked for all the while", "<= 300"),
        ("sessions, idle, p95", "<= 100"),
        ("session of 50,000 cases, idle, p95", "<= 100"),
        ("case, idle, p95", "<= 100"),
        ("a new session on the page, the longest", "<= 2"),
        ("looking at the folders, of one core, when nothing changes", "<= 3"),
        ("peak memory, all its processes", "<= 500"),
    ):
        assert rows[case]["bar"] == bar
    assert rows["session of 50,000 cases"]["rival"] == "one JSON read in full"
    # The written sessions stay for the next run.
    assert len([one for one in (tmp_path / "sessions").iterdir() if (one / "suite.json").exists()]) == 13
