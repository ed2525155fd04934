"""Which tests run when: marks, directories and explicit paths (scripts/test --help)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
BENCH, MUTATIONS = "tests/integration/test_bench.py", "tests/unit/compare/test_mutations.py"
(DAILY,) = re.findall(r"^marked='(.+)'", (ROOT / "scripts/test").read_text(), re.M)


def collected(*arguments: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.split("[")[0] for line in done.stdout.splitlines() if "::" in line}


def test_script_runs_daily_tests_without_ci_tests():
    this = Path(__file__).relative_to(ROOT).as_posix()
    found = collected("-m", DAILY, "-o", f"testpaths={BENCH} {MUTATIONS} {this}")
    assert f"{BENCH}::test_bench_measures_model_and_stores_results" in found
    assert f"{this}::test_named_path_runs_regardless_of_marks" in found
    assert not [name for name in found if name.startswith(MUTATIONS)]
    assert len([name for name in found if name.startswith(BENCH)]) == 1


def test_named_path_runs_regardless_of_marks():
    every = set(re.findall(r"^def (test_\w+)", (ROOT / BENCH).read_text(), re.M))
    assert collected("-m", DAILY, BENCH) == {f"{BENCH}::{name}" for name in every}


@pytest.mark.ci
def test_xdist_worker_runs_explicit_test():
    quick = "tests/unit/core/test_text.py::test_output_uses_only_wrapped_streams_and_console"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "1", "-m", DAILY, quick]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_pytest_deselects_only_slow_tests():
    found = collected(BENCH)
    assert f"{BENCH}::test_bench_reports_crash_as_outcome" in found
    assert f"{BENCH}::test_bench_detects_10_percent_slowdown" not in found


def test_long_first_spreads_long_tests_over_workers(monkeypatch):
    from conftest import LONG, _long_first

    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    items = [SimpleNamespace(path=Path("tests") / name, n=n) for n, name in enumerate(("a.py", LONG[0], "b.py") * 7)]
    ordered = _long_first(items)
    assert sorted(item.n for item in ordered) == list(range(len(items)))
    assert [ordered[at].path.name for at in (0, 6, 12)] == [LONG[0]] * 3
