"""Reports link the files of a case with relative links."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from support.suite_runs import case, suite_run

from hil.controller.workloads.suites.reports import write_reports
from hil.controller.workloads.suites.reports.links import PICTURE, iter_links
from hil.controller.workloads.suites.reports.results import load_run
from hil.controller.workloads.suites.store import SuiteDirectory


def kept(folder: Path, number: int) -> str:
    """Save the tensors of a failing case; return the compare command."""
    name, run = f"c{number}", SuiteDirectory(folder / "run")
    (actual,) = run.save_tensors(name, "outputs", {"y": np.float32([[1, 2], [3, 4]])})
    (wanted,) = run.save_tensors(name, "references", {"y": np.float32([[1, 2], [3, 5]])})
    return f"hil compare {actual} {wanted} --rtol 1e-3 --atol 1e-4 --plot diff.png"


def failed(folder: Path, count: int = 1) -> Path:
    records = [
        case(f"c{number}", "FAIL", diff=kept(folder, number), directories={"ir": f"../ir/c{number}"})
        for number in range(count)
    ]
    (folder / "ir/c0").mkdir(parents=True)
    return suite_run(folder / "run", records)


def test_reports_link_files_of_failing_case(tmp_path: Path) -> None:
    folder = failed(tmp_path)
    write_reports(folder)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (tmp_path / "run").rename(moved / "run")
    (tmp_path / "ir").rename(moved / "ir")
    run = load_run(moved / "run")
    links = dict(iter_links(run, run.records[0]))
    assert links == {"outputs": "cases/c0/outputs", "references": "cases/c0/references", "ir": "../ir/c0"}
    texts = {name: (run.folder / name).read_text() for name in ("summary.md", "junit.xml", "report.html")}
    for what, where in links.items():
        assert (run.folder / where).is_dir()
        assert f"[{what}]({where})" in texts["summary.md"]
        assert f"{what}: {where}" in texts["junit.xml"]
        assert f'["{what}","{where}"]' in texts["report.html"]
    assert not re.search(re.escape(str(tmp_path)) + "(?!.*hil compare)", texts["summary.md"])


def test_reports_link_compiler_reproducer(tmp_path: Path) -> None:
    (tmp_path / "cases/a/logs/compile-failure").mkdir(parents=True)
    run = load_run(suite_run(tmp_path, [case("a", "COMPILE_CRASH", folder="cases/a")]))
    assert dict(iter_links(run, run.records[0])) == {
        "logs": "cases/a/logs",
        "compiler failure": "cases/a/logs/compile-failure",
    }


def test_reports_do_not_link_missing_files(tmp_path: Path) -> None:
    run = load_run(suite_run(tmp_path, [case("a", "FAIL", folder="cases/a", directories={"ir": "../gone"})]))
    assert list(iter_links(run, run.records[0])) == []


@pytest.mark.ci
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_first_failing_cases_have_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_PICTURES", "1")
    folder = failed(tmp_path, 2)
    write_reports(folder)
    assert (folder / "cases/c0" / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert not (folder / "cases/c1" / PICTURE).exists()
    assert f"[difference](cases/c0/{PICTURE})" in (folder / "summary.md").read_text()


def test_unreadable_tensors_skip_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_PICTURES", "5")
    folder = failed(tmp_path)
    next((folder / "cases/c0/outputs").glob("*.npy")).write_bytes(b"no")
    write_reports(folder)
    assert not (folder / "cases/c0" / PICTURE).exists()
