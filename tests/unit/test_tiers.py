"""Which tests run when: the marks, the folders, and the paths that are named (scripts/test --help)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
BENCH, MUTATIONS = "tests/integration/test_bench.py", "tests/unit/compare/test_mutations.py"
(DAILY,) = re.findall(r"^marked='(.+)'", (ROOT / "scripts/test").read_text(), re.M)


def collected(*arguments: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.split("[")[0] for line in done.stdout.splitlines() if "::" in line}


def test_alone_it_runs_what_is_marked_daily_and_what_is_not_for_ci():
    this = Path(__file__).relative_to(ROOT).as_posix()
    found = collected("-m", DAILY, "-o", f"testpaths={BENCH} {MUTATIONS} {this}")
    assert f"{BENCH}::test_a_model_is_measured_and_everything_is_stored" in found
    assert f"{this}::test_a_path_that_is_named_runs_whatever_its_marks" in found
    assert not [name for name in found if name.startswith(MUTATIONS)]
    assert len([name for name in found if name.startswith(BENCH)]) == 1


def test_a_path_that_is_named_runs_whatever_its_marks():
    every = set(re.findall(r"^def (test_\w+)", (ROOT / BENCH).read_text(), re.M))
    assert collected("-m", DAILY, BENCH) == {f"{BENCH}::{name}" for name in every}


def test_a_worker_of_several_runs_whatever_is_named_too():
    quick = "tests/integration/test_tflite.py::test_tensors_of_one_name_in_a_graph_without_signatures_are_refused"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "1", "-m", DAILY, quick]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_pytest_itself_leaves_out_what_is_slow_only():
    found = collected(BENCH)
    assert f"{BENCH}::test_a_crash_is_the_outcome" in found
    assert f"{BENCH}::test_a_slowdown_of_10_percent_is_found" not in found


def test_each_of_several_workers_begins_with_some_of_what_takes_long_and_nothing_is_lost(monkeypatch):
    from conftest import LONG, _long_first

    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    items = [SimpleNamespace(path=Path("tests") / name, n=n) for n, name in enumerate(("a.py", LONG[0], "b.py") * 7)]
    ordered = _long_first(items)
    assert sorted(item.n for item in ordered) == list(range(len(items)))
    assert [ordered[at].path.name for at in (0, 6, 12)] == [LONG[0]] * 3
